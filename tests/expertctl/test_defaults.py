"""Each command of `expertctl --help` and `expertd --help`, and each part of `expertctl bench`, runs as it stands there:
what it must be told is told, nothing else.  EXPERTD_BENCH_SCALE makes defaults short."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl import cli as expertctl
from expertctl.bench.faults.processes import ServerProcess
from expertctl.common import brief
from expertd_server.commands import cli as expertd

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CHECKPOINT = str(FIXTURES / "gptq-w4-g128-sym-descact-false-qwen3moe1l")
MODEL = ["--synthetic", "tiny:int4_g128"]
HERE = ["--listen", "127.0.0.1:0"]

EXPERTCTL = {
    "describe": ["ADDRESS"],
    "health": ["ADDRESS"],
    "forward": ["ADDRESS"],
    "load": ["ADDRESS"],
    "simulate": [],
    "trace": ["ADDRESS"],
    "strip": [CHECKPOINT, "stripped"],
    "completion": ["bash"],
}
"""Command -> what it must be told; of those that end by themselves."""
ELSEWHERE = {
    "bench": "its parts, below",
    "plan": "tests/expertctl/planner: it needs load that was counted or recorded",
    "ray": "tests/expertctl/ray: it needs a Ray cluster",
    "record": "tests/expertctl/load: callers come by the way that it opens",
    "replay": "tests/expertctl/load: it plays what record wrote",
    "top": "its own tests: without a terminal it prints its last picture alone, when it is stopped",
    "update": "tests/expertctl/commands/test_update.py: it needs servers with an admin port and a checkpoint",
    "versions": "tests/expertctl/commands/test_update.py: as update",
    "apply": "tests/rpc/test_apply.py: it needs a placement of servers with an admin port",
}
PARTS = ("codec", "path", "cluster", "replicas", "faults", "moves", "unequal", "overload")
EXPERTD = {"explain": MODEL, "verify": ["--checkpoint", CHECKPOINT]}
UNTIL_STOPPED = [
    ("expertd_server.commands.cli", ["serve", *MODEL, *HERE], r"serving on \S+"),
    ("expertd_echo", HERE, r"serving on \S+"),
]


@pytest.fixture(scope="module")
def address():
    with ServerProcess([*MODEL, "--layers", "0", "--device", "cpu", "--threads", "1"]) as server:
        yield server.ready()


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    monkeypatch.setenv(brief.SCALE, "0.05")
    monkeypatch.chdir(tmp_path)


def parts_of_bench():
    parser, _ = expertctl.parser_of(["bench"])
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    (parts,) = (a for a in commands.choices["bench"]._actions if isinstance(a, argparse._SubParsersAction))
    return set(parts.choices)


def test_no_command_is_left_out():
    stays = {command[0] for module, command, _ in UNTIL_STOPPED if module == "expertd_server.commands.cli"}
    assert set(expertctl.COMMANDS) == {*EXPERTCTL, *ELSEWHERE}
    others = {"quantize", "prepare"}  # tests of the writers; tests/server/commands/test_prepare.py
    assert set(expertd.COMMANDS) == {*EXPERTD, *stays, *others}
    assert parts_of_bench() == set(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("command", EXPERTCTL)
def test_expertctl(command, address, capsys):
    words = [address if word == "ADDRESS" else word for word in EXPERTCTL[command]]
    assert expertctl.main([command, *words]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", EXPERTD)
def test_expertd(command, capsys):
    assert expertd.main([command, *EXPERTD[command]]) == 0
    assert capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(1800)  # nine faults, each with its servers, on a machine that does much else
@pytest.mark.parametrize("part", PARTS)
def test_bench(part, capsys):
    assert expertctl.main(["bench", part]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("module", "words", "says"), UNTIL_STOPPED, ids=["serve", "echo"])
def test_what_runs_until_it_is_stopped(module, words, says):
    command = [sys.executable, "-m", module, *words]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if re.search(says, line):
                    break
            assert process.poll() is None, "".join(said)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait(60) in (0, 130), "".join(said)
        finally:
            process.kill()  # Popen waits for it at the end of the block


@pytest.mark.parametrize("text", ["0", "2", "-1", "short", ""])
def test_a_scale_that_is_none(monkeypatch, text):
    monkeypatch.setenv(brief.SCALE, text)
    with pytest.raises(ValueError, match=f"{brief.SCALE}: got"):
        brief.scale()


def test_defaults_are_as_they_are_without_it(monkeypatch):
    monkeypatch.delenv(brief.SCALE)
    assert (brief.briefly(0.01, least=0.2), brief.fewer(1, least=5)) == (0.01, 1)
    monkeypatch.setenv(brief.SCALE, "0.1")
    assert (brief.briefly(10.0), brief.briefly(1.0), brief.fewer(20), brief.fewer(4)) == (1.0, 0.2, 2, 1)
