"""What all tests share: where the checkpoint fixtures are, and a line at the end that says which of them ran."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import cpu_levels
import pytest
from alone import Turns
from seconds import COMMITTED, RECORDED, Seconds, read, write
from skips import Skip, by_reason, others, reason_of

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-other-skips", action="store_true", help="fail where a skip is not on the list in kit/skips.py"
    )


SKIPPED: list[Skip] = []
"""Of this run."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        SKIPPED.append(Skip(report.nodeid, reason_of(report.longrepr)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        SKIPPED.append(Skip(report.nodeid, reason_of(report.longrepr)))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not hasattr(session.config, "workerinput"):
        if session.config.getoption("--no-other-skips") and exitstatus == 0 and others(SKIPPED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        seconds = session.config.pluginmanager.get_plugin("seconds")
        whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS  # not a part of a file
        if whole and session.config.getoption("markexpr") == "not soak" and seconds is not None:
            write(RECORDED, {**read(RECORDED), **seconds.files()})


def pytest_configure(config: pytest.Config) -> None:
    """What tests start is to end by Ctrl-C, which a shell's background job, and all its children, would ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Seconds({**read(COMMITTED), **read(RECORDED)}), "seconds")
    if hasattr(config, "workerinput"):  # one of several processes of pytest-xdist
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent))


LEAST_S = 240
"""No limit of a test is shorter: it is there for what hangs, and a busy machine takes ten times as long as another."""

LONG_S = 900
"""For a test that is marked slow, soak or gpu, or lets Triton compile, or needs the emulated library."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marked = {m.name for m in item.iter_markers()}
        compiles = {"own_triton_cache", "kept_triton_cache", "cpu_level"} & set(getattr(item, "fixturenames", ()))
        if (compiles or marked & {"slow", "soak", "gpu"}) and "timeout" not in marked:
            item.add_marker(pytest.mark.timeout(LONG_S))
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args[0] < LEAST_S:
            item.add_marker(pytest.mark.timeout(LEAST_S), append=False)


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
    for line in by_reason(SKIPPED):
        terminalreporter.write_line(line)
    for line in by_reason(others(SKIPPED)):
        terminalreporter.write_line(f"not on the list of skips (tests/kit/skips.py): {line}")
    reports = (r for found in terminalreporter.stats.values() for r in found)
    if levels := cpu_levels.summary(cpu_levels.ran(reports)):
        terminalreporter.write_line(levels)
    if said := stale():  # tests of the row `cpu` were skipped, and servers took a slower one
        terminalreporter.write_line(said)
