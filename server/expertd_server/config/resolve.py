"""The configuration from four places.

    flag  >  environment EXPERTD_*  >  file (--config, TOML)  >  default

A key that is not in OPTIONS is refused with the nearest one that is.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from expertd_server.config.options import GROUPS, MOST_USED, OPTIONS
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.variables import check_variables

__all__ = ["add_flags", "resolve"]

_ALTERNATIVES = (("checkpoint", "synthetic"), ("experts", "shard"))
"""Options of which one at most may be set."""


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """The options as flags (some of them where `names` are given), by group, and --config.  What is not given stays
    None."""
    defaults = {f.name: f.default for f in fields(ServeConfig)}
    for title, options in GROUPS:
        some = [o for o in options if names is None or o.name in names]
        if not some:
            continue
        group: argparse._ActionsContainer = parser if title == MOST_USED else parser.add_argument_group(title)
        for o in some:
            text, default = o.help, defaults[o.name]
            if default is not None:
                text += f" (default: {o.text(default)})"
            alone: dict[str, Any] = {"nargs": "?", "const": "yes"} if isinstance(default, bool) else {}
            group.add_argument(o.flag, metavar=o.metavar, help=text.replace("%", "%%"), **alone)
    parser.add_argument_group("Configuration").add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the names of the options as keys; flags and EXPERTD_* variables take precedence over it",
    )


def resolve(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration from parsed flags, the environment and --config's file.  Raises ConfigError."""
    environ = os.environ if environ is None else environ
    check_variables(environ)
    path = getattr(args, "config", None) or environ.get("EXPERTD_CONFIG")
    file = _read(Path(path)) if path else {}
    values: dict[str, Any] = {}
    rank: dict[str, int] = {}
    for o in OPTIONS:
        key, in_file = file.get(o.name, (o.name, None))
        found = (
            (o.flag, getattr(args, o.name, None)),
            (o.variable, environ.get(o.variable) or None),
            (f"{path}: {key}", in_file),
        )
        for i, (where, text) in enumerate(found):
            if text is None:
                continue
            try:
                values[o.name], rank[o.name] = o.parse(text), i
            except ValueError as e:
                raise ConfigError(f"{where}: {e}") from None
            break
    for a, b in _ALTERNATIVES:  # a flag --synthetic goes before a file's checkpoint, too
        if a in rank and b in rank and rank[a] != rank[b]:
            del values[a if rank[a] > rank[b] else b]
    return ServeConfig(**values)


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """By the option's name, the file's key as it is spelled there, and its value as the text of a flag."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: is no TOML: {e}") from None
    known = {o.name: o for o in OPTIONS}
    out: dict[str, tuple[str, str]] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0].replace('_', '-')}" if near else ""
            raise ConfigError(f"{path}: got the key {key!r}, want one of the options of expertd serve{hint}")
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{path}: {key}: got {value!r}, want a string, a number, true or false")
        out[name] = key, {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return out
