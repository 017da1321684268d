"""The parser of the commands `expertd` and `expertctl`: short errors that name the nearest option or command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """As argparse's, whose exit code for a wrong command line, 2, it keeps.  Parsers of subcommands are of this class,
    too.  An option has to be written out: what is left out today may fit two options tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's; an option that there is not is an error of the subcommand that got it."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._of(found)._refuse(unknown)
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows the options.\n")

    def _of(self, found: argparse.Namespace) -> Parser:
        """The subcommand that was parsed last."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, ""))
                if isinstance(chosen, Parser):
                    return chosen._of(found)
        return self

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        word = next((w for w in unknown if w.startswith("-")), unknown[0]).partition("=")[0]
        what = "option" if word.startswith("-") else "argument"
        self.error(f"unknown {what} {word}{_nearest(word, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(name) for name in action.choices]
            near = _nearest(str(value), names)
            raise argparse.ArgumentError(action, f"got {value!r}, want {' or '.join(names)}{near}")


def _nearest(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; the nearest is {near[0]}" if near else ""
