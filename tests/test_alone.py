"""kit/alone.py: who is to run alone waits for those who run, and nobody begins before it has ended."""

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alone import DOOR, Turns
from waiting import until

TESTS = """
import pytest, time
from pathlib import Path

@pytest.fixture(autouse=True)
def beside():
    me = Path(__file__).parent / f"running-{time.monotonic_ns()}"
    me.touch()
    yield lambda: len(list(me.parent.glob("running-*"))) - 1
    me.unlink()

@pytest.mark.parametrize("n", range(6))
def test_together(n, beside):
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert beside() <= 1

@pytest.mark.alone
@pytest.mark.parametrize("n", range(3))
def test_alone(n, beside):
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert beside() == 0
"""


TAKES = """
import os, sys
from pathlib import Path
from alone import turn

with turn(Path(sys.argv[1]), sys.argv[2] == "alone"):
    if "fork" in sys.argv and os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # only the parent's end is waited for
        sys.stdin.read()
        os._exit(0)
    print("in", flush=True)
    sys.stdin.read()
"""
"""A process that is in the room until its standard input ends."""


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "kit")}
    run = [sys.executable, "-c", TAKES, str(folder), *arguments]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as p:
        try:
            yield p
        finally:
            p.kill()


def entered(p: subprocess.Popen[str]) -> None:
    assert p.stdout.readline() == "in\n"


def is_in(p: subprocess.Popen[str]) -> bool:
    return bool(select.select([p.stdout], [], [], 0)[0])


def leave(p: subprocess.Popen[str]) -> None:
    p.stdin.close()
    assert p.wait(60) == 0


def closed(listener: Path) -> bool:
    with listener.open("a+") as f:
        try:
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_nobody_slips_in_before_one_who_waits_to_be_alone(tmp_path):
    with process(tmp_path, "together") as first, process(tmp_path, "together") as second:
        entered(first)
        entered(second)
        with process(tmp_path, "alone") as alone:
            until(lambda: closed(tmp_path / DOOR))
            with process(tmp_path, "together") as late:
                leave(first)
                assert not is_in(alone)
                leave(second)
                entered(alone)
                assert not is_in(late)
                leave(alone)
                entered(late)


def test_a_child_of_a_killed_worker_keeps_nobody_out(tmp_path):
    with process(tmp_path, "together", "fork") as worker:
        entered(worker)
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
        with process(tmp_path, "alone") as alone:  # the child is there until the worker's standard input ends
            entered(alone)


CONFTEST = """
from pathlib import Path
from alone import Turns

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent))
"""
"""What tests/conftest.py does for workers, without its imports of a library for each of three processes."""


def test_workers_take_turns(pytestconfig):
    """So does tests/conftest.py."""
    ours = [p for p in pytestconfig.pluginmanager.get_plugins() if isinstance(p, Turns)]
    assert len(ours) == hasattr(pytestconfig, "workerinput")


def test_tests_that_are_marked_alone_run_beside_no_other(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file in ("test_a.py", "test_b.py"):
        (tmp_path / file).write_text(TESTS)
    kit = Path(__file__).parent / "kit"
    settings = ["-o", f"pythonpath={kit}", "-o", "markers=alone", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    run = [sys.executable, "-m", "pytest", "-q", *settings, "-p", "no:cacheprovider", "-n", "2", "--dist", "load"]
    done = subprocess.run([*run, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300)
    assert " 18 passed" in " " + done.stdout.splitlines()[-1], done.stdout
