"""Variables EXPERTD_*: a slip is refused, what other parts read is known, what is foreign does no harm."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from expertd_server.commands.cli import main
from expertd_server.config.options import OPTIONS
from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError
from expertd_server.config.variables import KNOWN, check_variables, unread

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("EXPERTD_MAX_TOKEN", "EXPERTD_MAX_TOKENS"),
        ("EXPERTD_MEMORYLIMIT", "EXPERTD_MEMORY_LIMIT"),
        ("EXPERTD_DEVICES", "EXPERTD_DEVICE"),
        ("EXPERTD_SHARDS", "EXPERTD_SHARD"),
    ],
)
def test_a_name_close_to_an_option_is_refused_with_that_one(name, near):
    with pytest.raises(ConfigError, match=f"{name}: got a variable that nothing reads, want {near}, "):
        check_variables({name: "5"})


def test_every_command_that_takes_options_refuses_it():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ConfigError, match="EXPERTD_MAX_TOKEN:"):
        resolve(parser.parse_args(["--synthetic", "tiny:bf16"]), {"EXPERTD_MAX_TOKEN": "5"})


def test_the_exit_code_is_that_of_a_wrong_option(monkeypatch, capsys):
    monkeypatch.setenv("EXPERTD_MAX_TOKEN", "5")
    assert main(["serve", "--synthetic", "tiny:bf16", "--print-config"]) == 2
    assert "want EXPERTD_MAX_TOKENS" in capsys.readouterr().err


def test_another_unknown_name_is_a_warning():
    check_variables({"EXPERTD_TEAM": "inference", "EXPERTD_CACHE_DIR": "/c"})
    assert unread({"EXPERTD_TEAM": "inference"}) == ["EXPERTD_TEAM: nothing reads this variable"]
    assert unread({"EXPERTD_CACHE_DIR": "/c"}) == [
        "EXPERTD_CACHE_DIR: nothing reads this variable; the nearest is EXPERTD_CACHE"
    ]


def test_what_other_parts_read_and_what_kubernetes_writes_is_no_mistake():
    there = dict.fromkeys((*KNOWN, *(o.variable for o in OPTIONS)), "")
    there |= dict.fromkeys(
        (
            "EXPERTD_PORT",
            "EXPERTD_PORT_50051_TCP",
            "EXPERTD_PORT_50051_TCP_ADDR",
            "EXPERTD_SERVICE_HOST",
            "EXPERTD_SERVICE_PORT",
            "EXPERTD_SERVICE_PORT_GRPC",
            "EXPERTD_CPU_SERVICE_HOST",
            "EXPERTD_TLS_PORT",
        ),
        "tcp://10.0.0.1:80",
    )
    check_variables(there)
    assert unread(there | {"PATH": "/bin"}) == []


def test_every_variable_in_the_code_is_in_the_list():
    """Names in quotes, in Python and in C++ (getenv)."""
    read: dict[str, Path] = {}
    for folder in ("client", "server", "kernels", "proto", "deploy"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".cpp", ".h") and "build" not in file.parts:
                text = file.read_text(encoding="utf-8")
                read |= dict.fromkeys(re.findall(r"""["'](EXPERTD_[A-Z0-9_]+)["']""", text), file)
    known = KNOWN | {o.variable for o in OPTIONS}
    assert {name: str(file) for name, file in read.items() if name not in known} == {}
    assert "EXPERTD_CPU_ISA" in read
