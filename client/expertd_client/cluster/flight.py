"""One call of a cluster: its parts, who was asked for each, and what is done when an answer comes, fails or is late.

A Flight is driven by events, from any thread or from one event loop: answers and failures of its parts, and `look`,
which its timer calls.  A part is a Leg while it is under way.  A leg is asked of one server; of a second one when the
first is late or hung; and once more of another, or of the same after a pause, when it failed.  The first good answer of
a leg counts, and nothing else of it does: the others are cancelled, and what they still say is dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expertd.errors import (
    BadResponseError,
    DeadlineExceededError,
    ExpertdError,
    InternalError,
    LayerNotHeldError,
    RequestCancelledError,
    UnavailableError,
    WeightsVersionNotHeldError,
)
from expertd_client.cluster.leg import Leg, Try
from expertd_client.cluster.member import Member
from expertd_client.cluster.place import place
from expertd_client.cluster.policy import Verdict, choose, verdict
from expertd_client.cluster.split import Meant, meant
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.cluster.table import LayerTable
from expertd_client.cluster.unserved import Unserved
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import FIRST_VERSION, ForwardResult

if TYPE_CHECKING:
    from expertd_client.cluster.call import Call

# Why it is so: decision 107 in DECISIONS.md.
__all__ = ["Flight", "start"]

_STALE, _STALE_TRIES = (BadResponseError, LayerNotHeldError), 4
"""Errors of a server that holds something else than it said a moment ago: asked again when it has been described."""
_REPINS = 16
"""How often a call changes the version of the weights that it asks for: each time servers have switched meanwhile
(decision 169)."""


class Flight:
    """request: its tensors are numpy arrays.

    traced   what is recorded of it; None = nothing is
    landed   called once, by whoever brought the last event, when all legs are answered or the call failed
    error    why it failed; None = it did not
    """

    def __init__(
        self,
        around: Surroundings,
        call: Call,
        deadline: Deadline | None,
        landed: Callable[[Flight], object],
        begin_s: float | None = None,
    ) -> None:
        self.request = call.host
        self.traced = call.traced
        self.error: ExpertdError | None = None
        self.legs: list[Leg] = []
        self.unserved = Unserved(around.members, call.host, call.on_missing)
        self._own_version, self._repins = call.own_version, 0
        self.begin_s = around.clock() if begin_s is None else begin_s
        self._around = around
        self._deadline = deadline
        self._landed = landed
        self._lock = threading.RLock()
        self._waiting = 1  # legs without a result, and one until take_off(): others may come before
        self._over = False
        self._next_look_s = math.inf

    # ---- begin -------------------------------------------------------------------------------------------------------

    def place(self, meant: Meant, table: LayerTable) -> None:
        """Finds the legs.  Raises PlacementError."""
        for leg in self._place(self.request, None, meant, table):
            self.add(leg)

    def add(self, leg: Leg) -> None:
        """One more."""
        self.legs.append(leg)
        self._waiting += 1

    def take_off(self) -> None:
        """Sends everything that is not under way."""
        self._around.flights.add(self)
        if self._around.closed:
            self.end(RequestCancelledError("cluster: this client is closed; make a new one"))
        for leg in self.legs[:]:
            if not leg.asked:
                self._ask(leg)
        with self._lock:
            self._waiting -= 1
            last = not self._waiting
        if last:
            self._land()
        if self._over:  # perhaps before it was added
            self._around.flights.discard(self)

    def sent(self, leg: Leg, member: Member) -> Try:
        """For whoever sent a leg himself, before take_off(): what becomes of it is told to the try."""
        attempt = Try(self, leg, member, self.begin_s)
        leg.tries.append(attempt)
        leg.asked = 1
        with self._lock:
            self._watch(leg, attempt, self.begin_s)
        return attempt

    def _place(self, request: Request, rows: NDArray[np.int64] | None, meant: Meant, table: LayerTable) -> list[Leg]:
        """Legs for a request; rows: its tokens in the batch."""
        legs, orphans = place(self._around.members, self._around.rng, request, rows, meant, table)
        for part in orphans:
            legs += self.unserved.legs(part)
        return legs

    # ---- events ------------------------------------------------------------------------------------------------------

    def answered(self, attempt: Try, result: ForwardResult, at_s: float | None = None) -> None:
        """at_s: when it was; None = now."""
        leg, member = attempt.leg, attempt.member
        now_s = self._around.clock() if at_s is None else at_s
        member.answered(leg.part.request.tokens, now_s - attempt.begin_s, result)
        if not leg.part.request.weights_version:
            self._around.members.learned(member, result.weights_version or FIRST_VERSION)
        if result.routes_computed != leg.part.routes:
            self._miscounted(attempt, result)
            return
        with self._lock:
            if attempt not in leg.tries:
                result.release()  # another was faster, or nobody waits any more
                return
            losers = [t for t in leg.tries if t is not attempt]
            if attempt.traced is not None:
                attempt.traced.answered(result.timing, int(now_s * 1e9))
            leg.tries = []
            leg.result, leg.server, leg.seconds = result, member, now_s - self.begin_s
            leg.due_s = math.inf
            self._waiting -= 1
            last = not self._waiting
        if len(leg.holders) > 1:
            self._around.latencies.add(leg.part.request.tokens, now_s - attempt.begin_s)
        _recall(losers)
        if last:
            self._land()

    def _miscounted(self, attempt: Try, result: ForwardResult) -> None:
        """What it holds is not what it said: its sum is of no use."""
        result.release()
        self._around.wake(attempt.member)
        self._lost(
            attempt,
            BadResponseError.about(
                f"{attempt.member.address}: answer",
                got=f"{result.routes_computed} routes computed",
                want=f"the {attempt.leg.part.routes} that were asked for",
            ),
        )

    def failed(self, attempt: Try, error: ExpertdError) -> None:
        attempt.member.failed(attempt.leg.part.request.tokens, error)
        if isinstance(error, RequestCancelledError) and attempt.member.leaving and not self._around.closed:
            error = UnavailableError(f"{attempt.member.address}: it left the placement", request_id=error.request_id)
        if isinstance(error, WeightsVersionNotHeldError):
            attempt.member.lacks(attempt.leg.part.request.weights_version)
            self._around.wake(attempt.member)
        if attempt.member.refused:
            self._around.wake(attempt.member)
        self._lost(attempt, error)

    def _lost(self, attempt: Try, error: ExpertdError) -> None:
        """A try came to nothing."""
        leg = attempt.leg
        with self._lock:
            if attempt not in leg.tries:
                return
            leg.tries.remove(attempt)
            leg.spurned.append(attempt.member)
            others = bool(leg.tries)
        if isinstance(error, DeadlineExceededError) and self._late():
            self._give_up(leg, error)
        elif verdict(error) is Verdict.HOPELESS:
            self.end(error)
        elif not others:
            self._again(leg, error)

    def look(self) -> None:
        """For the timer: does what is due."""
        now_s = self._around.clock()
        with self._lock:
            self._next_look_s = math.inf
            if self._over:
                return
            due = [leg for leg in self.legs if leg.due_s <= now_s]
            self._look_at(min((leg.due_s for leg in self.legs if leg.due_s > now_s), default=math.inf))
        for leg in due:
            if leg.tries:
                self._race(leg)
            elif leg.result is None:
                self._again(leg, None)

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _ask(self, leg: Leg, also: bool = False) -> bool:
        """Sends a leg to the best server that it was not sent to; also: beside the tries under way.  Whether there was
        one."""
        members, now_s = self._around.members, self._around.clock()
        chosen, leg.chosen = leg.chosen, None
        version, without = leg.part.request.weights_version, [*leg.spurned, *(t.member for t in leg.tries)]
        there = [chosen] if chosen else members.usable(leg.holders, without, version)
        if not there and not also:
            leg.spurned = []
            there = members.usable(leg.holders, version=version)
        if not there:
            if not also:
                self._again(leg, None)
            return False
        tokens = leg.part.request.tokens
        attempt = Try(self, leg, choose(there, tokens, now_s, self._around.rng), now_s)
        with self._lock:
            if self._over or leg.result is not None or leg not in self.legs:
                return False
            leg.tries.append(attempt)
            leg.asked += 1
            self._watch(leg, attempt, now_s)
        try:
            attempt.request_id = attempt.member.submit(leg.part.request, self._deadline, attempt)
            if attempt.traced is not None:
                attempt.traced.sent(attempt.member.exchange.transport_name)
        except ExpertdError as error:
            self.failed(attempt, error)
        except Exception as error:  # memory that cannot be read, a number that its field cannot hold
            attempt.member.dropped(tokens)
            fault = InternalError(f"{attempt.member.address}: cannot be sent: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self.end(fault)
        if attempt not in leg.tries:  # it was answered already, or the call ended while this was sent
            attempt.recall()
        return True

    def _watch(self, leg: Leg, attempt: Try, now_s: float) -> None:
        """Sets when a leg is late: only where another server could be asked."""
        leg.due_s = math.inf
        if len(leg.holders) > 1 or leg.apart:
            late_s = math.inf if leg.apart else self._around.latencies.late_s(leg.part.request.tokens)
            leg.due_s = min(now_s + late_s, max(now_s + 1e-3, attempt.member.stalls_at_s() + 1e-3))
            self._look_at(leg.due_s)

    def _look_at(self, when_s: float) -> None:
        if when_s < self._next_look_s:
            self._next_look_s = when_s
            self._around.timer.at(when_s, self.look)

    def _race(self, leg: Leg) -> None:
        """A leg that is late: asks another server, too."""
        now_s = self._around.clock()
        hung = all(t.member.stalled(now_s) for t in leg.tries)
        if hung and leg.apart:
            self._take_apart(leg)
            return
        sent = (
            not leg.apart
            and len(leg.tries) < 3
            and (hung or (len(leg.tries) == 1 and self._around.latencies.take_hedge()))
        )
        if sent and self._ask(leg, also=True):
            return
        with self._lock:  # not now: look again when its server would count as hung
            if leg.result is None and leg.tries:
                soonest = min(t.member.stalls_at_s() for t in leg.tries)
                leg.due_s = max(now_s + 0.02, soonest + 1e-3)
                self._look_at(leg.due_s)

    def _take_apart(self, leg: Leg) -> None:
        """A leg at a server that hangs, whose experts no other one holds together: goes to several instead."""
        with self._lock:
            losers, leg.tries = leg.tries, []
        _recall(losers)
        self._again(leg, None)

    def _again(self, leg: Leg, error: ExpertdError | None) -> None:
        """A leg that is nowhere in flight; error: why, None = a pause is over.  At once to a server that was not asked
        yet; where there is none, after a pause wherever its experts are then."""
        with self._lock:
            if self._over or leg.result is not None or leg.tries or leg not in self.legs:
                return
        if error is None:
            self._place_anew(leg)
        elif self._around.members.usable(leg.holders, leg.spurned, leg.part.request.weights_version):
            self._ask(leg)
        elif isinstance(error, WeightsVersionNotHeldError):
            self._other_version(leg, error)
        elif error.retryable or (isinstance(error, _STALE) and len(leg.spurned) < _STALE_TRIES):
            self._wait(leg, error)
        else:
            self._give_up(leg, error)

    def _place_anew(self, leg: Leg) -> None:
        """Puts legs in the place of one, as its experts are held now."""
        members, part = self._around.members, leg.part
        unserved = len(self.unserved.parts)
        self.unserved.look()
        version = part.request.weights_version
        if version and not self._own_version:
            version = members.agree()
            part = leg.part = replace(part, request=part.request.pinned(version))
        try:
            table = members.table(self.request.layer)
            found = meant(part.request.topk_ids, table, self.request.layer)
            if (found.orphans and members.unknown) or not all(
                members.usable(table.holders[g], version=version) for g in found.groups
            ):
                self._wait(leg, None)
                return
            legs = self._place(part.request, part.rows, found, table)
        except ExpertdError as gone:
            self.end(gone)
            return
        with self._lock:
            if self._over or leg not in self.legs or leg.tries or leg.result is not None:
                del self.unserved.parts[unserved:]  # meanwhile somebody was asked: what failed it does that, too
                return
            self.legs.remove(leg)
            self._waiting -= 1
            for other in legs:
                other.asked, other.since_s = leg.asked, leg.since_s
                other.spurned = [m for m in leg.spurned if m.address in other.holders and len(other.holders) > 1]
                self.add(other)
            last = not self._waiting
        for other in legs:
            self._ask(other)
        if last:
            self._land()

    # ---- versions of the weights -------------------------------------------------------------------------------------

    def _land(self) -> None:
        """All legs are answered: the call is over, unless several versions of the weights computed them.  Then those of
        another version than the one that all servers hold are asked once more, for that one."""
        with self._lock:
            found = {leg.result.weights_version or FIRST_VERSION for leg in self.legs if leg.result is not None}
            if len(found) < 2 or self._over:
                again = []
            else:
                version = self._around.members.agree() or min(found)
                again = [leg for leg in self.legs if leg.result is not None and self._repin(leg, version)]
                self._waiting += len(again)
                self._repins += 1
        if not again:
            self.end(None)
        elif self._repins > _REPINS:
            self.end(_several(found))
        else:
            for leg in again:
                self._ask(leg)

    def _repin(self, leg: Leg, version: int) -> bool:
        """The leg is to be computed by that version.  Whether its answer is of another one, and dropped."""
        leg.part = replace(leg.part, request=leg.part.request.pinned(version))
        if leg.result is None or (leg.result.weights_version or FIRST_VERSION) == version:
            return False
        leg.result.release()
        leg.result = leg.server = None
        leg.spurned = []
        return True

    def _other_version(self, leg: Leg, error: ExpertdError) -> None:
        """None of its servers holds the version any more that it was asked for: another one, unless the caller named
        it."""
        if self._own_version:
            self._give_up(leg, error)
            return
        version = self._around.members.agree()
        with self._lock:
            self._repins += 1
            other = version != leg.part.request.weights_version and self._repins <= _REPINS
            if other:
                self._repin(leg, version)
                leg.spurned = []
        if other:
            self._ask(leg)
        else:
            self._wait(leg, error)

    def _wait(self, leg: Leg, error: ExpertdError | None) -> None:
        """Nobody can be asked for it now."""
        policy, now_s = self._around.policy, self._around.clock()
        leg.since_s = leg.since_s or now_s
        end_s = leg.since_s + policy.patience_s if self._deadline is None else self._deadline.end_s
        if not self.unserved.fails or now_s >= end_s:
            self._give_up(leg, error)
            return
        with self._lock:
            leg.due_s = min(now_s + policy.pause(len(leg.spurned)), end_s)
            self._look_at(leg.due_s)

    def _late(self) -> bool:
        return self._deadline is not None and self._around.clock() >= self._deadline.end_s

    def _give_up(self, leg: Leg, error: ExpertdError | None) -> None:
        """A leg that nobody will answer."""
        if self.unserved.fails:
            self.end(error or self._nobody_left(leg))
            return
        with self._lock:
            if leg not in self.legs or leg.result is not None:
                return
            self.legs.remove(leg)
            self.unserved.parts.append(leg.part)
            self._waiting -= 1
            last = not self._waiting
            losers, leg.tries = leg.tries, []
        _recall(losers)
        if last:
            self._land()

    def _nobody_left(self, leg: Leg) -> ExpertdError:
        if leg.holders and self._deadline is not None and self._late():
            return self._deadline.expired(self.request.layer, 0)
        return self.unserved.error(leg)

    def cancel(self) -> bool:
        """Takes the call back.  False: it has landed."""
        return self.end(RequestCancelledError("forward: taken back by its caller"))

    def end(self, error: ExpertdError | None) -> bool:
        """The call is over: answered, or failed with `error`.  False: it was over before."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            self.error = error
            losers = [t for leg in self.legs for t in leg.tries]
            for leg in self.legs:
                leg.tries = []
                if error is not None and leg.result is not None:
                    leg.result.release()
        self._around.flights.discard(self)
        _recall(losers)
        self._landed(self)
        return True

    def forget(self) -> None:
        """Lets go of tensors: a timer may know this call for a while."""
        with self._lock:
            self.legs, self.unserved.parts = [], []


def _several(versions: Collection[int]) -> ExpertdError:
    return WeightsVersionNotHeldError.about(
        "cluster",
        got=f"sums of versions {', '.join(map(str, sorted(versions)))} of the weights",
        want="one version that all servers hold",
        remedy="they were switched faster than a call takes, or one of them missed an update: expertctl versions",
    )


def _recall(tries: Sequence[Try]) -> None:
    for attempt in tries:
        attempt.recall()


def start(around: Surroundings, call: Call, deadline: Deadline | None, landed: Callable[[Flight], object]) -> Flight:
    """Starts a call.  Raises LayerNotHeldError, ExpertIdOutOfRangeError, PlacementError."""
    flight = Flight(around, call, deadline, landed)
    table = around.members.table(call.layer)
    flight.place(meant(call.host.topk_ids, table, call.layer), table)
    if call.traced is not None:
        call.traced.split()
    flight.take_off()
    return flight
