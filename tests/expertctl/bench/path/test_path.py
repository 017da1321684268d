"""`expertctl bench path`: what it measures adds up, in the shape that programs read, as tables and as a picture."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from expertctl.bench.path import command
from expertctl.bench.path.bare import EventfdEcho, SocketEcho, bare_server
from expertctl.bench.path.measurements import STAGES, PathMeasurement, Samples, row_of, stages_us
from expertctl.bench.path.picture import draw
from expertctl.bench.path.probe import Probe
from expertctl.common.echo import echo_server
from expertctl.pictures.bars import COLOURS
from expertd.codec import ForwardResponseView, TensorView
from expertd.shm.region import supported
from expertd_client import ExpertClient
from expertd_client.tracing.stages import STAGES as TRACED
from expertd_client.transports.protocol import FunctionTransport

FIELDS = {
    "server",
    "transport",
    "client",
    "tokens",
    "hidden_size",
    "bytes",
    "callers",
    "p50_us",
    "p99_us",
    "requests_per_s",
    "kernel_us",
    "bare",
    "bare_us",
    "bare_requests_per_s",
    "stages_us",
}


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run_command(parser.parse_args(words))


GRID = ("--tokens", "1,3", "--callers", "1,2", "--hidden-size", "64", "--seconds", "0.2")


@pytest.mark.timeout(60)
def test_json_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "path.svg"
    assert run("--json", "--svg", str(svg), *GRID, "--client", "asyncio,threads", "--transport", "inline,cuda_ipc") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["refused"]) == {"echo cuda_ipc asyncio", "echo cuda_ipc threads"}
    assert all("no such transport" in why for why in found["refused"].values())
    keys = [(r["transport"], r["client"], r["tokens"], r["callers"]) for r in found["rows"]]
    assert keys == [("inline", c, m, n) for n in (1, 2) for m in (1, 3) for c in ("asyncio", "threads")]
    for r in found["rows"]:
        assert set(r) == FIELDS
        assert r["bytes"] == 2 * r["tokens"] * r["hidden_size"] == 128 * r["tokens"]
        assert 0 < r["p50_us"] <= r["p99_us"]
        assert min(r["requests_per_s"], r["bare_us"], r["bare_requests_per_s"], r["kernel_us"]) > 0
        assert list(r["stages_us"]) == list(STAGES)
        assert sum(r["stages_us"].values()) == pytest.approx(r["p50_us"], abs=1)
        assert r["stages_us"]["kernel"] == r["kernel_us"] < r["stages_us"]["wire"]
    drawn = ET.parse(svg).getroot()
    assert len(drawn.findall('.//{*}path[@class="bare"]')) == len(found["rows"]) + 1


@pytest.mark.timeout(60)
def test_ready_made_messages_cost_no_client(tiny_echo: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tokens", "2", "--callers", "1,3", "--seconds", "0.2", "--hidden-size", "32", "--client", "bytes")
    assert run(tiny_echo, "--json", "--transport", "inline,tcp", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert "echo tcp bytes" in found["refused"]
    assert [(r["server"], r["callers"]) for r in found["rows"]] == [(s, n) for n in (1, 3) for s in (tiny_echo, "echo")]
    for r in found["rows"]:
        assert min(r["p50_us"], r["requests_per_s"], r["kernel_us"], r["stages_us"]["decode"]) > 0
        assert r["stages_us"]["client_encode"] == r["stages_us"]["client_decode"] == 0


@pytest.mark.timeout(60)
def test_a_server_beside_the_echo_and_tables(tiny_echo: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tokens", "1", "--callers", "1", "--seconds", "0.1", "--hidden-size", "64")
    assert run(tiny_echo, "--transport", "inline,shm,tcp", "--client", "threads,asyncio", *words) == 0
    out = capsys.readouterr().out
    assert "medians of the stages" in out
    assert out.count(f"{tiny_echo} │ inline") == 4
    assert out.count("echo            │ inline") == 4
    if not supported():
        assert out.count("echo            │ shm") == 4
        assert out.count("echo            │ tcp") == 4


def test_more_tokens_than_the_server_takes(tiny_echo: str) -> None:
    with pytest.raises(ValueError, match="got 17, want at most 16"):
        run(tiny_echo, "--tokens", "1,17")


def test_echo(tiny_echo: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 32), np.float32).astype(ml_dtypes.bfloat16)
    with ExpertClient(tiny_echo) as client:
        answer = client.forward(0, x, np.zeros((5, 8), np.int32), np.ones((5, 8), np.float32), timeout_s=10)
    np.testing.assert_array_equal(answer.output, x)
    assert (answer.routes_computed, answer.timing.backend) == (40, "echo")


@pytest.fixture(scope="module")
def tiny_echo():
    with echo_server(32, 16) as address:
        yield address


@pytest.mark.timeout(20)
def test_bare_channels_bring_back_the_bytes() -> None:
    payload = bytes(range(256)) * 64
    with bare_server(2, len(payload)) as bare:
        there = SocketEcho(bare, len(payload))
        there.echo(payload)
        assert there._answer[8:] == payload
        there.close()
        for memory in bare.memories:
            echo = EventfdEcho(memory)
            echo.echo(payload)
            assert echo._answer == payload


def test_the_wire_is_what_is_left() -> None:
    stages = stages_us({"client_encode": [9000, 10_000, 90_000], "kernel": [5000]}, 100.0)
    assert stages == dict.fromkeys(STAGES, 0.0) | {"client_encode": 10.0, "kernel": 5.0, "wire": 85.0}
    assert stages_us({"kernel": [5000]}, 4.0)["wire"] == 0


def row(p50_us: float = 1000.0, bare_us: float = 500.0) -> PathMeasurement:
    ours, bare = Samples(wall_s=2.0), Samples(wall_s=1.0)
    for _ in range(4):
        ours.whole.add(p50_us * 1e-6)
        bare.whole.add(bare_us * 1e-6)
        ours.add("kernel", int(p50_us * 250))
    return row_of(("<here>", "inline", "asyncio"), (8, 16, 3), ours, "stream", bare)


def test_a_row() -> None:
    assert row() == PathMeasurement(
        "<here>", "inline", "asyncio", 8, 16, 256, 3, 1000.0, 1000.0, 2.0, 250.0, "stream", 500.0, 4.0, row().stages_us
    )


def test_bars_are_as_long_as_the_times() -> None:
    bars = ET.fromstring(draw([row(), row(500.0)])).findall(".//{*}rect")[1 + len(STAGES) :]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == [480.0, 160.0, 240.0, 80.0]
    assert [bar.find("{*}title").text for bar in bars][:2] == ["wire: 750.0 us", "kernel: 250.0 us"]


def test_a_probe_counts_what_passes() -> None:
    transport = FunctionTransport(lambda v: ForwardResponseView(v.request_id, TensorView.of_raw(*_raw(v))))
    probe = Probe(transport)
    with ExpertClient(probe) as client:
        for _ in range(3):
            x = np.ones((2, 4), np.float32)
            assert (client.forward(0, x, np.zeros((2, 1), np.int32), x[:, :1]).output == x).all()
    assert [len(probe.samples.stages[name]) for name in ("client_encode", "client_decode")] == [3, 3]
    assert min(probe.samples.stages["client_encode"]) > 0


def _raw(v):
    return v.hidden_states.dtype, v.hidden_states.shape, v.hidden_states.raw


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--transport", "inline,pigeon"], "got 'pigeon', want some of inline, shm"),
        (["--client", "tasks"], "want some of asyncio, threads"),
        (["--tokens", "1,0"], "got '0', want a whole number >= 1"),
    ],
)
def test_wrong_words(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(*words)
    assert text in capsys.readouterr().err


def test_a_stage_has_one_colour_in_every_picture_and_none_two_in_one():
    """Both pictures take their colours from one table, so the reader of one can read the other."""
    for stages in (STAGES, TRACED):
        assert len({COLOURS[name] for name in stages}) == len(stages)
    two = draw([row(), replace(row(), tokens=9)])
    assert "each block has a scale of its own" in two
    assert "each block" not in draw([row()])
