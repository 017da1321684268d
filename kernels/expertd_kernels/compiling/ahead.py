"""Kernels compiled ahead by a process beside this one, which this one asks and waits for.

    ahead = CompileAhead.start(processes)     imports what it needs while this process plans
    ahead.give(job)
    ahead.wait()                              Triton's cache has them, or they are compiled when they are called
    ahead.close()

Imports no torch, so that it can be started before anything else.  Nothing of this can fail: what goes wrong is in the
Outcome, and costs the time of compiling later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from expertd_kernels.native.cores import cpu_quota

if TYPE_CHECKING:
    from expertd_kernels.compiling.job import Job

__all__ = ["CompileAhead", "Outcome", "usable_processes"]

VARIABLE = "EXPERTD_COMPILE_PROCESSES"
"""How many processes compile; 0: none, kernels compile when they are called."""
MOST_PROCESSES = 32
"""Layers of a model have some thirty kernels."""
LIMIT_S = 300.0
"""Nobody waits longer."""


@dataclass(frozen=True)
class Outcome:
    """kernels: how many are in the cache; faults: what went wrong; seconds: importing, finding them, compiling them,
    and waiting: how long this process waited."""

    kernels: int = 0
    faults: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items())
        return f"{self.kernels} kernels compiled ahead (seconds: {times})" + "".join(f"; {f}" for f in self.faults[:3])


def usable_processes() -> int:
    """One for each CPU that this process may use, or what $EXPERTD_COMPILE_PROCESSES says; 0: none, also without
    Triton."""
    if importlib.util.find_spec("triton") is None:
        return 0
    text = os.environ.get(VARIABLE, "")
    wanted = int(text) if text.isdecimal() else max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))
    return min(wanted, MOST_PROCESSES)


class CompileAhead:
    """For one job.  Threads may call it side by side."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._lock = process, threading.Lock()
        self._job: Job | None = None
        self._outcome: Outcome | None = None

    @classmethod
    def start(cls, processes: int) -> CompileAhead | None:
        """None: no such process can be started."""
        paths = os.pathsep.join(filter(None, sys.path))
        more = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        try:
            return cls(
                subprocess.Popen(
                    [sys.executable, "-m", "expertd_kernels.compiling", str(processes)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | more,
                    start_new_session=True,
                )
            )
        except OSError:
            return None

    def give(self, job: Job) -> None:
        """What to compile; once."""
        self._job = job
        pipe, self._process.stdin = self._process.stdin, None  # communicate() would flush it, closed
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError), pipe:  # closed: it was ended
            pipe.write(pickle.dumps(job))

    def wait(self) -> Outcome:
        """Until it has ended.  The same again for who asks again."""
        with self._lock:
            if self._outcome is None:
                begin = time.perf_counter()
                found = self._read()
                self._outcome = Outcome(
                    found.kernels, found.faults, {**found.seconds, "waiting": time.perf_counter() - begin}
                )
                if self._job is not None and found.kernels and not found.faults:
                    self._job.set_done()
            return self._outcome

    def close(self) -> None:
        """End it, whatever it does."""
        self._kill()
        with self._lock:  # who waits for it is through
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _kill(self) -> None:
        """With the processes that it has forked."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> Outcome:
        if self._job is None:
            return Outcome()
        try:
            out, _ = self._process.communicate(timeout=LIMIT_S)
            found = json.loads(out)
            return Outcome(int(found["kernels"]), tuple(found["faults"]), dict(found["seconds"]))
        except subprocess.TimeoutExpired:
            self._kill()
            return Outcome(faults=(f"compiling ahead took longer than {LIMIT_S:.0f} s",))
        except (OSError, ValueError, KeyError, TypeError) as e:
            code = self._process.poll()
            return Outcome(faults=(f"the process that compiles ahead ended with {code}: {type(e).__name__}: {e}",))
