"""Threads, locks and a clock under a scheduler that decides who runs, and may switch wherever point() is called.

Threads are greenlets of one real thread.  Time stands still but for a tick at each point; when nobody can run it goes
to the next timer.  Everything random comes from one seed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import itertools
import math
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import greenlet

TICK_S = 2e-7
TIMEOUT_MAX = 1e9
_STALLS_S = (2e-5, 3e-4, 2e-3, 0.03)
"""How long a thread that lost its core may be away."""


class StuckError(Exception):
    """Nobody can run, and nothing is to come."""


class Scheduler:
    """pace: points between two switches, on average; stalls: share of the switches after which a thread is away for a
    while.

    log      (time, thread, what): switches and what note() was told
    crashes  exceptions that ended a thread
    """

    def __init__(self, seed: int, pace: float, stalls: float) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1.0
        self.current: Thread | None = None
        self.threads: list[Thread] = []
        self.points = self.switches = 0
        self.log: deque[tuple[float, str, str]] = deque(maxlen=4000)
        self.crashes: list[tuple[str, str]] = []
        self._pace, self._stalls = pace, stalls
        self._left = 0
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._hub = greenlet.getcurrent()

    # ---- for the world -----------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        name = "world" if self.current is None else self.current.name
        self.log.append((self.now_s, name, what))

    def at(self, when_s: float, call: Callable[[], object]) -> None:
        """Calls it then, outside of all threads: it must not wait."""
        heapq.heappush(self._timers, (when_s, next(self._numbers), call))

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        self.at(self.now_s + seconds, call)

    def run(self, thread: Thread) -> None:
        """Until that thread has ended.  Raises StuckError."""
        while thread.is_alive():
            while self._timers and self._timers[0][0] <= self.now_s:
                heapq.heappop(self._timers)[2]()
            if not self._ready:
                if not self._timers:
                    raise StuckError("; ".join(f"{t.name} at {t.where()}" for t in self.threads if t.is_alive()))
                self.now_s = max(self.now_s, self._timers[0][0])
                continue
            n = self.rng.randrange(len(self._ready))
            self._ready[n], self._ready[-1] = self._ready[-1], self._ready[n]
            self.current = self._ready.pop()
            self._left = 1 + int(self.rng.expovariate(1.0 / self._pace))
            self.switches += 1
            self.current.switch()
            self.current = None

    def end(self) -> None:
        """Ends threads that are left."""
        for thread in self.threads:
            thread.kill()

    # ---- for threads -------------------------------------------------------------------------------------------------

    def point(self) -> None:
        """A switch may come here."""
        if self.current is None:
            return
        self.points += 1
        self.now_s += TICK_S
        self._left -= 1
        if self._left <= 0:
            frame = sys._getframe(2)
            self.log.append((self.now_s, self.current.name, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
            if self.rng.random() < self._stalls:
                self.block(self.rng.choice(_STALLS_S) * self.rng.random())
            else:
                self._ready.append(self.current)
                self._hub.switch()

    def block(self, timeout_s: float = math.inf) -> bool:
        """The current thread waits until wake() or the time is over.  Whether it was woken."""
        thread = self.current
        assert thread is not None, "what is called by the world must not wait"
        thread.waits += 1
        turn = thread.waits
        thread.woken = False
        if timeout_s < TIMEOUT_MAX:
            self.later(max(0.0, timeout_s), lambda: self._ring(thread, turn))
        thread.blocked = True
        self._hub.switch()
        return thread.woken

    def _ring(self, thread: Thread, turn: int) -> None:
        if thread.blocked and thread.waits == turn:
            thread.blocked = False
            self._ready.append(thread)

    def wake(self, thread: Thread) -> None:
        if thread.blocked:
            thread.blocked, thread.woken = False, True
            self._ready.append(thread)

    def begin(self, thread: Thread) -> None:
        self.threads.append(thread)
        self._ready.append(thread)


_now: Scheduler | None = None


def now() -> Scheduler:
    assert _now is not None
    return _now


@contextlib.contextmanager
def scheduled(scheduler: Scheduler) -> Iterator[Scheduler]:
    """Everything here is that scheduler's."""
    global _now
    _now = scheduler
    try:
        yield scheduler
    finally:
        scheduler.end()
        _now = None


def point() -> None:
    if _now is not None:
        _now.point()


# ---- what stands for `threading` -------------------------------------------------------------------------------------


class Thread:
    _numbers = itertools.count(1)

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self.daemon = daemon
        self.name = name or f"thread-{next(self._numbers)}"
        self._call = target, args, kwargs or {}
        self._greenlet: Any = None
        self._ended = False
        self._joiners: list[Thread] = []
        self.waits, self.blocked, self.woken = 0, False, False

    def start(self) -> None:
        self._greenlet = greenlet.greenlet(self._run, now()._hub)
        now().begin(self)
        point()

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def join(self, timeout: float | None = None) -> None:
        scheduler = now()
        if self.is_alive():
            assert scheduler.current is not None
            self._joiners.append(scheduler.current)
            end_s = math.inf if timeout is None else scheduler.now_s + timeout
            while self.is_alive() and scheduler.now_s < end_s:
                scheduler.block(end_s - scheduler.now_s)

    def is_alive(self) -> bool:
        return self._greenlet is not None and not self._ended

    def switch(self) -> None:
        self._greenlet.switch()

    def kill(self) -> None:
        if self.is_alive():
            self._ended = True
            self._greenlet.throw()

    def where(self) -> str:
        """Where it stands."""
        frame = None if self._greenlet is None else self._greenlet.gr_frame
        lines = traceback.extract_stack(frame) if frame is not None else []
        return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(lines[-8:]))

    def _run(self) -> None:
        scheduler = now()
        try:
            self.run()
        except greenlet.GreenletExit:
            pass
        except BaseException:
            scheduler.crashes.append((self.name, traceback.format_exc()))
        self._ended = True
        for joiner in self._joiners:
            scheduler.wake(joiner)


def current_thread() -> Any:
    return now().current


class Lock:
    _again = False

    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0
        self._waiting: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = now()
        scheduler.point()
        me = scheduler.current or "world"
        end_s = math.inf if timeout is None or timeout < 0 else scheduler.now_s + timeout
        while self._owner is not None and not (self._again and self._owner is me):
            if not blocking or scheduler.now_s >= end_s:
                return False
            assert scheduler.current is not None, "the world waits for a lock"
            self._waiting.append(scheduler.current)
            scheduler.block(end_s - scheduler.now_s)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            waiting, self._waiting = self._waiting, []
            for thread in waiting:  # whoever runs first gets it
                now().wake(thread)
        point()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    _again = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Thread] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, depth = now(), self._lock._depth
        me = scheduler.current
        assert me is not None
        self._waiting.append(me)
        self._lock._depth, self._lock._owner = 0, None
        waiting, self._lock._waiting = self._lock._waiting, []
        for thread in waiting:
            scheduler.wake(thread)
        woken = scheduler.block(math.inf if timeout is None else timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end_s = math.inf if timeout is None else now().now_s + timeout
        while not (found := predicate()) and now().now_s < end_s:
            self.wait(end_s - now().now_s)
        return found

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for thread in woken:
            now().wake(thread)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            now().wake(thread)
        point()

    def clear(self) -> None:
        self._set = False
        point()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = now()
        scheduler.point()
        if not self._set:
            assert scheduler.current is not None
            self._waiting.append(scheduler.current)
            scheduler.block(math.inf if timeout is None else timeout)
        return self._set


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        self._value, self._changed = value, Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify_all()


# ---- what stands for `time` and `concurrent.futures` -----------------------------------------------------------------


class Future(concurrent.futures.Future):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


TimeoutError = concurrent.futures.TimeoutError


def monotonic() -> float:
    return now().now_s


def monotonic_ns() -> int:
    return int(now().now_s * 1e9)


perf_counter = time = monotonic


def sleep(seconds: float) -> None:
    now().block(seconds)
