"""The tests that need a GPU: which files have them, and from JUnit's reports a table by row of the oracle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from expertd_kernels.oracle.table import BACKENDS

__all__ = ["Case", "cases", "gpu_files", "row_of", "summary_by_row"]

NAMES = sorted((b.name for b in BACKENDS), key=len, reverse=True)
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Case:
    """One test of a report.  outcome: of OUTCOMES; said: the first line of why it failed or was skipped."""

    name: str
    row: str
    outcome: str
    seconds: float
    said: str


def gpu_files(root: Path) -> list[Path]:
    """Files under root/tests with a test that is marked gpu; the others are not imported on a bare machine."""
    return sorted(p for p in root.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text())


def row_of(module: str, name: str) -> str:
    """The row that test `name` of module tests.folder.test_file is about: named in its parameters or in its file's
    name; else the name of the file."""
    file = module.rpartition("test_")[2]
    parameters = name.partition("[")[2]
    for text in (parameters, file):
        for row in NAMES:
            if re.search(rf"(?<![a-z0-9]){row}(?![a-z0-9])", text):
                return row
    return f"({file})"


def cases(report: Path) -> list[Case]:
    """Every test of a JUnit file."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        if not name:  # it had not ended when pytest was stopped
            continue
        if not module:  # a file that could not be imported: its name stands here alone
            module, name = name, "import"
        outcome, said = "passed", ""
        for kind, means in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (why := case.find(kind)) is not None:
                outcome, said = means, (why.get("message") or why.text or "").strip().partition("\n")[0]
        found.append(Case(f"{module}::{name}", row_of(module, name), outcome, float(case.get("time", 0)), said))
    return found


def summary_by_row(reports: Sequence[Path]) -> str:
    """A table by row, every failure, every reason of a skip with its count, the slowest tests."""
    every = [case for report in reports for case in cases(report)]
    lines = ["| row | passed | failed | skipped | seconds |", "| --- | --- | --- | --- | --- |"]
    for row in sorted({c.row for c in every}, key=lambda row: (row.startswith("("), row)):
        lines.append(_line(row, [c for c in every if c.row == row]))
    lines.append(_line("all", every))
    lines += ["", *(f"FAILED {c.name}: {c.said[:300]}" for c in every if c.outcome == "failed")]
    skips = Counter(c.said for c in every if c.outcome == "skipped")
    lines += [f"skipped {count}: {said[:200]}" for said, count in skips.most_common()]
    lines += [f"{c.seconds:.0f} s {c.name}" for c in sorted(every, key=lambda c: -c.seconds)[:15]]
    return "\n".join(lines) + "\n"


def _line(name: str, group: Iterable[Case]) -> str:
    group = list(group)
    count = Counter(c.outcome for c in group)
    return f"| {name} | {' | '.join(str(count[o]) for o in OUTCOMES)} | {sum(c.seconds for c in group):.0f} |"
