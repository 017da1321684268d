"""Which replica, when a second one is asked too, when a failed part is tried again: decisions over values and a clock
that is an argument.  What acts on them is in `flight`.

    choose     of two random replicas the one that would answer sooner, by the load that servers tell with each answer
    hedge      a part that takes longer than 95 % of recent ones goes to a second replica as well, within a budget
    retry      a part that failed goes to another replica at once, or to the same one after a pause
    stalled    a server that has work of ours and says nothing is passed over, and its parts are raced: no budget
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from expertd.errors import (
    BackendFailedError,
    BadResponseError,
    DeadlineExceededError,
    ExpertdError,
    InternalError,
    LayerNotHeldError,
)

__all__ = ["Choice", "Latencies", "OnMissing", "Policy", "Verdict", "choose", "verdict"]

_T = TypeVar("_T", bound="Choice")


class OnMissing(Enum):
    """What becomes of a call where some experts cannot be had.

    FAIL          it raises; before, it waits for a server to come back, inside its time
    SKIP          their terms are left out of the sum
    RENORMALIZE   the same, and the weights of a token's other routes are scaled to the old sum
    """

    FAIL = "fail"
    SKIP = "skip"
    RENORMALIZE = "renormalize"


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of a cluster, in seconds.

    hedge        share of the parts that may be sent twice because they are late; 0 = none
    stall_s      least time without a word from a server that has work of ours, before it counts as hung
    patience_s   how long a call without a deadline waits for a server of its experts to come back
    pause_s      before a part is tried again where there is no other replica; doubled each time, up to max_pause_s
    """

    hedge: float = 0.05
    stall_s: float = 0.2
    patience_s: float = 10.0
    pause_s: float = 0.02
    max_pause_s: float = 0.25

    def pause(self, tries: int) -> float:
        """Before the next try, after `tries` of them."""
        return min(self.max_pause_s, self.pause_s * 2.0 ** min(tries, 16))


class Choice(Protocol):
    """A server, as choose() sees it."""

    def wait_s(self, tokens: int, now_s: float) -> float:
        """How long it would take for that many more tokens."""
        ...

    def stalled(self, now_s: float) -> bool: ...


def choose(candidates: Sequence[_T], tokens: int, now_s: float, rng: random.Random) -> _T:
    """The better of two random ones; stalled servers only where there is no other."""
    if len(candidates) == 1:
        return candidates[0]
    lively = [c for c in candidates if not c.stalled(now_s)] or candidates
    if len(lively) == 1:
        return lively[0]
    first, second = int(rng.random() * len(lively)), int(rng.random() * (len(lively) - 1))
    one, other = lively[first], lively[second + (second >= first)]
    return one if one.wait_s(tokens, now_s) <= other.wait_s(tokens, now_s) else other


class Verdict(Enum):
    """What a failed part means for the call."""

    ELSEWHERE = "another replica may answer it"
    HOPELESS = "every replica would say the same"


_OF_ONE_SERVER = (BackendFailedError, BadResponseError, DeadlineExceededError, InternalError, LayerNotHeldError)
"""Not retryable at the server that said so, and no fault of the request."""


def verdict(error: ExpertdError) -> Verdict:
    """Whether another server may answer what this one refused."""
    return Verdict.ELSEWHERE if error.retryable or isinstance(error, _OF_ONE_SERVER) else Verdict.HOPELESS


class Latencies:
    """Recent times of parts, by their size, and the budget of hedges.  Thread-safe."""

    WINDOW, LEAST, EVERY, SAVED = 256, 20, 16, 10.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._budget = 0.0
        self._lock = threading.Lock()
        self._recent: dict[int, deque[float]] = {}
        self._late: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """A part that has replicas was answered."""
        size = tokens.bit_length()
        with self._lock:
            self._budget = min(self.SAVED, self._budget + self._share)
            recent = self._recent.get(size)
            if recent is None:
                recent = self._recent[size] = deque(maxlen=self.WINDOW)
            recent.append(seconds)
            count = self._counts[size] = self._counts.get(size, 0) + 1
            if count >= self.LEAST and (size not in self._late or count % self.EVERY == 0):
                self._late[size] = sorted(recent)[int(0.95 * len(recent))]

    def late_s(self, tokens: int) -> float:
        """The 95th percentile of such parts; infinite while it is not known, or where nothing is hedged."""
        return self._late.get(tokens.bit_length(), math.inf) if self._share else math.inf

    def take_hedge(self) -> bool:
        """One hedge of the budget, if it has one."""
        with self._lock:
            if self._budget < 1.0:
                return False
            self._budget -= 1.0
            return True
