"""Clients in a closed loop on one forwarder, each answer checked and timed; and what an event did to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertctl.bench.faults.failures import Failures
from expertctl.common.percentiles import Durations
from expertd_client.clients.forwarder import Forwarder
from expertd_client.requests.request import Request

__all__ = ["LoadClients", "Effect", "effect", "p99_ms"]

_PAUSE_S = 0.01
"""After a failed call: a cluster that is gone is not asked at full speed."""


class LoadClients:
    """forwarder is called with `request` by so many threads until close(); expected: [M, H] f32; bound: how far an
    answer may be from it, relative.

    calls    (begin, end) of each call that was right, on time.monotonic(); failures: the others
    """

    def __init__(
        self, forwarder: Forwarder, request: Request, expected: NDArray[np.float32], bound: float, threads: int
    ) -> None:
        self.calls: list[tuple[float, float]] = []
        self.failures = Failures()
        self._forwarder = forwarder
        self._request = request
        self._expected = expected
        self._bound = bound
        self._stop = threading.Event()
        self._latest_s = [0.0] * threads  # when the last call of each that was answered had begun
        self._threads = [threading.Thread(target=self._run, args=(n,), name="expertd-caller") for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, calls: int, limit_s: float) -> None:
        """Until so many more calls were answered."""
        wanted, end_s = len(self.calls) + calls, time.monotonic() + limit_s
        while len(self.calls) < wanted and time.monotonic() < end_s:
            time.sleep(0.005)

    def all_go_on(self, limit_s: float) -> bool:
        """Waits until each thread has the answer to a call that it begins from now on; whether that was in time."""
        now_s = time.monotonic()
        while not (done := min(self._latest_s) >= now_s) and time.monotonic() < now_s + limit_s:
            time.sleep(0.005)
        return done

    def _run(self, n: int) -> None:
        while not self._stop.is_set():
            begin_s = time.monotonic()
            why = self._call()
            end_s = time.monotonic()
            if why:
                self.failures.failed(begin_s, why)
                time.sleep(_PAUSE_S)
            else:
                self.calls.append((begin_s, end_s))
                self._latest_s[n] = begin_s

    def _call(self) -> str | Exception:
        """Why a call failed; "" = it did not."""
        try:
            output = np.asarray(self._forwarder.forward_request(self._request).output, np.float32)
        except Exception as error:
            return error
        off = float(np.linalg.norm(output - self._expected) / np.linalg.norm(self._expected))
        return "" if off <= self._bound else f"wrong: {off:.1e} away from what was expected"

    def __enter__(self) -> LoadClients:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one event: the longest call that was under way from then until all was as before, and when throughput was
    back; how long calls took that began in the seconds before it, and after."""

    longest_s: float
    recovered_s: float
    before: Sequence[float] = ()
    during: Sequence[float] = ()


def effect(
    calls: Sequence[tuple[float, float]],
    before_s: float,
    at_s: float,
    until_s: float,
    back_s: float,
    window_s: float = 0.2,
    settle: float = 0.5,
) -> Effect:
    """What an event at `at_s` did to calls (begin, end) until `until_s`; nothing happened from `before_s` on, and at
    `back_s` all was as before.

    Recovered: the end of the first window in which as many calls were answered as in 95 % of the median window of the
    later part (`settle`, as a share of the time) of that time, when those who are left do what they can."""
    longest_s = max((end - begin for begin, end in calls if end >= at_s and begin <= back_s), default=back_s - at_s)
    ends = np.array([end for _, end in calls if at_s <= end <= until_s])
    step_s = window_s / 4
    starts = np.arange(at_s, until_s - window_s + 1e-9, step_s)
    times = [[e - b for b, e in calls if low <= b < high] for low, high in ((before_s, at_s), (at_s, until_s))]
    if not len(starts) or not len(ends):
        return Effect(longest_s, until_s - at_s, *times)
    ends.sort()
    counts = np.searchsorted(ends, starts + window_s) - np.searchsorted(ends, starts)
    later = counts[starts >= at_s + settle * (until_s - at_s)]
    good = np.flatnonzero(counts >= 0.95 * float(np.median(later if len(later) else counts)))
    back_s = float(starts[good[0]] - at_s + window_s) if len(good) else until_s - at_s
    return Effect(longest_s, back_s, *times)


def p99_ms(seconds: Sequence[float]) -> float:
    """The 99th percentile in milliseconds; 0 of none."""
    times = Durations()
    for s in seconds:
        times.add(s)
    return round(1e3 * times.summary().p99_s, 2)
