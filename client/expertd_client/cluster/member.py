"""One server of a cluster, as its clients know it: what it holds, how busy it is, whether it may be asked.

A server may be asked from the first Describe that fits the cluster until its connection breaks, it drains, it leaves
the placement, or it fails several times in a row; the next Describe that fits opens it again.  Describe is asked every
second, ten times a second while a server is away, and at once when something failed: it costs the server a message and
never touches the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    NotReadyError,
    PlacementError,
    RequestCancelledError,
    UnavailableError,
    WeightsVersionNotHeldError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.identity import Identity, held_by, identities_of, rolling_of
from expertd_client.exchange.exchange import Exchange
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.e4m3 import taken
from expertd_client.requests.request import Request
from expertd_client.requests.result import FIRST_VERSION, ForwardResult
from expertd_client.transports.protocol import Transport, Waiter

# Why it is so: decision 106 in DECISIONS.md.
__all__ = ["Member"]

_FAILURES = 5
"""Failures in a row that are not the connection's, until a server is not asked for a while."""
_REST_S, _LONGEST_S = 0.25, 10.0
"""How long a server that hung is left alone; doubled each time it hangs again."""
_BUSY_S = 5.0
"""Who answered a part so lately may take its time for a Describe."""
_HALF_S = 2.0
"""Half-life of what is remembered of a server's distance."""


class Member:
    """Thread-safe.

    placed       what the placement wants it to hold; None = whatever it says
    stall_s      Policy.stall_s
    clock        time.monotonic, or a simulation's

    held         layer -> experts that it may be asked for
    backends     layer -> name of the kernel backend
    max_tokens   its largest batch; 0 = no bound
    takes_e4m3   hidden states as e4m3; None = it has not said
    versions     of the weights that it holds, first the one that it serves; () = it has not said
    rolling      version of the weights by layer, while it switches one layer after another and has one of each; else {}
    said         those that its last Describe named, and that were compared with what other servers hold under the
                 same numbers
    asked        whether Describe was asked, and answered or not
    description  its last Describe; None = it has answered none
    misfit       whether that was of another model or other weights than the cluster's
    known        whether the cluster's tables say what it holds: it said so, or is another model's, or it was placed
    refused      why it is not asked; "" = it is
    leaving      the placement has it no more
    outstanding  parts under way there, with outstanding_tokens in all
    """

    def __init__(
        self,
        address: str,
        transport: Transport,
        exchange: Exchange,
        placed: Mapping[int, tuple[int, ...]] | None,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._clock = clock
        self.transport = transport
        self.exchange = exchange
        self.held: Mapping[int, tuple[int, ...]] = placed or {}
        self.backends: Mapping[int, str] = {}
        self._placed = placed
        self.known = placed is not None
        self._accepted: pb.DescribeResponse | None = None
        self._says: Mapping[int, tuple[int, ...]] | None = None
        self.max_tokens = 0
        self.takes_e4m3: bool | None = None
        self.versions: tuple[int, ...] = ()
        self.rolling: Mapping[int, int] = {}
        self.said: frozenset[int] = frozenset()
        self.asked = False
        self.description: pb.DescribeResponse | None = None
        self.misfit = False
        self.leaving = False
        self.refused = "it has not answered Describe yet"
        self._queued_tokens = 0  # as it said last
        self.outstanding_tokens = 0
        self.outstanding = 0
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._failures = 0
        self._strikes = 0
        self._not_before_s, self._rest = 0.0, ""
        self._heard_s = 0.0
        self._answered_s = -_BUSY_S
        self._distance_s = 0.0
        self._distance_at_s = 0.0
        self._token_s = 0.0
        self._settled: pb.Load | None = None  # what was told before the last Describe: it says more

    def __repr__(self) -> str:
        return f"Member({self.address}, {self.refused or 'in use'}, {self.outstanding} under way)"

    # ---- asked -------------------------------------------------------------------------------------------------------

    def usable(self, now_s: float) -> bool:
        """Whether it may be asked now."""
        if self.refused or self.leaving or now_s < self._not_before_s or not self.exchange.alive:
            return False
        told = self.exchange.load
        if told is not None and told is not self._settled and told.draining:
            return False
        return not (self._strikes and self.outstanding)  # after it hung: one part, to see

    def away(self) -> str:
        """Why it takes no requests, for people, without its address; "" = it does."""
        if self.leaving:
            return "it left the placement"
        if self.refused:
            return self.refused.removeprefix(f"{self.address}: ")
        told = self.exchange.load
        return "it drains" if told is not None and told is not self._settled and told.draining else ""

    def trouble(self, now_s: float) -> str:
        """Why it is not asked now, for people, without its address; "" = it is."""
        if away := self.away():
            return away
        if now_s < self._not_before_s:
            return f"left alone for {self._not_before_s - now_s:.2g} s: {self._rest}"
        return "it hung, and has one request to show that it answers" if self._strikes and self.outstanding else ""

    def stalled(self, now_s: float) -> bool:
        """Whether it has work of ours and has said nothing for much longer than that work should take."""
        if not self.outstanding:
            return False
        expected_s = self._distance_s + (self.outstanding_tokens + self._queued_tokens) * self._token_s
        return now_s - self._heard_s > max(self._stall_s, 4.0 * expected_s)

    def stalls_at_s(self) -> float:
        """When it will be, if it says nothing until then."""
        expected_s = self._distance_s + (self.outstanding_tokens + self._queued_tokens) * self._token_s
        return self._heard_s + max(self._stall_s, 4.0 * expected_s)

    def wait_s(self, tokens: int, now_s: float) -> float:
        """For choose(): its distance, and the service of what waits there, of ours that is under way, and of `tokens`.
        What is remembered of the distance fades, so that a server that was slow is tried again."""
        ahead = max(self._queued_tokens, self.outstanding_tokens) + tokens
        fade = 0.5 ** ((now_s - self._distance_at_s) / _HALF_S) if self._distance_s else 0.0
        return self._distance_s * fade + ahead * max(self._token_s, 1e-9)

    def submit(self, request: Request, deadline: Deadline | None, waiter: Waiter[ForwardResult]) -> int:
        """Sends a part.  Whoever calls says answered() or failed() when it ended."""
        self.begun(request.tokens)
        return self.exchange.submit(request, deadline, waiter)

    def begun(self, tokens: int) -> None:
        """A part is under way."""
        with self._lock:
            if not self.outstanding:
                self._heard_s = self._clock()
            self.outstanding += 1
            self.outstanding_tokens += tokens

    def answered(self, tokens: int, seconds: float, result: ForwardResult) -> None:
        """A part of `tokens` tokens was answered after `seconds`."""
        timing, load = result.timing, result.load
        inside_ns = timing.queue_ns + timing.copy_in_ns + timing.kernel_ns + timing.copy_out_ns
        self.heard(tokens, seconds, inside_ns, load.queued_tokens, load.token_ns)

    def heard(
        self, tokens: int, seconds: float, inside_ns: int, queued_tokens: int, token_ns: float, late: bool = False
    ) -> None:
        """answered(), with what the answer said.  late: it may have come earlier than after `seconds`."""
        now_s = self._clock()
        with self._lock:
            self._ended(tokens)
            self._heard_s = self._answered_s = now_s
            self._failures = self._strikes = 0
            self._queued_tokens = queued_tokens
            self._token_s = token_ns * 1e-9
            distance_s = max(0.0, seconds - inside_ns * 1e-9)
            if not late or distance_s < self._distance_s:
                self._distance_s += (distance_s - self._distance_s) * 0.2
                self._distance_at_s = now_s

    def failed(self, tokens: int, error: ExpertdError) -> None:
        """A part failed here."""
        with self._lock:
            self._ended(tokens)
            if isinstance(error, RequestCancelledError | DeadlineExceededError):
                return  # the caller's time was over: nothing is known of the server
            now_s = self._clock()
            self._heard_s = now_s
            if isinstance(error, WeightsVersionNotHeldError):
                return  # nothing is wrong with it
            if isinstance(error, UnavailableError | DrainingError | NotReadyError):
                self.refused = self.refused or error.message
                return
            if error.retryable:
                self._not_before_s = max(self._not_before_s, now_s + max(1e-3, error.retry_after_us * 1e-6))
                self._rest = error.message
                return
            self._failures += 1
            if self._failures >= _FAILURES:
                self.refused = f"{self._failures} failures in a row, the last: {error.message}"

    def dropped(self, tokens: int) -> None:
        """A part was taken back; from a server that hangs: it is left alone, for longer each time."""
        now_s = self._clock()
        with self._lock:
            if self.stalled(now_s) and now_s >= self._not_before_s:
                self._strikes += 1
                self._not_before_s = now_s + min(_LONGEST_S, _REST_S * 2.0**self._strikes)
                self._rest = "it had requests and said nothing"
            self._ended(tokens)

    def _ended(self, tokens: int) -> None:
        self.outstanding -= 1
        self.outstanding_tokens -= tokens

    # ---- versions ----------------------------------------------------------------------------------------------------

    def holds(self, version: int, layer: int) -> bool:
        """Whether it may be asked for that version of a layer."""
        return self.rolling.get(layer) == version if self.rolling else version in self.versions

    def serves(self, layer: int) -> int:
        """The version of a layer that it computes where it is asked for none; 0 = not known."""
        return self.rolling.get(layer, 0) if self.rolling else self.versions[0] if self.versions else 0

    def computed(self, version: int, layer: int) -> bool:
        """It answered with that version, and was not asked for one.  Whether that is another than it served before,
        which it may hold still.  One that it has not named yet may be of other weights than others' of that number."""
        now = self.versions
        if self.rolling:
            if self.rolling.get(layer) == version or version not in self.said:
                return False
            self.rolling = {**self.rolling, layer: version}
            return True
        if not now or now[0] == version or version not in self.said:
            return False
        self.versions = (version, *(v for v in now if v != version))[:2]
        return True

    def lacks(self, version: int, layer: int) -> None:
        """It refused a request for that version."""
        if self.rolling:  # and has others of its other layers; Describe will say which
            self.rolling = {n: v for n, v in self.rolling.items() if n != layer}
            return
        self.versions = tuple(v for v in self.versions if v != version)

    # ---- watched -----------------------------------------------------------------------------------------------------

    def place(self, placed: Mapping[int, tuple[int, ...]] | None) -> None:
        """The placement wants this of it from now on."""
        self._placed = placed
        self.known = self.known or placed is not None
        if self._says is None:
            self.held = placed or {}
        else:
            self.held = self._says if placed is None else _both(placed, self._says)

    def described(self, answer: pb.DescribeResponse, identity: Identity) -> bool:
        """What it says of itself.  Whether that changes what is held where."""
        before, refused = self.held, f"{self.address}: it drains" if answer.load.draining else ""
        self.description, self.misfit = answer, False
        try:
            if not self._says_again(answer):
                self.said = identity.check(self.address, answer)
        except PlacementError as error:
            self._accepted, self.said, refused, self.misfit = None, frozenset(), error.message, True
        else:
            if self._accepted is None:
                self._accepted, self._says = answer, held_by(answer)
            self.backends = {layer.layer: layer.backend for layer in answer.layers}
            self.max_tokens = answer.limits.max_tokens
            self.takes_e4m3 = taken(answer)
            self.place(self._placed)
        held = [v.number for v in answer.versions] or [FIRST_VERSION]
        self.versions = tuple(v for v in held if v in self.said or not self.said)
        self.rolling = {n: v for n, v in rolling_of(answer).items() if v in self.versions}
        with self._lock:
            self.asked = True
            self._settled = self.exchange.load
            self.refused = refused
            self._failures = 0
            self._token_s = self._token_s or answer.load.token_ns * 1e-9
            self._queued_tokens = answer.load.queued_tokens
        return before != self.held

    def _says_again(self, answer: pb.DescribeResponse) -> bool:
        """Whether it says what it said when it was accepted; looking at it again each second would cost callers."""
        last = self._accepted
        same = last is not None and identities_of(last) == identities_of(answer)
        same = same and last is not None and rolling_of(last) == rolling_of(answer)
        if same and last is not None and last.model == answer.model and last.layers == answer.layers:
            return True
        self._accepted = None
        return False

    def broke(self) -> bool:
        """Whether there is no connection.  What it said is then no word of whoever is connected to next: it is not
        asked until it was described once more."""
        if self.exchange.alive:
            return False
        self.refused = self.refused or f"{self.address}: the connection broke, and it has not said yet what it holds"
        return True

    def silent(self, error: ExpertdError) -> None:
        """It did not answer Describe.  Who computes for us is busy, not away: its parts say by themselves whether it
        hangs, and were it away, calls would wait for a Describe that comes late."""
        self.asked = True
        now_s = self._clock()
        busy = isinstance(error, DeadlineExceededError) and now_s - self._answered_s < _BUSY_S and not self.refused
        if not busy and (now_s - self._heard_s > 1.0 or not self.outstanding):
            self.refused, self.misfit = error.message, False  # whoever comes next may be another one


def _both(placed: Mapping[int, tuple[int, ...]], says: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Experts of a placement that a server says it holds."""
    found = {layer: tuple(sorted(set(experts) & set(says.get(layer, ())))) for layer, experts in placed.items()}
    return {layer: experts for layer, experts in found.items() if experts}
