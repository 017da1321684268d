"""What each test file takes, and the order that follows: the heaviest files first, so that no worker is left alone with
one at the end.

The weights are those of the last whole run here (build/tests/seconds.json), before those that are committed
(tests/seconds.json: heavy files).  A file that neither knows is taken for as heavy as its tests' number and marks say.

    python tests/kit/seconds.py FILE ...     runs each by itself, and writes its CPU seconds to tests/seconds.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "tests/seconds.json"
RECORDED = ROOT / "build/tests/seconds.json"
HEAVY_S = 8.0
"""The least of a file that is committed."""
TEST_S, SLOW_S = 0.2, 20.0
"""Of a test that nobody has measured, and of one that is marked slow."""


def read(path: Path) -> dict[str, float]:
    """{file: seconds}; empty where there is no such file, or a damaged one."""
    try:
        return {name: float(seconds) for name, seconds in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write(path: Path, weights: Mapping[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps({name: round(weights[name], 1) for name in sorted(weights)}, indent=0) + "\n")
    part.replace(path)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Seconds:
    """A plugin.  Wall seconds go with the report of each test; the controller adds them up by file."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self._of_test: dict[str, float] = {}

    def files(self) -> dict[str, float]:
        """{file: seconds of its tests}, of this run."""
        total: Counter[str] = Counter()
        for nodeid, seconds in self._of_test.items():
            total[file_of(nodeid)] += seconds
        return dict(total)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        guessed: defaultdict[str, float] = defaultdict(float)
        for item in items:
            slow = item.get_closest_marker("slow") is not None
            guessed[file_of(item.nodeid)] += SLOW_S if slow else TEST_S
        items.sort(key=lambda item: -self.weights.get(name := file_of(item.nodeid), guessed[name]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_test[report.nodeid] = self._of_test.get(report.nodeid, 0.0) + report.duration


def cpu_seconds(name: str) -> float:
    """Of the tests of a file that `make test` runs, with all processes that they start and wait for.  RuntimeError:
    a test failed."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name], cwd=ROOT, check=False)
    after = os.times()
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def main(names: Sequence[str], committed: Path = COMMITTED) -> int:
    for name in names:
        known = read(committed)
        known[name] = seconds = cpu_seconds(name)
        write(committed, {file: each for file, each in known.items() if each >= HEAVY_S})
        print(f"{seconds:8.1f} s  {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
