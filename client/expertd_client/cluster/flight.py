"""One call of a cluster: its parts, who was asked for each, and what is done when an answer comes, fails or is late.

A Flight is driven by events, from any thread or from one event loop: answers and failures of its parts, and `look`,
which its timer calls.  A part is a SubRequest while it is under way.  A sub-request is asked of one server; of a second
one when the first is late or hung; and once more of another, or of the same after a pause, when it failed.  The first
good answer of a sub-request counts, and nothing else of it does: the others are cancelled, and what they still say is
dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertd.common.ranges import format_ranges
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
from expertd_client.cluster.call import Call
from expertd_client.cluster.member import Member
from expertd_client.cluster.policy import Verdict, choose, verdict
from expertd_client.cluster.routing import place
from expertd_client.cluster.shared import ClusterState
from expertd_client.cluster.split import Destinations, meant
from expertd_client.cluster.sub_request import Attempt, SubRequest
from expertd_client.cluster.table import LayerTable
from expertd_client.cluster.unserved import Unserved
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import FIRST_VERSION, ForwardResult

# Why it is so: decision 107 in DECISIONS.md.
__all__ = ["Flight", "start"]

_STALE, _STALE_TRIES = (BadResponseError, LayerNotHeldError), 4
"""Errors of a server that holds something else than it said a moment ago: asked again when it has been described."""
_REPINS = 16
"""How often a call changes the version of the weights that it asks for at once, each time servers have switched
meanwhile (decision 169).  Later it pauses before, until its time is over."""


class Flight:
    """request: its tensors are numpy arrays.

    traced   what is recorded of it; None = nothing is
    landed   called once, by whoever brought the last event, when all sub-requests are answered or the call failed
    error    why it failed; None = it did not
    """

    def __init__(
        self,
        state: ClusterState,
        call: Call,
        deadline: Deadline | None,
        landed: Callable[[Flight], object],
        begin_s: float | None = None,
    ) -> None:
        self.request = call.host
        self.traced = call.traced
        self.error: ExpertdError | None = None
        self.sub_requests: list[SubRequest] = []
        self.unserved = Unserved(state.members, call.host, call.on_missing)
        self._own_version, self._repins = call.own_version, 0
        self.begin_s = state.clock() if begin_s is None else begin_s
        self._state = state
        self._deadline = deadline
        self._landed = landed
        self._lock = threading.RLock()
        self._waiting = 1  # sub-requests without a result, and one until take_off(): others may come before
        self._over = False
        self._next_look_s = math.inf

    # ---- begin -------------------------------------------------------------------------------------------------------

    def place(self, meant: Destinations, table: LayerTable) -> None:
        """Finds the sub-requests.  Raises PlacementError."""
        for sub in self._place(self.request, None, meant, table):
            self.add(sub)

    def add(self, sub: SubRequest) -> None:
        """One more."""
        self.sub_requests.append(sub)
        self._waiting += 1

    def take_off(self) -> None:
        """Sends everything that is not under way."""
        self._state.flights.add(self)
        if self._state.closed:
            self.end(RequestCancelledError("cluster: this client is closed; make a new one"))
        for sub in self.sub_requests[:]:
            if not sub.asked:
                self._ask(sub)
        with self._lock:
            self._waiting -= 1
            last = not self._waiting
        if last:
            self._land()
        if self._over:  # perhaps before it was added
            self._state.flights.discard(self)

    def sent(self, sub: SubRequest, member: Member) -> Attempt:
        """For whoever sent a sub-request himself, before take_off(): what becomes of it is told to the try."""
        attempt = Attempt(self, sub, member, self.begin_s)
        sub.tries.append(attempt)
        sub.asked = 1
        with self._lock:
            self._watch(sub, attempt, self.begin_s)
        return attempt

    def _place(
        self, request: Request, rows: NDArray[np.int64] | None, meant: Destinations, table: LayerTable
    ) -> list[SubRequest]:
        """Sub-requests for a request; rows: its tokens in the batch."""
        sub_requests, orphans = place(self._state.members, self._state.rng, request, rows, meant, table)
        for part in orphans:
            sub_requests += self.unserved.sub_requests(part)
        return sub_requests

    # ---- events ------------------------------------------------------------------------------------------------------

    def answered(self, attempt: Attempt, result: ForwardResult, at_s: float | None = None) -> None:
        """at_s: when it was; None = now."""
        sub, member = attempt.sub, attempt.member
        now_s = self._state.clock() if at_s is None else at_s
        member.answered(sub.part.request.tokens, now_s - attempt.begin_s, result)
        version = result.weights_version or FIRST_VERSION
        if not sub.part.request.weights_version:
            self._state.members.learned(member, version, self.request.layer)
        if version not in member.said:
            self._state.wake(member)
        if result.routes_computed != sub.part.routes:
            self._miscounted(attempt, result)
            return
        with self._lock:
            if attempt not in sub.tries:
                result.release()  # another was faster, or nobody waits any more
                return
            losers = [t for t in sub.tries if t is not attempt]
            if attempt.traced is not None:
                attempt.traced.answered(result.timing, int(now_s * 1e9))
            sub.tries = []
            sub.result, sub.server, sub.seconds = result, member, now_s - self.begin_s
            sub.due_s = math.inf
            self._waiting -= 1
            last = not self._waiting
        if len(sub.replicas) > 1:
            self._state.latencies.add(sub.part.request.tokens, now_s - attempt.begin_s)
        _recall(losers)
        if last:
            self._land()

    def _miscounted(self, attempt: Attempt, result: ForwardResult) -> None:
        """What it holds is not what it said: its sum is of no use."""
        result.release()
        self._state.wake(attempt.member)
        self._lost(
            attempt,
            BadResponseError.about(
                f"{attempt.member.address}: answer",
                got=f"{result.routes_computed} routes computed",
                want=f"the {attempt.sub.part.routes} that were asked for",
            ),
        )

    def failed(self, attempt: Attempt, error: ExpertdError) -> None:
        attempt.member.failed(attempt.sub.part.request.tokens, error)
        if isinstance(error, RequestCancelledError) and attempt.member.leaving and not self._state.closed:
            error = UnavailableError(f"{attempt.member.address}: it left the placement", request_id=error.request_id)
        if isinstance(error, WeightsVersionNotHeldError):
            attempt.member.lacks(attempt.sub.part.request.weights_version, self.request.layer)
            self._state.wake(attempt.member)
        if attempt.member.refused:
            self._state.wake(attempt.member)
        self._lost(attempt, error)

    def _lost(self, attempt: Attempt, error: ExpertdError) -> None:
        """A try came to nothing."""
        sub = attempt.sub
        with self._lock:
            if attempt not in sub.tries:
                return
            sub.tries.remove(attempt)
            sub.spurned.append(attempt.member)
            others = bool(sub.tries)
        if isinstance(error, DeadlineExceededError) and self._late():
            self._give_up(sub, error)
        elif verdict(error) is Verdict.HOPELESS:
            self.end(error)
        elif not others:
            self._again(sub, error)

    def look(self) -> None:
        """For the timer: does what is due."""
        now_s = self._state.clock()
        with self._lock:
            self._next_look_s = math.inf
            if self._over:
                return
            due = [sub for sub in self.sub_requests if sub.due_s <= now_s]
            self._look_at(min((sub.due_s for sub in self.sub_requests if sub.due_s > now_s), default=math.inf))
        for sub in due:
            if sub.tries:
                self._race(sub)
            elif sub.result is None:
                self._again(sub, None)

    # ---- acts --------------------------------------------------------------------------------------------------------

    def _ask(self, sub: SubRequest, also: bool = False) -> bool:
        """Sends a sub-request to the best server that it was not sent to; also: beside the tries under way.  Whether
        there was one."""
        members, now_s = self._state.members, self._state.clock()
        chosen, sub.chosen = sub.chosen, None
        version, without = sub.part.request.weights_version, [*sub.spurned, *(t.member for t in sub.tries)]
        there = [chosen] if chosen else members.usable(sub.replicas, without, version, self.request.layer)
        if not there and not also:
            sub.spurned = []
            there = members.usable(sub.replicas, version=version, layer=self.request.layer)
        if not there:
            if not also:
                self._again(sub, None)
            return False
        tokens = sub.part.request.tokens
        attempt = Attempt(self, sub, choose(there, tokens, now_s, self._state.rng), now_s)
        with self._lock:
            if self._over or sub.result is not None or sub not in self.sub_requests:
                return False
            sub.tries.append(attempt)
            sub.asked += 1
            self._watch(sub, attempt, now_s)
        try:
            attempt.request_id = attempt.member.submit(sub.part.request, self._deadline, attempt)
            if attempt.traced is not None:
                attempt.traced.sent(attempt.member.exchange.transport_name)
        except ExpertdError as error:
            self.failed(attempt, error)
        except Exception as error:  # memory that cannot be read, a number that its field cannot hold
            attempt.member.dropped(tokens)
            fault = InternalError(f"{attempt.member.address}: cannot be sent: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self.end(fault)
        if attempt not in sub.tries:  # it was answered already, or the call ended while this was sent
            attempt.recall()
        return True

    def _watch(self, sub: SubRequest, attempt: Attempt, now_s: float) -> None:
        """Sets when a sub-request is late: only where another server could be asked."""
        sub.due_s = math.inf
        if len(sub.replicas) > 1 or sub.apart:
            late_s = math.inf if sub.apart else self._state.latencies.late_s(sub.part.request.tokens)
            sub.due_s = min(now_s + late_s, max(now_s + 1e-3, attempt.member.stalls_at_s() + 1e-3))
            self._look_at(sub.due_s)

    def _look_at(self, when_s: float) -> None:
        if when_s < self._next_look_s:
            self._next_look_s = when_s
            self._state.timer.at(when_s, self.look)

    def _race(self, sub: SubRequest) -> None:
        """A sub-request that is late: asks another server, too."""
        now_s = self._state.clock()
        hung = all(t.member.stalled(now_s) for t in sub.tries)
        if hung and sub.apart:
            self._take_apart(sub)
            return
        sent = (
            not sub.apart
            and len(sub.tries) < 3
            and (hung or (len(sub.tries) == 1 and self._state.latencies.take_hedge()))
        )
        if sent and self._ask(sub, also=True):
            return
        with self._lock:  # not now: look again when its server would count as hung
            if sub.result is None and sub.tries:
                soonest = min(t.member.stalls_at_s() for t in sub.tries)
                sub.due_s = max(now_s + 0.02, soonest + 1e-3)
                self._look_at(sub.due_s)

    def _take_apart(self, sub: SubRequest) -> None:
        """A sub-request at a server that hangs, whose experts no other one holds together: goes to several instead."""
        with self._lock:
            losers, sub.tries = sub.tries, []
        _recall(losers)
        self._again(sub, None)

    def _again(self, sub: SubRequest, error: ExpertdError | None) -> None:
        """A sub-request that is nowhere in flight; error: why, None = a pause is over.  At once to a server that was
        not asked yet; where there is none, after a pause wherever its experts are then."""
        with self._lock:
            if self._over or sub.result is not None or sub.tries or sub not in self.sub_requests:
                return
        if error is None:
            self._place_anew(sub)
        elif self._usable(sub):
            self._ask(sub)
        elif isinstance(error, WeightsVersionNotHeldError):
            self._other_version(sub, error)
        elif error.retryable or (isinstance(error, _STALE) and len(sub.spurned) < _STALE_TRIES):
            self._wait(sub, error)
        else:
            self._give_up(sub, error)

    def _usable(self, sub: SubRequest) -> list[Member]:
        """Servers that it can be sent to once more."""
        request = sub.part.request
        return self._state.members.usable(sub.replicas, sub.spurned, request.weights_version, request.layer)

    def _place_anew(self, sub: SubRequest) -> None:
        """Puts sub-requests in the place of one, as its experts are held now."""
        members, part = self._state.members, sub.part
        unserved = len(self.unserved.parts)
        self.unserved.look()
        version = part.request.weights_version
        if version and not self._own_version:
            version = members.agree(self.request.layer)
            part = sub.part = replace(part, request=part.request.pinned(version))
        try:
            table = members.table(self.request.layer)
            found = meant(part.request.topk_ids, table, self.request.layer)
            if (found.orphans and members.unknown) or not all(
                members.usable(table.replicas[g], version=version, layer=self.request.layer) for g in found.groups
            ):
                self._wait(sub, None)
                return
            sub_requests = self._place(part.request, part.rows, found, table)
        except ExpertdError as gone:
            self.end(gone)
            return
        with self._lock:
            if self._over or sub not in self.sub_requests or sub.tries or sub.result is not None:
                del self.unserved.parts[unserved:]  # meanwhile somebody was asked: what failed it does that, too
                return
            self.sub_requests.remove(sub)
            self._waiting -= 1
            for other in sub_requests:
                other.asked, other.since_s = sub.asked, sub.since_s
                other.spurned = [m for m in sub.spurned if m.address in other.replicas and len(other.replicas) > 1]
                self.add(other)
            last = not self._waiting
        for other in sub_requests:
            self._ask(other)
        if last:
            self._land()

    # ---- versions of the weights -------------------------------------------------------------------------------------

    def _land(self) -> None:
        """All sub-requests are answered: the call is over, unless several versions of the weights computed them, or one
        that a server has not named in a Describe, so that nobody knows yet whether others' of that number are the same
        weights.  Those of another version than the one that all servers hold are asked once more, for that one."""
        with self._lock:
            done = [sub for sub in self.sub_requests if sub.result is not None]
            found = {_version(sub) for sub in done}
            unsaid = [sub for sub in done if sub.server is not None and _version(sub) not in sub.server.said]
            unsaid = unsaid if len({sub.server for sub in done}) > 1 else []
            again, waits = [], []
            if not self._over and (len(found) > 1 or unsaid):
                version = self._own_version or self._state.members.agree(self.request.layer) or min(found)
                self._repins += 1
                again = [sub for sub in done if self._repin(sub, version)]
                waits = [sub for sub in unsaid if sub not in again]
                if self._repins > _REPINS:  # all of them at once, or one is always behind another
                    again, waits = [], done
                for sub in waits:
                    self._drop(sub)
                self._waiting += len(again) + len(waits)
        if not again and not waits:
            self.end(None)
        for sub in again:
            self._ask(sub)
        for sub in waits:
            self._wait(sub, self._several(f"sums of versions {', '.join(map(str, sorted(found)))} of the weights"))

    def _repin(self, sub: SubRequest, version: int) -> bool:
        """The sub-request is to be computed by that version.  Whether its answer is of another one, and dropped."""
        sub.part = replace(sub.part, request=sub.part.request.pinned(version))
        if sub.result is None or _version(sub) == version:
            return False
        self._drop(sub)
        return True

    @staticmethod
    def _drop(sub: SubRequest) -> None:
        """The answer of a sub-request is of no use."""
        if sub.result is not None:
            sub.result.release()
        sub.result = sub.server = None
        sub.spurned = []

    def _other_version(self, sub: SubRequest, error: ExpertdError) -> None:
        """None of its servers holds the version any more that it was asked for: another one, unless the caller named
        it."""
        if self._own_version:
            self._give_up(sub, error)
            return
        version = self._state.members.agree(self.request.layer)
        with self._lock:
            self._repins += 1
            other = version != sub.part.request.weights_version and self._repins <= _REPINS
            if other:
                self._repin(sub, version)
                sub.spurned = []
        if other:
            self._ask(sub)
        else:
            self._wait(sub, error)

    def _wait(self, sub: SubRequest, error: ExpertdError | None) -> None:
        """Nobody can be asked for it now.  Who does not hold its version, as was said last, is asked what it holds."""
        version = sub.part.request.weights_version
        for member in self._state.members.by_address.values() if version else ():
            if not member.holds(version, self.request.layer):
                self._state.wake(member)
        policy, now_s = self._state.policy, self._state.clock()
        sub.since_s = sub.since_s or now_s
        end_s = sub.since_s + policy.patience_s if self._deadline is None else self._deadline.end_s
        if not self.unserved.fails or now_s >= end_s:
            self._give_up(sub, error)
            return
        with self._lock:
            sub.due_s = min(now_s + policy.pause(len(sub.spurned)), end_s)
            self._look_at(sub.due_s)

    def _late(self) -> bool:
        return self._deadline is not None and self._state.clock() >= self._deadline.end_s

    def _give_up(self, sub: SubRequest, error: ExpertdError | None) -> None:
        """A sub-request that nobody will answer."""
        if self.unserved.fails:
            self.end(self._apart(sub) or error or self._nobody_left(sub))
            return
        with self._lock:
            if sub not in self.sub_requests or sub.result is not None:
                return
            self.sub_requests.remove(sub)
            self.unserved.parts.append(sub.part)
            self._waiting -= 1
            last = not self._waiting
            losers, sub.tries = sub.tries, []
        _recall(losers)
        if last:
            self._land()

    def _apart(self, sub: SubRequest) -> ExpertdError | None:
        """Where servers take requests and none of them holds the version that the sub-request is asked for: that is
        why it was not answered, however much time it had.  None = it is not."""
        members, version = self._state.members, sub.part.request.weights_version
        if members.usable(sub.replicas) and not members.usable(sub.replicas, version=version, layer=self.request.layer):
            ids = sub.part.request.topk_ids
            experts = format_ranges(np.unique(ids[ids >= 0]).tolist())
            return self._several(f"no server of experts {experts} that holds version {version} of the weights")
        return None

    def _several(self, got: str) -> ExpertdError:
        """Servers hold different versions of the weights."""
        return WeightsVersionNotHeldError.about(
            f"layer {self.request.layer}",
            got=f"{got} ({self._state.members.versions_text()})",
            want="one version that all servers hold",
            remedy="ask for a version that all of them hold; or give the newest to servers that lack it: expertctl"
            " update SERVER --checkpoint DIR --version N; a server that started with a new volume, or without --held,"
            " is back at version 1",
        )

    def _nobody_left(self, sub: SubRequest) -> ExpertdError:
        """The time is over: of the call, or of waiting for a server that takes requests."""
        deadline = self._deadline
        if sub.replicas and deadline is not None and self._late() and not self._state.members.all_away(sub.replicas):
            return deadline.expired(self.request.layer, 0)
        return self.unserved.error(sub)

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
            losers = [t for sub in self.sub_requests for t in sub.tries]
            for sub in self.sub_requests:
                sub.tries = []
                if error is not None and sub.result is not None:
                    sub.result.release()
        self._state.flights.discard(self)
        _recall(losers)
        self._landed(self)
        return True

    def forget(self) -> None:
        """Lets go of tensors: a timer may know this call for a while."""
        with self._lock:
            self.sub_requests, self.unserved.parts = [], []


def _version(sub: SubRequest) -> int:
    """Of the weights that computed its answer; 0 = there is none."""
    return 0 if sub.result is None else sub.result.weights_version or FIRST_VERSION


def _recall(tries: Sequence[Attempt]) -> None:
    for attempt in tries:
        attempt.recall()


def start(state: ClusterState, call: Call, deadline: Deadline | None, landed: Callable[[Flight], object]) -> Flight:
    """Starts a call.  Raises LayerNotHeldError, ExpertIdOutOfRangeError, PlacementError."""
    flight = Flight(state, call, deadline, landed)
    table = state.members.table(call.layer)
    flight.place(meant(call.host.topk_ids, table, call.layer), table)
    if call.traced is not None:
        call.traced.split()
    flight.take_off()
    return flight
