"""What Triton compiled is found again only for the same sources."""

import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import kept_triton  # noqa: E402


def test_another_text_or_name_of_a_source_is_another_digest(tmp_path):
    (tmp_path / "a").mkdir()
    source = tmp_path / "a/one.py"
    source.write_text("x = 1\n")
    first = kept_triton.digest(tmp_path)
    assert kept_triton.digest(tmp_path) == first
    source.write_text("x = 2\n")
    second = kept_triton.digest(tmp_path)
    source.rename(tmp_path / "a/two.py")
    assert len({first, second, kept_triton.digest(tmp_path)}) == 3


def test_what_was_made_of_other_sources_is_deleted_and_another_triton_s_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_triton, "KEPT", tmp_path)
    for name in (f"{triton.__version__}-0123456789abcdef", "1.0.0-0123456789abcdef"):
        (tmp_path / name).mkdir()
    own = kept_triton.folder.__wrapped__()
    assert own.name == f"{triton.__version__}-{kept_triton.digest()}"
    assert {p.name for p in tmp_path.iterdir()} == {own.name, "1.0.0-0123456789abcdef"}


def test_a_tool_is_asked_once_of_each_binary_and_options(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_triton, "folder", lambda: tmp_path)
    asked = tmp_path / "asked"
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\nimport sys\nopen({str(asked)!r}, 'a').write('x')\nprint(sys.argv[1])\n")
    tool.chmod(0o755)
    answers = [
        kept_triton.output(tool, options, binary, tmp_path)
        for options, binary in ((["-c"], b"1"), (["-c"], b"1"), (["-x"], b"1"), (["-c"], b"2"))
    ]
    assert answers == ["-c\n", "-c\n", "-x\n", "-c\n"]
    assert Path(asked).read_text() == "xxx"
