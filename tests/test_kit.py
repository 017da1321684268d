"""What tests share: that each of its comparisons can fail."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from allocated import allocated, needs_mallinfo
from costs import cheaper
from waiting import until_asleep, until_inside


def test_a_comparison_of_costs_can_fail():
    numbers = list(range(100_000))

    def once():
        sorted(numbers, key=str)

    def three_times():
        for _ in range(3):
            once()

    assert cheaper(once, three_times, 1)
    assert not cheaper(three_times, once, 1)
    assert cheaper(three_times, once, 10)


def test_a_thread_that_does_not_wait_is_noticed():
    over = threading.Event()
    waits = threading.Thread(target=over.wait)
    waits.start()
    until_inside(waits, "wait")
    until_asleep(waits)
    over.set()
    waits.join(20)
    quick = threading.Thread(target=over.wait)
    quick.start()
    with pytest.raises(AssertionError, match=r"it ended, and does not wait in wait\(\)"):
        until_inside(quick, "wait")


@needs_mallinfo
def test_memory_that_is_kept_is_counted():
    """In a process of its own: threads of other tests take and free memory meanwhile."""
    words = [sys.executable, "-c", "import test_kit; test_kit.keep_and_let_go()"]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def keep_and_let_go():
    before = allocated()
    kept = [bytearray(5 << 20)]
    assert 5 << 20 <= allocated() - before < 6 << 20
    kept.clear()
    assert allocated() - before < 1 << 20
