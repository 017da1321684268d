"""Options of `expertctl load` that another one would ignore: refused before a server is asked, and named."""

import pytest

from expertctl.cli import main
from expertctl.commands import load

NOBODY = "127.0.0.1:1"
"""No server: what is refused is refused before it is called."""


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--slo", "p99<1s", "--requests", "5"], "--slo: got --requests with it, want --duration"),
        (["--synthetic", "--routing", "recorded:F"], "--synthetic: got --routing recorded:F with it"),
    ],
)
def test_an_option_that_would_be_ignored(words, want, capsys):
    assert main(["load", NOBODY, *words]) == 2
    assert want in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--transport", "shm", "--digest"], "note: --digest: these requests travel over gRPC, though --transport shm"),
        (["--transport", "tcp", "--synthetic", "--digest"], "note: --synthetic and --digest: these requests travel"),
        (["--transport", "grpc", "--digest"], ""),
        (["--transport", "shm"], ""),
        (["--digest"], ""),
    ],
)
def test_a_transport_that_carries_none_of_the_requests_is_noted(words, note, monkeypatch, capsys):
    monkeypatch.setattr(load, "run_precisely", lambda work: work.close())
    monkeypatch.setattr(load, "finish", lambda args, outcome: 0)
    assert main(["load", NOBODY, *words]) == 0
    said = capsys.readouterr().err
    assert note in said
    assert ("note:" in said) == bool(note)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--slo", "p99<1s"),
        ("--rate", "5"),
        ("--rate", "5,6"),
        ("--concurrency", "2"),
        ("--concurrency", "1,2"),
        ("--requests", "5"),
        ("--duration", "1s"),
        ("--warmup", "0"),
        ("--warmup", "16"),
        ("--streams", "1"),
        ("--html", "r.html"),
        ("--hdr", "r.hgrm"),
        ("--routing", "recorded:F"),
    ],
)
def test_what_generate_does_not_do(flag, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["load", NOBODY, "--generate", "2", flag, value]) == 2
    assert f"--generate: got {flag}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
