"""AsyncExpertCluster: one layer over many servers, called from one event loop.

async with AsyncExpertCluster(["10.0.0.1:50051", "10.0.0.2:50051"], timeout_s=1.0) as experts:
    answers = await asyncio.gather(*(experts.forward(n, x, ids, weights) for n in layers))
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from expertd.errors import DeadlineExceededError, ExpertdError, PlacementError, RequestCancelledError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import AsyncForwarder
from expertd_client.cluster.answer import answer_of
from expertd_client.cluster.call import Call
from expertd_client.cluster.cluster import DESCRIBE_S, LEAVE_S, LOOK_S
from expertd_client.cluster.flight import start
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members, Targets
from expertd_client.cluster.policy import OnMissing, Policy
from expertd_client.cluster.result import ClusterResult
from expertd_client.cluster.shared import ClusterState
from expertd_client.cluster.sources import Source, source_of
from expertd_client.cluster.timers import Timers
from expertd_client.exchange.exchange import Exchange
from expertd_client.exchange.session import Session
from expertd_client.requests.deadline import Deadline, LoopAlarm, deadline_in
from expertd_client.requests.e4m3 import asked_for
from expertd_client.requests.request import Request, RequestOptions
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.protocol import Transport
from expertd_client.transports.table import loop_transports

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncExpertCluster"]

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="AsyncExpertCluster")


class AsyncExpertCluster(AsyncForwarder):
    """ExpertCluster's twin in an event loop; the arguments are the same."""

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
        self._source = source_of(servers)
        self.source_error = ""
        self._timeout_s = timeout_s
        self._on_missing = on_missing
        self._f32_sums = f32_sums
        self._quantizes = asked_for(wire_dtype)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._policy = policy or Policy()

        def own_transport(address: str) -> Transport:
            return AioGrpcTransport(address, credentials=credentials, offers=loop_transports(address, credentials))

        self._members = Members(
            partial(_way, transport or own_transport),
            self._policy.stall_s,
        )
        self._state = ClusterState(self._members, self._policy, Timers(LoopAlarm), self._wake)
        self._settled = asyncio.Event()
        self._waking: dict[Member, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._following = False

    @property
    def servers(self) -> dict[str, str]:
        """Address -> why it is not asked, "" = it is."""
        return {a: m.refused for a, m in self._members.by_address.items()}

    async def forward_request(
        self, request: Request, *, timeout_s: float | None = None, out: Any = None, on_missing: OnMissing | None = None
    ) -> ClusterResult:
        """out: where the answer goes, [M, H] of its dtype; on_missing: instead of the cluster's."""
        deadline = deadline_in(self._timeout_s if timeout_s is None else timeout_s)
        call = Call(request, out, on_missing or self._on_missing, self._f32_sums)
        await self._settle(deadline, request.layer)
        await self._take_slot(call, deadline)
        try:
            landed = asyncio.Event()
            call.bring(self._quantizes and self._members.take_e4m3, self._members.pin(call.layer))
            flight = start(self._state, call, deadline, lambda flight: landed.set())
            try:
                await landed.wait()
            except asyncio.CancelledError:
                flight.cancel()
                raise
            return answer_of(flight, call, self._members.epoch)
        finally:
            self._slots.release()

    async def forward(
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
        return await self.forward_request(request, timeout_s=timeout_s, out=out, on_missing=on_missing)

    async def describe(self, *, timeout_s: float = 10.0) -> dict[str, pb.DescribeResponse]:
        """What each server said last of what it holds, accepts and chose, by address.  Waits until every server was
        asked, for timeout_s; one that has never answered is not in it, and `servers` says why."""
        await self._settle(deadline_in(timeout_s), None)
        return self._members.described()

    async def session(self, *, timeout_s: float = 10.0) -> dict[str, Session]:
        """How messages travel to each server, and why not otherwise, by address.  Waits until every server was asked,
        for timeout_s; one that there is no connection to is not in it, and `servers` says why."""
        await self._settle(deadline_in(timeout_s), None)
        return self._members.sessions()

    async def wait_for_layers(self, layers: Iterable[int], *, timeout_s: float = 10.0) -> None:
        """Waits until every expert of these layers has a server that takes requests; where calls leave missing ones out
        (on_missing), until every server was asked.

        Raises UnavailableError where the time is over: it names the servers that do not take requests, and why.
        PlacementError where servers that all do lack experts, at once if the list of servers never changes."""
        wanted, end_s = list(layers), time.monotonic() + timeout_s
        await self._settle(deadline_in(timeout_s), None)
        while self._on_missing is OnMissing.FAIL and (lacking := self._members.lacking(wanted)) is not None:
            hopeless = isinstance(lacking, PlacementError) and self._source.every_s == math.inf
            if hopeless or time.monotonic() >= end_s:
                raise lacking
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        self._state.close()
        for member in self._members.by_address.values():
            member.exchange.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self: _Self) -> _Self:
        await self._settle(None, None)
        return self

    # ---- a call ------------------------------------------------------------------------------------------------------

    async def _settle(self, deadline: Deadline | None, layer: int | None) -> None:
        """Follows the source from the first call on.  Waits until every server was asked what it holds, and until one
        has answered that knows of the layer."""
        if self._state.closed:
            raise RequestCancelledError("cluster: this client is closed; make a new one")
        if not self._following:
            self._following = True
            self._follow(self._source.read())
            if self._source.every_s < math.inf:
                self._start(self._reread())
        if self._settled.is_set() and (layer is None or self._members.knows(layer)):
            return
        left_s = self._policy.patience_s if deadline is None else deadline.left_s()
        end_s = time.monotonic() + left_s
        with contextlib.suppress(asyncio.TimeoutError):  # then with those that have answered
            await asyncio.wait_for(self._settled.wait(), left_s)
        while layer is not None and not self._members.knows(layer) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    async def _take_slot(self, call: Call, deadline: Deadline | None) -> None:
        if deadline is None or not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            await asyncio.wait_for(self._slots.acquire(), deadline.left_s())
        except asyncio.TimeoutError:
            raise deadline.crowded(call.layer) from None

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _follow(self, targets: Targets) -> None:
        """Takes what the source says."""
        new, left = self._members.apply(targets)
        for member in left:
            self._wake(member)
        for member in new:
            self._waking[member] = asyncio.Event()
            member.exchange.broke = partial(self._broke, member)
            self._start(self._watch(member))

    async def _reread(self) -> None:
        while not self._state.closed:
            await asyncio.sleep(self._source.every_s)
            try:
                self._follow(await asyncio.to_thread(self._source.read))
                self.source_error = ""
            except (ExpertdError, OSError, ValueError) as error:  # ValueError: an address that is none
                self.source_error = str(error)  # what it said before stays in force
            except Exception as error:  # a fault of somebody's source; it is read again
                self.source_error = f"{type(error).__name__}: {error}"

    def _wake(self, member: Member) -> None:
        waking = self._waking.get(member)
        if waking is not None:
            waking.set()

    def _broke(self, member: Member) -> None:
        if not member.refused and member.broke():
            self._wake(member)

    async def _watch(self, member: Member) -> None:
        """Asks one server what it holds, as long as it belongs to the cluster."""
        waking = self._waking[member]
        try:
            while not (member.leaving or self._state.closed):  # asyncio.wait_for may swallow what close() cancels
                waking.clear()
                pause_s = self._members.probed(member, await self._ask(member))
                if self._members.settled:
                    self._settled.set()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waking.wait(), pause_s)
            end_s = time.monotonic() + LEAVE_S
            while member.outstanding and time.monotonic() < end_s and not self._state.closed:
                await asyncio.sleep(0.02)
        finally:
            del self._waking[member]
            member.exchange.close()
            member.transport.close()
            await member.transport.wait_closed()

    async def _ask(self, member: Member) -> pb.DescribeResponse | ExpertdError:
        """What it says of itself; a server that comes (back) has its stream open before it is asked for anything."""
        try:
            answer = await self._described(member)
            if member.broke() or member.refused:
                agreed: _Outcome[Session] = _Outcome()
                member.exchange.session(agreed)
                await agreed.wait(DESCRIBE_S)
                answer = await self._described(member)  # of the process that the stream leads to
        except ExpertdError as error:
            return error
        return answer

    @staticmethod
    async def _described(member: Member) -> pb.DescribeResponse:
        described: _Outcome[pb.DescribeResponse] = _Outcome()
        ask = member.transport.unary
        ask("Describe", pb.DescribeRequest(), pb.DescribeResponse, DESCRIBE_S, False, described)
        return await described.wait(DESCRIBE_S)


class _Outcome(Generic[_T]):
    """A waiter that a task waits with."""

    def __init__(self) -> None:
        self._future: asyncio.Future[_T | ExpertdError] = asyncio.get_running_loop().create_future()

    def answer(self, value: _T) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        if not self._future.done():
            self._future.set_result(error)

    async def wait(self, timeout_s: float) -> _T:
        """What came.  Raises what it failed with, or DeadlineExceededError where nothing did."""
        try:
            value = await asyncio.wait_for(self._future, timeout_s + 0.1)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(f"got no answer within {timeout_s} s, want one") from None
        if isinstance(value, ExpertdError):
            raise value
        return value


def _way(transport: Callable[[str], Transport], address: str) -> tuple[Transport, Exchange]:
    made = transport(address)
    return made, Exchange(made, LoopAlarm, reconnects=False)
