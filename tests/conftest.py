"""What all tests share: where the checkpoint fixtures are, and a line at the end that says which of them ran."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from expertd_kernels.native.csrc.build import stale

OWN = Path(__file__).resolve().parent / "fixtures"
"""One small checkpoint for each family of formats, written by other people's tools; in the repository."""

SHARED = OWN.parents[2] / "shared" / "fixtures"
"""All the others, beside the repository where somebody put them."""


def _names(folder: Path) -> set[str]:
    return {p.parent.name for p in folder.glob("*/config.json")}


@pytest.fixture(scope="session")
def checkpoint_folder() -> Callable[[str], Path]:
    """name -> folder of a checkpoint fixture; skips the test where it is not on this machine."""

    def find(name: str) -> Path:
        for base in (OWN, SHARED):
            if (base / name / "config.json").exists():
                return base / name
        pytest.skip(
            f"fixture {name} is not in tests/fixtures; put the shared fixtures at ../shared/fixtures to run this"
        )

    return find


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a server in this process has set for all that is logged, is set back."""
    root, ours = logging.getLogger(), [logging.getLogger(n) for n in ("expertd", "expertd_kernels", "expertd_server")]
    handlers, levels = root.handlers[:], [log.level for log in (root, *ours)]
    yield
    logging.captureWarnings(False)
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
    for log, level in zip((root, *ours), levels, strict=True):
        log.setLevel(level)


def pytest_configure() -> None:
    """What tests start is to end by Ctrl-C, which a shell's background job, and all its children, would ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LONG_S = 900
"""For a test that is marked slow or gpu, or lets Triton compile."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marked = {m.name for m in item.iter_markers()}
        compiles = "own_triton_cache" in getattr(item, "fixturenames", ())
        if (compiles or marked & {"slow", "gpu"}) and "timeout" not in marked:
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is shown by way of ast.parse, which in Python 3.11 fails with a SystemError, and takes the whole run
    with it, where a finalizer comes in between that shows a traceback of its own."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if collects:
            gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    own, shared = _names(OWN), _names(SHARED)
    there = f"{len(shared | own)} checkpoint fixtures: {len(own)} of tests/fixtures"
    more = f"{len(shared - own)} more of ../shared/fixtures" if shared else "../shared/fixtures is not there"
    terminalreporter.write_line(f"{there}, {more}")
    if said := stale():  # tests of the row `cpu` were skipped, and servers took a slower one
        terminalreporter.write_line(said)
