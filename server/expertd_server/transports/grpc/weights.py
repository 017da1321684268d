"""expertd.v1.WeightsService on grpc.aio, beside AdminService: how a server is given new weights.

It changes nothing itself: Updates does, in threads, and no call here keeps the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from expertd.errors import ChangePendingError, ChangeRefusedError, MalformedMessageError, NotReadyError
from expertd.v1 import weights_service_pb2 as pb
from expertd.v1 import weights_service_pb2_grpc as stubs
from expertd_server.service.access import ADMIN
from expertd_server.service.response import error_of
from expertd_server.transports.security import Gate
from expertd_server.transports.trainer_listener import TrainerListener
from expertd_server.updates.job import Job, UpdateRequest
from expertd_server.updates.rolling import LAST
from expertd_server.updates.updates import Updates
from expertd_server.updates.versions import MOST_NUMBER, version_message
from expertd_server.views.describe import memory_message

__all__ = ["MOST_MESSAGE_BYTES", "WeightsServicer"]

_T = TypeVar("_T")

MOST_MESSAGE_BYTES = 64 << 20
"""Of a PutWeightsRequest."""
_LOOK_S = 0.01
_PREPARE_S, _MOST_PREPARING = 3600, 16
"""How long PrepareUpdate waits, and for how many callers at once."""
_MOST_TEXT, _MOST_IDENTITY, _MOST_FOLDER, _LEASE_S, _MOST_LEASE_S = 256, 128, 4096, 60, 3600


class WeightsServicer(stubs.WeightsServiceServicer):
    """fingerprint: of the model that is served; ready: whether the server has loaded what it holds at first; shown:
    what packed layers take, for Prepare's answer."""

    def __init__(self, updates: Updates, fingerprint: str, gate: Gate, ready: Callable[[], bool]) -> None:
        self._updates, self._fingerprint, self._gate, self._ready = updates, fingerprint, gate, ready
        self._trainers = TrainerListener()
        self._preparing = 0

    def close(self) -> None:
        """Trainers' sockets."""
        self._trainers.close()

    async def BeginUpdate(  # noqa: N802 - gRPC's name
        self, request: pb.BeginUpdateRequest, context: Any
    ) -> pb.BeginUpdateResponse:
        def begin() -> pb.BeginUpdateResponse:
            asked, updates = self._asked(request), self._updates
            if request.dry_run:
                room, gives_up = updates.room(asked.rolling)
                return pb.BeginUpdateResponse(
                    base=updates.version.number,
                    memory=None if room.plan is None else memory_message(room.plan),
                    gives_up=gives_up,
                    rolling=room.rolling,
                )
            base = updates.version
            job = updates.begin(asked)
            endpoint, token, refusal = self._offer(request)
            return pb.BeginUpdateResponse(
                memory_endpoint=endpoint,
                memory_token=token,
                memory_refusal=refusal,
                version=job.version.number,
                base=base.number,
                layers=job.packing.layers,
                memory=None if job.memory is None else memory_message(job.memory),
                waiting_limit_bytes=job.waiting_limit_bytes,
                sampled=[] if job.received is None else updates.sampled(),
                base_identity=base.identity,
                gives_up=job.gives_up,
                rolling=job.rolling,
            )

        return await self._do(begin, context, "BeginUpdate")

    async def PutWeights(  # noqa: N802 - gRPC's name
        self, request: pb.PutWeightsRequest, context: Any
    ) -> pb.PutWeightsResponse:
        def put() -> pb.PutWeightsResponse:
            name = _named(request)
            if any(p.HasField("memory") for p in request.parts) and not self._trainers.admitted(name):
                raise ChangeRefusedError(
                    f"update {name!r}: tensors in memory of a GPU need a process of this server's user at the endpoint"
                    " of BeginUpdateResponse, as long as they are put"
                )
            job, kept, ignored = self._updates.put(name, request.parts)
            return pb.PutWeightsResponse(kept_bytes=kept, ignored_bytes=ignored, layers_done=len(job.packing.done))

        return await self._do(put, context, "PutWeights")

    async def PrepareUpdate(  # noqa: N802 - gRPC's name
        self, request: pb.PrepareUpdateRequest, context: Any
    ) -> pb.PrepareUpdateResponse:
        def seal() -> Job:
            if len(request.identity) > _MOST_IDENTITY or not request.identity.isprintable():
                got = f"{len(request.identity)} characters"
                want = f"at most {_MOST_IDENTITY} without control characters"
                raise MalformedMessageError.about("PrepareUpdateRequest.identity", got=got, want=want)
            return self._updates.seal(_named(request), request.identity)

        job = await self._do(seal, context, "PrepareUpdate")
        crowded = self._preparing >= _MOST_PREPARING
        self._preparing += 1
        try:
            end_s = time.monotonic() + (0.0 if crowded else _PREPARE_S)
            while not job.ended.is_set() and time.monotonic() < end_s:
                await asyncio.sleep(_LOOK_S)
        finally:
            self._preparing -= 1

        def answer() -> pb.PrepareUpdateResponse:
            if job.error is not None:
                raise job.error
            if not job.ended.is_set():
                why = f"{_MOST_PREPARING} other calls wait for it" if crowded else f"{_PREPARE_S} s are over"
                raise ChangePendingError.about(
                    f"update {request.update!r}",
                    got=f"{len(job.packing.done)} of {job.packing.layers} layers ready, and {why}",
                    want="all of them",
                    remedy="it goes on: ask again",
                )
            return self._prepared(job)

        return await self._do(answer, context, "PrepareUpdate")

    async def CommitUpdate(  # noqa: N802 - gRPC's name
        self, request: pb.CommitUpdateRequest, context: Any
    ) -> pb.CommitUpdateResponse:
        through = request.through_layer if request.HasField("through_layer") else LAST
        rollout = await self._do(lambda: self._updates.commit(_named(request), through), context, "CommitUpdate")
        end_s = time.monotonic() + _PREPARE_S
        while rollout is not None and rollout.waits(through) and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)

        def answer() -> pb.CommitUpdateResponse:
            if rollout is not None and not rollout.reached(through):
                raise ChangePendingError(f"update {request.update!r}: layers are being switched; it goes on: ask again")
            return pb.CommitUpdateResponse(version=self._updates.messages()[0])

        return await self._do(answer, context, "CommitUpdate")

    async def AbortUpdate(  # noqa: N802 - gRPC's name
        self, request: pb.AbortUpdateRequest, context: Any
    ) -> pb.AbortUpdateResponse:
        def abort() -> pb.AbortUpdateResponse:
            self._updates.abort(_named(request))
            return pb.AbortUpdateResponse()

        return await self._do(abort, context, "AbortUpdate")

    async def GetUpdate(self, request: pb.GetUpdateRequest, context: Any) -> pb.GetUpdateResponse:  # noqa: N802 - gRPC's name
        return await self._do(self._status, context, "GetUpdate")

    async def RollbackVersion(  # noqa: N802 - gRPC's name
        self, request: pb.RollbackVersionRequest, context: Any
    ) -> pb.RollbackVersionResponse:
        def rollback() -> pb.RollbackVersionResponse:
            self._updates.rollback(request.version)
            return pb.RollbackVersionResponse(version=self._updates.messages()[0])

        return await self._do(rollback, context, "RollbackVersion")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _offer(self, request: pb.BeginUpdateRequest) -> tuple[str, str, str]:
        """(endpoint, token, why there is none) for tensors in memory of a GPU of this host."""
        if not request.host_id or request.checkpoint:
            return "", "", ""
        if why := self._updates.memory_refusal():
            return "", "", why
        return self._trainers.offer(request.update, request.host_id)

    def _status(self) -> pb.GetUpdateResponse:
        updates = self._updates
        job = updates.job
        out = pb.GetUpdateResponse(
            last_error=updates.last_error, versions=updates.messages(), highest_version=updates.highest
        )
        folders = {v.number: v.folder for v in (updates.version, updates.before) if v is not None}
        for version in out.versions:
            version.folder = folders.get(version.number, "")
        if job is not None:
            received = job.received
            out.update, out.state, out.version = job.asked.update, job.state, job.version.number
            out.layers, out.layers_done = job.packing.layers, len(job.packing.done)
            out.rolling, out.layers_switched = job.rolling, 0 if job.rollout is None else job.rollout.switched
            if received is not None:
                out.kept_bytes, out.waiting_bytes = received.kept_bytes, received.waiting_bytes
        return out

    def _prepared(self, job: Job) -> pb.PrepareUpdateResponse:
        message = version_message(job.version, job.packing.done, serving=False)
        return pb.PrepareUpdateResponse(version=message, layers=job.packing.layers, packing_s=job.packing.packing_s)

    def _asked(self, request: pb.BeginUpdateRequest) -> UpdateRequest:
        """Raises what refuses it."""
        if not request.dry_run:
            _named(request)
        if len(request.label) > _MOST_TEXT:
            got = f"{len(request.label)} characters"
            raise MalformedMessageError.about("BeginUpdateRequest.label", got=got, want=f"at most {_MOST_TEXT}")
        if len(request.checkpoint) > _MOST_FOLDER or not request.checkpoint.isprintable():
            got = f"{len(request.checkpoint)} characters"
            want = f"a path of at most {_MOST_FOLDER} without control characters"
            raise MalformedMessageError.about("BeginUpdateRequest.checkpoint", got=got, want=want)
        if request.version > MOST_NUMBER:
            raise MalformedMessageError.about("version", got=request.version, want=f"at most {MOST_NUMBER}")
        if request.lease_s > _MOST_LEASE_S:
            raise MalformedMessageError.about("lease_s", got=request.lease_s, want=f"at most {_MOST_LEASE_S}")
        if request.fingerprint and request.fingerprint != self._fingerprint:
            raise ChangeRefusedError.about(
                "fingerprint",
                got=request.fingerprint,
                want=f"{self._fingerprint}, of the model that this server serves",
            )
        if request.rolling not in pb.RollingUpdate.values():
            names = ", ".join(pb.RollingUpdate.keys())
            raise MalformedMessageError.about("BeginUpdateRequest.rolling", got=request.rolling, want=names)
        return UpdateRequest(
            request.update,
            request.version,
            request.label,
            request.base,
            request.checkpoint,
            float(request.lease_s or _LEASE_S),
            request.delta,
            request.rolling,
        )

    async def _do(self, work: Callable[[], _T], context: Any, what: str) -> _T:
        """work() in a thread, for those who may."""
        try:
            self._gate.admit(context, ADMIN)
            if not self._ready():
                raise NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
            return await asyncio.to_thread(work)
        except Exception as e:
            error = error_of(e, what)
            await context.abort(error.code.grpc, error.message, error.to_trailing_metadata())
            raise


def _named(request: Any) -> str:
    """Which update a request means.  Raises MalformedMessageError."""
    name: str = request.update
    if not 0 < len(name) <= _MOST_TEXT:
        what = f"{type(request).__name__}.update"
        raise MalformedMessageError.about(what, got=f"{len(name)} characters", want=f"1 to {_MOST_TEXT}")
    return name
