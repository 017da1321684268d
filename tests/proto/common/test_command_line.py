"""The parser of both commands: what is wrong is one line, with the nearest name there is."""

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


def test_what_is_right_is_parsed(parser):
    assert parser.parse_args(["load", "--duration", "3"]).duration == 3
