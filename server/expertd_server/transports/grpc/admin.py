"""expertd.v1.AdminService and WeightsService on grpc.aio, at an address of their own: how a server is given other
experts, or new weights.

Its callers need the right "admin" where there is a file of callers.  It changes nothing itself: Changes does, in
threads, and no call here keeps the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import grpc

from expertd.common.ranges import parse_ranges
from expertd.errors import ChangeRefusedError, MalformedMessageError, NotReadyError
from expertd.placement import MOST_EXPERTS
from expertd.v1 import admin_service_pb2 as pb
from expertd.v1 import admin_service_pb2_grpc as stubs
from expertd.v1 import weights_service_pb2_grpc as weights_stubs
from expertd.v1.expert_service_pb2 import Memory
from expertd_server.boot.memory import MemoryPlan
from expertd_server.config.values import Address
from expertd_server.residence.changes import Changes
from expertd_server.service.access import ADMIN
from expertd_server.service.response import error_of
from expertd_server.transports.grpc.disconnects import tell_of_leaving_at_debug
from expertd_server.transports.grpc.server import LOOP, bindable
from expertd_server.transports.grpc.weights import MOST_MESSAGE_BYTES, WeightsServicer
from expertd_server.transports.security import Gate, Security, tls_credentials
from expertd_server.updates.updates import Updates
from expertd_server.views.describe import memory_message
from expertd_server.views.metrics import Metrics

# Why it is so: decision 114 in DECISIONS.md.
__all__ = ["AdminTransport"]

_T = TypeVar("_T")

_LOOK_S = 0.02
"""How often a caller of Prepare is told how far it is, if it got further."""
_MOST_LAYERS, _MOST_IDS, _MOST_TEXT = 1 << 14, 1 << 20, 1 << 20
_MOST_LINGER_MS, _MOST_NAME, _KEEP_S = 60_000, 256, 600


class AdminTransport:
    """fingerprint: of the model served; ready: whether the server has loaded what it holds at first."""

    def __init__(
        self,
        changes: Changes,
        updates: Updates,
        metrics: Metrics,
        fingerprint: str,
        listen: Address,
        security: Security,
        ready: Callable[[], bool],
    ) -> None:
        gate = Gate(security.callers, metrics.reloaded)
        self._servicer = _Servicer(changes, fingerprint, gate, ready)
        self._weights = WeightsServicer(updates, fingerprint, gate, ready)
        self._listen, self._security, self._told = listen, security, metrics.reloaded
        self._server: Any = None

    def start(self) -> str:
        """Listen.  The address.  Raises OSError and FileError."""
        LOOP.acquire()
        try:
            return str(LOOP.run(self._start()))
        except BaseException:
            LOOP.release()
            raise

    async def _start(self) -> Address:
        tell_of_leaving_at_debug()
        # its callers ask often whether it is still there: loading may take long
        pings = [("grpc.http2.min_ping_interval_without_data_ms", 2_000), ("grpc.http2.max_ping_strikes", 0)]
        most = ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), most, *pings])
        stubs.add_AdminServiceServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        weights_stubs.add_WeightsServiceServicer_to_server(self._weights, server)  # type: ignore[no-untyped-call]
        credentials = tls_credentials(self._security, self._told)
        with bindable(self._listen):
            try:
                if credentials is None:
                    port = server.add_insecure_port(str(self._listen))
                else:
                    port = server.add_secure_port(str(self._listen), credentials)
            except RuntimeError as e:
                raise OSError(str(e)) from e
        await server.start()
        self._server = server
        return self._listen if self._listen.path else Address(self._listen.host, port)

    def close(self) -> None:
        """At once; a change that is prepared or committed goes on.  May be called twice."""
        self._weights.close()
        server, self._server = self._server, None
        if server is not None:
            LOOP.run(server.stop(0))
            LOOP.release()


class _Servicer(stubs.AdminServiceServicer):
    """The four methods."""

    def __init__(self, changes: Changes, fingerprint: str, gate: Gate, ready: Callable[[], bool]) -> None:
        self._changes, self._fingerprint, self._gate, self._ready = changes, fingerprint, gate, ready

    async def Prepare(  # noqa: N802 - gRPC's name
        self, request: pb.PrepareRequest, context: Any
    ) -> AsyncIterator[pb.PrepareResponse]:
        try:
            self._admit(context)
            wanted = await asyncio.to_thread(self._wanted, request)
            if request.dry_run:
                plan = await asyncio.to_thread(self._changes.room_for, wanted)
                yield pb.PrepareResponse(memory=_memory(plan))
                return
            job = self._changes.prepare(request.change, wanted, request.keep_s or _KEEP_S)
            told = (-1, -1)
            while not job.ended.is_set():
                if (job.layers, job.done) != told:
                    told = (job.layers, job.done)
                    yield pb.PrepareResponse(layers=job.layers, done=job.done)
                await asyncio.sleep(_LOOK_S)
            if job.error is not None:
                raise job.error
            yield pb.PrepareResponse(layers=job.layers, done=job.done, memory=_memory(job.memory))
        except Exception as e:
            await _abort(context, e, "Prepare")

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:  # noqa: N802 - gRPC's name
        def commit() -> pb.CommitResponse:
            if request.linger_ms > _MOST_LINGER_MS:
                raise MalformedMessageError.about("linger_ms", got=request.linger_ms, want=f"at most {_MOST_LINGER_MS}")
            self._changes.commit(_named(request), request.epoch, request.linger_ms * 1e-3)
            return pb.CommitResponse()

        return await self._do(commit, context, "Commit")

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802 - gRPC's name
        def abort() -> pb.AbortResponse:
            self._changes.abort(_named(request))
            return pb.AbortResponse()

        return await self._do(abort, context, "Abort")

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802 - gRPC's name
        def status() -> pb.StatusResponse:
            job, epoch = self._changes.job, self._changes.epoch
            if job is None:
                return pb.StatusResponse(placement_epoch=epoch)
            return pb.StatusResponse(
                change=job.name, state=job.state, layers=job.layers, done=job.done, placement_epoch=epoch
            )

        return await self._do(status, context, "Status")

    async def _do(self, work: Callable[[], _T], context: Any, what: str) -> _T:
        """work() in a thread, for those who may."""
        try:
            self._admit(context)
            return await asyncio.to_thread(work)
        except Exception as e:
            await _abort(context, e, what)
            raise

    def _admit(self, context: Any) -> None:
        self._gate.admit(context, ADMIN)
        if not self._ready():
            raise NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")

    def _wanted(self, request: pb.PrepareRequest) -> Mapping[int, tuple[int, ...]]:
        """Raises what refuses it."""
        _named(request)
        if request.fingerprint and request.fingerprint != self._fingerprint:
            raise ChangeRefusedError.about(
                "fingerprint",
                got=request.fingerprint,
                want=f"{self._fingerprint}, of the model that this server serves",
            )
        return _unfolded(request.layers)


def _named(request: Any) -> str:
    """Which change a request means.  Raises MalformedMessageError."""
    name: str = request.change
    if not 0 < len(name) <= _MOST_NAME:
        what = f"{type(request).__name__}.change"
        raise MalformedMessageError.about(what, got=f"{len(name)} characters", want=f"1 to {_MOST_NAME}")
    return name


def _unfolded(layers: Mapping[str, str]) -> dict[int, tuple[int, ...]]:
    """{"0-3": "0-63", "4": ""} by layer.  Raises MalformedMessageError."""
    size = sum(len(names) + len(ids) for names, ids in layers.items())
    if size > _MOST_TEXT:
        got = f"{size} characters"
        raise MalformedMessageError.about("PrepareRequest.layers", got=got, want=f"at most {_MOST_TEXT}")
    out: dict[int, tuple[int, ...]] = {}
    left = _MOST_IDS
    for names, ids in layers.items():
        try:
            experts = parse_ranges(ids, most=min(left, MOST_EXPERTS)) if ids else ()
            left -= len(experts)
            for layer in parse_ranges(names, most=_MOST_LAYERS):
                if layer in out or len(out) >= _MOST_LAYERS:
                    raise ValueError(f"got layer {layer} once more, want each once and at most {_MOST_LAYERS}")
                out[layer] = experts
        except ValueError as e:
            raise MalformedMessageError(f"PrepareRequest.layers: {e}") from None
    if not out:
        raise MalformedMessageError("PrepareRequest.layers: got none, want at least one layer")
    return out


def _memory(plan: MemoryPlan | None) -> Memory | None:
    return None if plan is None else memory_message(plan)


async def _abort(context: Any, e: Exception, what: str) -> None:
    """End the call with the row behind `e`."""
    error = error_of(e, what)
    await context.abort(error.code.grpc, error.message, error.to_trailing_metadata())
