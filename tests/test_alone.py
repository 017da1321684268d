"""kit/alone.py: who is to run alone waits for those who run, and nobody begins before it has ended."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alone import DOOR, turn
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


def closed(door: Path) -> bool:
    with door.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_nobody_slips_in_before_one_who_waits_to_be_alone(tmp_path):
    order = []

    def take(name, alone):
        with turn(tmp_path, alone):
            order.append(name)

    waits, late = (threading.Thread(target=take, args=a) for a in (("alone", True), ("late", False)))
    with turn(tmp_path, False):
        with turn(tmp_path, False):
            order.append("two together")
        waits.start()
        until(lambda: closed(tmp_path / DOOR))
        late.start()
        assert order == ["two together"]
    waits.join(20)
    late.join(20)
    assert order == ["two together", "alone", "late"]


@pytest.mark.slow  # three processes begin
def test_tests_that_are_marked_alone_run_beside_no_other(tmp_path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    for file in ("test_a.py", "test_b.py"):
        (tmp_path / file).write_text(TESTS)
    tests = Path(__file__).parent  # what conftest.py imports lies in these folders
    settings = [
        "-o",
        f"pythonpath={tests / 'kit'} {tests / 'kernels'}",
        "-o",
        "markers=alone",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
    ]
    run = [sys.executable, "-m", "pytest", "-q", *settings, "-p", "no:cacheprovider", "-n", "2", "--dist", "load"]
    done = subprocess.run([*run, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300)
    assert " 18 passed" in " " + done.stdout.splitlines()[-1], done.stdout
