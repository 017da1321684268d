"""MainWait: a signal always wakes the main thread, whatever other threads do.  Each case is a process: a signal's
handler is the whole process's."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertd.common.signals import MainWait, ended_by_signals

_AMONG_BUSY_THREADS = """
    import os, signal, sys, threading, time
    from expertd.common.signals import MainWait

    sys.setswitchinterval(0.005)
    signal.signal(signal.SIGTERM, lambda *_: None)
    for _ in range(3):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    wait = MainWait().wait
    for n in range(60):
        def late(n=n):
            time.sleep(0.001 * (n % 4))
            os.kill(os.getpid(), signal.SIGTERM)
        sender = threading.Thread(target=late)
        sender.start()
        wait()
        sender.join()
    print("woke", flush=True)
    os._exit(0)
"""


def _run(code: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_no_signal_is_slept_through_while_other_threads_are_busy():
    """With a queue instead of MainWait, one of the first few signals woke nobody, and the process stood for ever."""
    done = _run(_AMONG_BUSY_THREADS)
    assert done.stdout == "woke\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_wakes_and_the_second_ends_the_process(number):
    done = _run(f"""
        import os
        from expertd.common.signals import ended_by_signals
        with ended_by_signals() as waiting:
            os.kill(os.getpid(), {number.value})
            waiting.wait()
            print("woke", flush=True)
            os.kill(os.getpid(), {number.value})
            print("still there", flush=True)
    """)
    assert (done.stdout, done.returncode) == ("woke\n", -number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_containers_first_process_ends_itself_at_the_second(number):
    """Without a handler the kernel lets nothing through to it.  Said to be the first, as nobody else may make one."""
    done = _run(f"""
        import os, sys
        pid = os.getpid()
        os.getpid = lambda: 1
        from expertd.common.signals import ended_by_signals
        with ended_by_signals() as waiting:
            os.kill(pid, {number.value})
            waiting.wait()
            print("woke", flush=True)
            os.kill(pid, {number.value})
            print("still there", flush=True)
    """)
    assert (done.stdout, done.returncode) == ("woke\n", 128 + number)


def test_each_ring_lets_one_wait_return_and_none_is_heard_after_close():
    done = _run("""
        import signal, threading
        from expertd.common.signals import ended_by_signals
        before = signal.getsignal(signal.SIGTERM)
        with ended_by_signals() as waiting:
            threads = [threading.Thread(target=waiting.ring, args=("told by a callback",)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                waiting.wait()
        waiting.ring()
        print(signal.getsignal(signal.SIGTERM) == before, signal.set_wakeup_fd(-1))
    """)
    assert done.stdout == "True -1\n", done.stderr


@pytest.mark.parametrize("make", [MainWait, lambda: ended_by_signals().__enter__()])
def test_another_thread_cannot_wait_for_signals(make):
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(make).result()


def test_a_signal_that_came_before_is_seen_without_waiting():
    done = _run("""
        import os, signal
        from expertd.common.signals import ended_by_signals
        with ended_by_signals() as waiting:
            print(waiting.rung)
            os.kill(os.getpid(), signal.SIGTERM)
            print(waiting.rung)
            waiting.wait()
            print(waiting.rung)
    """)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr
