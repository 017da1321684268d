"""ExpertCluster: one layer over many servers, called from any thread.

with ExpertCluster(["10.0.0.1:50051", "10.0.0.2:50051"], timeout_s=1.0) as experts:
    answer = experts.forward(0, hidden_states, topk_ids, topk_weights)    # as ExpertClient's
    answer.parts                                                          # who computed what
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from expertd.errors import DeadlineExceededError, ExpertdError, PlacementError, RequestCancelledError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import Forwarder
from expertd_client.cluster.answer import answer_of
from expertd_client.cluster.call import Call
from expertd_client.cluster.fast_call import FastCall, fast_call
from expertd_client.cluster.flight import Flight, start
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members, Targets
from expertd_client.cluster.policy import OnMissing, Policy
from expertd_client.cluster.result import ClusterResult
from expertd_client.cluster.shared import ClusterState
from expertd_client.cluster.sources import Source, source_of
from expertd_client.cluster.timers import Timers
from expertd_client.exchange.exchange import Exchange
from expertd_client.exchange.session import Session
from expertd_client.requests.deadline import Deadline, ThreadAlarm, deadline_in
from expertd_client.requests.e4m3 import asked_for
from expertd_client.requests.request import Request, RequestOptions
from expertd_client.requests.result import ForwardResult
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.protocol import Transport
from expertd_client.transports.table import blocking_transports

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ClusterFuture", "ExpertCluster"]

_T = TypeVar("_T")

DESCRIBE_S = 1.0
"""How long a server has to answer Describe before it counts as away."""
LOOK_S = 0.02
"""Between two looks of who waits for servers."""
LEAVE_S = 30.0
"""How long a server that left the placement has to answer what it has."""


class ClusterFuture(Future[ForwardResult]):
    """The answer to one call that is under way: a ClusterResult.  cancel() takes the call back everywhere."""

    flight: Flight

    def cancel(self) -> bool:
        return super().cancel() and self.flight.cancel()


class ExpertCluster(Forwarder):
    """Many servers of one model, as if they were one.  Thread-safe.

    servers         addresses, a Placement, or a source (expertd_client.cluster.sources)
    timeout_s       of a forward that names none; None = no limit
    max_in_flight   calls under way at once; one more waits, inside its own timeout
    on_missing      what happens to a call for experts that no server has
    f32_sums        partial sums travel in float32 also where the answer is f16 or bf16: twice the bytes, less rounding
    policy          when sub-requests are hedged and retried
    credentials     TLS and a token; None = plain text
    wire_dtype      "e4m3": hidden states are quantized before they are sent (requests/e4m3.py) where all servers
                    take that; None = they travel as they are given
    transport       makes the transport to an address; None = gRPC, or a faster one where both sides allow it

    source_error    why the source could not be read last time, "" = it could: what it said before stays in force
    """

    def __init__(
        self,
        servers: Placement | Sequence[str] | Source,
        *,
        timeout_s: float | None = None,
        max_in_flight: int = 256,
        on_missing: OnMissing = OnMissing.FAIL,
        f32_sums: bool = False,
        policy: Policy | None = None,
        credentials: Credentials | None = None,
        transport: Callable[[str], Transport] | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        self.source_error = ""
        self._timeout_s = timeout_s
        self._on_missing = on_missing
        self._f32_sums = f32_sums
        self._quantizes = asked_for(wire_dtype)
        self._slots = threading.Semaphore(max_in_flight)
        self._policy = policy or Policy()

        def own_transport(address: str) -> Transport:
            return GrpcTransport(address, credentials=credentials, offers=blocking_transports(address, credentials))

        self._members = Members(
            partial(_way, transport or own_transport),
            self._policy.stall_s,
        )
        self._state = ClusterState(self._members, self._policy, Timers(ThreadAlarm), self._wake)
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._watches: list[_Watch] = []
        self._source = source_of(servers)
        self._follow(self._source.read())
        self._follower: threading.Thread | None = None
        if self._source.every_s != math.inf:
            self._follower = threading.Thread(target=self._reread, name="expertd-placement", daemon=True)
            self._follower.start()

    @property
    def servers(self) -> dict[str, str]:
        """Address -> why it is not asked, "" = it is."""
        return {a: m.refused for a, m in self._members.by_address.items()}

    def forward_request(
        self, request: Request, *, timeout_s: float | None = None, out: Any = None, on_missing: OnMissing | None = None
    ) -> ClusterResult:
        """out: where the answer goes, [M, H] of its dtype; on_missing: instead of the cluster's."""
        call = Call(request, out, on_missing or self._on_missing, self._f32_sums)
        deadline = self._enter(call, timeout_s)
        try:
            direct = fast_call(self._state, call, deadline)
            answer = None if direct is None else direct.answer()
        except BaseException:
            self._slots.release()
            raise
        if answer is not None:
            self._slots.release()
            return answer
        landed = threading.Lock()
        landed.acquire()
        flight = self._take_off(call, deadline, lambda flight: landed.release(), direct)
        try:
            landed.acquire()
        except BaseException:
            flight.cancel()  # abandoned, by an interrupt
            raise
        return answer_of(flight, call, self._members.epoch)

    def submit_request(
        self, request: Request, *, timeout_s: float | None = None, out: Any = None, on_missing: OnMissing | None = None
    ) -> ClusterFuture:
        future = ClusterFuture()
        call = Call(request, out, on_missing or self._on_missing, self._f32_sums)

        def landed(flight: Flight) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(answer_of(flight, call, self._members.epoch))
            except Exception as error:
                future.set_exception(error)

        future.flight = self._take_off(call, self._enter(call, timeout_s), landed)
        return future

    def forward(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        out: Any = None,
        on_missing: OnMissing | None = None,
        **options: Unpack[RequestOptions],
    ) -> ClusterResult:
        """Forwarder.forward says what each argument is; out and on_missing are as in forward_request."""
        request = Request(layer, hidden_states, topk_ids, topk_weights, **options)
        return self.forward_request(request, timeout_s=timeout_s, out=out, on_missing=on_missing)

    def submit(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        out: Any = None,
        on_missing: OnMissing | None = None,
        **options: Unpack[RequestOptions],
    ) -> ClusterFuture:
        """forward() without waiting for the answer."""
        request = Request(layer, hidden_states, topk_ids, topk_weights, **options)
        return self.submit_request(request, timeout_s=timeout_s, out=out, on_missing=on_missing)

    def describe(self, *, timeout_s: float = 10.0) -> dict[str, pb.DescribeResponse]:
        """What each server said last of what it holds, accepts and chose, by address.  Waits until every server was
        asked, for timeout_s; one that has never answered is not in it, and `servers` says why."""
        self._settled.wait(timeout_s)
        return self._members.described()

    def session(self, *, timeout_s: float = 10.0) -> dict[str, Session]:
        """How messages travel to each server, and why not otherwise, by address.  Waits until every server was asked,
        for timeout_s; one that there is no connection to is not in it, and `servers` says why."""
        self._settled.wait(timeout_s)
        return self._members.sessions()

    def wait_for_layers(self, layers: Iterable[int], *, timeout_s: float = 10.0) -> None:
        """Waits until every expert of these layers has a server that takes requests; where calls leave missing ones out
        (on_missing), until every server was asked.

        Raises UnavailableError where the time is over: it names the servers that do not take requests, and why.
        PlacementError where servers that all do lack experts, at once if the list of servers never changes."""
        wanted, end_s = list(layers), time.monotonic() + timeout_s
        self._settled.wait(timeout_s)
        while self._on_missing is OnMissing.FAIL and (lacking := self._members.lacking(wanted)) is not None:
            hopeless = isinstance(lacking, PlacementError) and self._source.every_s == math.inf
            if hopeless or time.monotonic() >= end_s:
                raise lacking
            if self._closing.wait(LOOK_S):
                raise RequestCancelledError("cluster: this client was closed while it waited for servers")

    def close(self) -> None:
        self._closing.set()
        self._state.close()
        for watch in self._watches:
            watch.end()
        for thread in [watch.thread for watch in self._watches] + [self._follower]:
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    # ---- a call ------------------------------------------------------------------------------------------------------

    def _enter(self, call: Call, timeout_s: float | None) -> Deadline | None:
        """Waits until the call may begin, and brings its tensors; one of the slots is taken."""
        deadline = deadline_in(self._timeout_s if timeout_s is None else timeout_s)
        if self._closing.is_set():
            raise RequestCancelledError("cluster: this client is closed; make a new one")
        if not (self._settled.is_set() and self._members.knows(call.layer)):
            self._first_words(call.layer, self._policy.patience_s if deadline is None else deadline.left_s())
        if not self._slots.acquire(timeout=None if deadline is None else deadline.left_s()):
            assert deadline is not None
            raise deadline.crowded(call.layer)
        try:
            call.bring(self._quantizes and self._members.take_e4m3, self._members.pin(call.layer))
        except BaseException:
            self._slots.release()
            raise
        return deadline

    def _take_off(
        self,
        call: Call,
        deadline: Deadline | None,
        landed: Callable[[Flight], None],
        direct: FastCall | None = None,
    ) -> Flight:
        """The slot is free again when the flight has landed.  direct: what there is of the call already."""

        def freed(flight: Flight) -> None:
            self._slots.release()
            landed(flight)

        try:
            if direct is not None:
                return direct.hand_over(freed)
            return start(self._state, call, deadline, freed)
        except BaseException:
            self._slots.release()
            raise

    def _first_words(self, layer: int, left_s: float) -> None:
        """Waits until every server was asked what it holds, and until one has answered that knows of the layer."""
        end_s = time.monotonic() + left_s
        self._settled.wait(left_s)
        while not self._members.knows(layer) and time.monotonic() < end_s and not self._closing.is_set():
            time.sleep(0.01)

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _follow(self, targets: Targets) -> None:
        """Takes what the source says."""
        new, left = self._members.apply(targets)
        by_member = {watch.member: watch for watch in self._watches}
        self._watches = [watch for watch in self._watches if watch.thread.is_alive()]
        for member in left:
            if member in by_member:
                by_member[member].wake()
        for member in new:
            self._watches.append(_Watch(member, self._members, self._closing, self._settled))

    def _reread(self) -> None:
        while not self._closing.wait(self._source.every_s):
            try:
                self._follow(self._source.read())
                self.source_error = ""
            except (ExpertdError, OSError, ValueError) as error:  # ValueError: an address that is none
                self.source_error = str(error)  # what it said before stays in force
            except Exception as error:  # a fault of somebody's source; it is read again
                self.source_error = f"{type(error).__name__}: {error}"

    def _wake(self, member: Member) -> None:
        for watch in self._watches:
            if watch.member is member:
                watch.wake()


class _Watch:
    """A thread that asks one server what it holds, as long as it belongs to the cluster."""

    def __init__(self, member: Member, members: Members, closing: threading.Event, settled: threading.Event) -> None:
        self.member = member
        self._members = members
        self._closing = closing
        self._settled = settled
        self._waking = threading.Event()
        member.exchange.broke = self._broke
        self.thread = threading.Thread(target=self._run, name=f"expertd-watch-{member.address}", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Ask now."""
        self._waking.set()

    def _broke(self) -> None:
        if not self.member.refused and self.member.broke():
            self.wake()

    def end(self) -> None:
        """For close(): fail what is in flight."""
        self.member.exchange.close()
        self.member.transport.close()
        self._waking.set()

    def _run(self) -> None:
        member = self.member
        while not (member.leaving or self._closing.is_set()):
            self._waking.clear()
            pause_s = self._members.probed(member, self._ask())
            if self._members.settled:
                self._settled.set()
            self._waking.wait(pause_s)
        end_s = time.monotonic() + LEAVE_S
        while member.outstanding and not self._closing.wait(0.02) and time.monotonic() < end_s:
            pass
        self.end()

    def _ask(self) -> pb.DescribeResponse | ExpertdError:
        """What it says of itself; a server that comes (back) has its stream open before it is asked for anything."""
        member = self.member
        try:
            answer = self._described()
            if member.broke() or member.refused:
                agreed: Outcome[Session] = Outcome()
                member.exchange.session(agreed)
                agreed.wait(DESCRIBE_S)
                answer = self._described()  # of the process that the stream leads to
        except ExpertdError as error:
            return error
        except ValueError as error:  # gRPC's, of a channel that was closed meanwhile
            return RequestCancelledError(str(error))
        return answer

    def _described(self) -> pb.DescribeResponse:
        described: Outcome[pb.DescribeResponse] = Outcome()
        ask = self.member.transport.unary
        ask("Describe", pb.DescribeRequest(), pb.DescribeResponse, DESCRIBE_S, False, described)
        return described.wait(DESCRIBE_S)


class Outcome(Generic[_T]):
    """A waiter that a thread waits with."""

    def __init__(self) -> None:
        self._future: Future[_T] = Future()

    def answer(self, value: _T) -> None:
        self._future.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        self._future.set_exception(error)

    def wait(self, timeout_s: float) -> _T:
        """What came.  Raises what it failed with, or DeadlineExceededError where nothing did."""
        try:
            return self._future.result(timeout_s + 0.1)
        except FutureTimeoutError:
            if self._future.done():  # it failed with one
                raise
            raise DeadlineExceededError(f"got no answer within {timeout_s} s, want one") from None


def _way(transport: Callable[[str], Transport], address: str) -> tuple[Transport, Exchange]:
    made = transport(address)
    return made, Exchange(made, ThreadAlarm, reconnects=False)
