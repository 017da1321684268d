"""The numbers of DECISIONS.md, and where the code cites them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["cited", "decided"]

HEADING = re.compile(r"## (\d+)\. (.+) \((\d{4}-\d{2}-\d{2})\)")
CITED = re.compile(r"\bdecisions? (\d+(?:(?:, | and )\d+)*)")
ENDINGS = {".py", ".h", ".cpp", ".proto", ".yaml", ".toml", ".tpl"}


def decided(text: str) -> Mapping[int, str]:
    """Number -> title.  ValueError for a heading of another form, or a number not above the one before."""
    found: dict[int, str] = {}
    for heading in (line for line in text.splitlines() if line.startswith("## ")):
        match = HEADING.fullmatch(heading)
        last = max(found, default=0)
        if match is None or int(match[1]) <= last:
            raise ValueError(f"DECISIONS.md: {heading!r}: want '## N. Title (2026-12-31)' with N above {last}")
        found[int(match[1])] = match[2]
    return found


def cited(root: Path, folders: Iterable[str]) -> Mapping[int, list[str]]:
    """Number -> files below these folders of `root` that cite it, as "decision 44" or "decisions 7 and 44"."""
    found: dict[int, list[str]] = {}
    files = (p for name in folders for p in [root / name, *(root / name).rglob("*")] if p.is_file())
    for path in sorted(p for p in files if p.suffix in ENDINGS):
        for match in CITED.finditer(path.read_text()):
            for number in re.findall(r"\d+", match[1]):
                found.setdefault(int(number), []).append(str(path.relative_to(root)))
    return found
