"""Commands as people paste them, held against the parsers that would read them."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from expertctl import cli as client_cli
from expertd_server.commands import cli as server_cli
from expertd_server.config.resolve import resolve
from expertd_server.config.serve import ServeConfig

ROOT = Path(__file__).parents[2]
_CLIS = {"expertd": ("expertd_server", server_cli), "expertctl": ("expertctl", client_cli)}


def read(
    words: list[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str] | None = None
) -> ServeConfig | None:
    """Parse `expertd ...` or `expertctl ...` as the command itself does, and run nothing.  What `expertd serve` would
    be configured to, with `environ` around it; None for other commands.  AssertionError with the parser's words."""
    package, cli = _CLIS[Path(words[0]).name]
    name = next(w for w in words[1:] if not w.startswith("-"))
    assert name in cli.COMMANDS, f"{shlex.join(words)}: no such command"
    module = importlib.import_module(f"{package}.commands.{name}")
    found = []
    with monkeypatch.context() as m:
        m.setattr(module, "run", lambda args: found.append(args) or 0)
        m.setattr(Path, "is_dir", lambda path: not path.suffix)  # folders of the papers are not on this machine
        try:
            cli.main(words[1:])
        except SystemExit as e:
            pytest.fail(f"{shlex.join(words)}: the parser ended with {e.code}")
    return resolve(found[0], environ or {}) if (package, name) == ("expertd_server", "serve") else None
