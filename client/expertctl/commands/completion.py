"""`expertctl completion`: what a shell needs to complete the commands and their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import shtab

__all__ = ["SHELLS", "add_parser", "run"]

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "completion",
        help=text,
        description="Prints a script that completes commands and options of expertctl.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="bash  expertctl completion bash > ~/.local/share/bash-completion/completions/expertctl\n"
        "zsh   expertctl completion zsh > DIR/_expertctl, of a DIR in $fpath\n"
        "fish  expertctl completion fish > ~/.config/fish/completions/expertctl.fish",
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    from expertctl.cli import COMMANDS, parser_of  # which imports this module by its name

    parser = parser_of(COMMANDS)[0]
    _mark_files(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _mark_files(parser: argparse.ArgumentParser) -> None:
    """Arguments that are paths complete to files, in this parser and those below it."""
    for action in parser._actions:  # argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _mark_files(below)
        elif action.type is Path or action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
