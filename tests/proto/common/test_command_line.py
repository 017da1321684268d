"""The parser of both commands: what is wrong is one line, with the nearest name there is."""

import ast
from pathlib import Path

import pytest

from expertd.common.command_line import Parser


@pytest.fixture
def parser():
    top = Parser(prog="x")
    commands = top.add_subparsers(dest="command", required=True)
    load = commands.add_parser("load")
    load.add_argument("--duration", type=int)
    load.add_argument("--dtype", choices=("bf16", "f32"))
    parts = commands.add_parser("bench").add_subparsers(dest="part")
    parts.add_parser("codec").add_argument("--sizes")
    return top


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("load --duratoin 3", "x load: unknown option --duratoin; the nearest is --duration"),
        ("load --duratoin=3", "x load: unknown option --duratoin; the nearest is --duration"),
        ("load --dur 3", "x load: unknown option --dur; the nearest is --duration"),
        ("load --duratio 3", "x load: unknown option --duratio; the nearest is --duration"),
        ("bench codec --size 3", "x bench codec: unknown option --size; the nearest is --sizes"),
        ("load --zebra", "x load: unknown option --zebra"),
        ("load here", "x load: unknown argument here"),
        ("bench codec --size-of 3", "x bench codec: unknown option --size-of; the nearest is --sizes"),
        ("laod", "x: argument command: got 'laod', want load or bench; the nearest is load"),
        ("load --dtype f16", "x load: argument --dtype: got 'f16', want bf16 or f32; the nearest is bf16"),
        ("load --duration long", "x load: argument --duration: invalid int value: 'long'"),
        ("", "x: the following arguments are required: command"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(parser, capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first == says
    assert second == f"`{says.partition(':')[0]} --help` shows the options."


def test_no_parser_of_the_project_takes_abbreviations():
    """Those that are not of this class say so themselves; a test builds its own as it likes."""
    root = Path(__file__).parents[3]
    folders = ("client", "server", "kernels", "proto", "deploy", "docs")
    files = [file for folder in folders for file in (root / folder).rglob("*.py") if "build" not in file.parts]
    calls = [
        (file, call)
        for file in files
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("ArgumentParser")
    ]
    assert calls
    assert [str(file) for file, call in calls if "allow_abbrev" not in {k.arg for k in call.keywords}] == []


def test_what_is_right_is_parsed(parser):
    assert parser.parse_args(["load", "--duration", "3"]).duration == 3
