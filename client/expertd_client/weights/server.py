"""One server's WeightsService, called from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from expertd.errors import QueueFullError, UnavailableError
from expertd.placement import expert_ids
from expertd.v1 import expert_service_pb2 as expert_pb
from expertd.v1 import weights_service_pb2 as pb
from expertd.v1 import weights_service_pb2_grpc as stubs
from expertd_client.clients.client import ExpertClient
from expertd_client.transports.admin import admin_address, admin_channel
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.common import ADMIN, call_failed

__all__ = ["WeightsServer"]

_PREPARE_S = 3600.0
_AGAIN_S = 0.05


class WeightsServer:
    """address: the server's own; its WeightsService is where Describe says (--admin-listen).  Errors are rows of
    expertd.errors whose text begins with the address.

    timeout_s   of each call but prepare() and roll(), which take as long as packing does; also how long put() tries
                again where too much waits to be packed
    """

    def __init__(self, address: str, credentials: Credentials | None = None, timeout_s: float = 60.0) -> None:
        self.address, self._credentials, self._timeout_s = address, credentials, timeout_s
        self._lock = threading.Lock()
        self._channel: Any = None
        self._stub: Any = None
        self._metadata: Any = None

    def describe(self) -> expert_pb.DescribeResponse:
        """What the server holds, its versions among it."""
        with ExpertClient(self.address, credentials=self._credentials) as client:
            return client.describe(timeout_s=self._timeout_s)

    def held(self) -> dict[int, frozenset[int]]:
        """Experts by layer."""
        return {layer.layer: frozenset(expert_ids("Describe", layer)) for layer in self.describe().layers}

    def begin(
        self,
        update: str,
        version: int = 0,
        *,
        label: str = "",
        base: int = 0,
        checkpoint: str = "",
        delta: bool = False,
        lease_s: int = 0,
        dry_run: bool = False,
        host: str = "",
        rolling: pb.RollingUpdate = pb.ROLLING_UPDATE_UNSPECIFIED,
    ) -> pb.BeginUpdateResponse:
        request = pb.BeginUpdateRequest(
            update=update,
            version=version,
            label=label,
            base=base,
            checkpoint=checkpoint,
            delta=delta,
            lease_s=lease_s,
            dry_run=dry_run,
            host_id=host,
            rolling=rolling,
        )
        answer: pb.BeginUpdateResponse = self._call("BeginUpdate", request)
        return answer

    def put(self, update: str, parts: Sequence[pb.WeightPart]) -> pb.PutWeightsResponse:
        """Tries again, within timeout_s, while too much waits to be packed.  A part that was put before is no error."""
        request, end_s = pb.PutWeightsRequest(update=update, parts=parts), time.monotonic() + self._timeout_s
        while True:
            try:
                answer: pb.PutWeightsResponse = self._call("PutWeights", request)
                return answer
            except QueueFullError as full:
                pause_s = max(_AGAIN_S, full.retry_after_us * 1e-6)
                if time.monotonic() + pause_s > end_s:
                    raise
            time.sleep(pause_s)

    def prepare(self, update: str, identity: str = "") -> pb.PrepareUpdateResponse:
        """identity: of the new version (expertd.common.identity), "" = not known."""
        request = pb.PrepareUpdateRequest(update=update, identity=identity)
        answer: pb.PrepareUpdateResponse = self._call("PrepareUpdate", request, _PREPARE_S)
        return answer

    def commit(self, update: str) -> expert_pb.WeightVersion:
        answer: pb.CommitUpdateResponse = self._call("CommitUpdate", pb.CommitUpdateRequest(update=update))
        return answer.version

    def roll(self, update: str, through: int | None = None) -> expert_pb.WeightVersion:
        """commit() of a rolling update, up to the layer with this index; None: all of them."""
        request = pb.CommitUpdateRequest(update=update, through_layer=through)
        answer: pb.CommitUpdateResponse = self._call("CommitUpdate", request, _PREPARE_S)
        return answer.version

    def abort(self, update: str) -> None:
        self._call("AbortUpdate", pb.AbortUpdateRequest(update=update))

    def status(self) -> pb.GetUpdateResponse:
        answer: pb.GetUpdateResponse = self._call("GetUpdate", pb.GetUpdateRequest())
        return answer

    def rollback(self, version: int = 0) -> expert_pb.WeightVersion:
        answer: pb.RollbackVersionResponse = self._call("RollbackVersion", pb.RollbackVersionRequest(version=version))
        return answer.version

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        stub, metadata = self._connected()
        try:
            return getattr(stub, method)(request, timeout=timeout_s or self._timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            failed = call_failed(error, self.address, ADMIN)
            if isinstance(failed, UnavailableError):  # one that was started again may listen elsewhere
                self.close()
            raise failed from error

    def _connected(self) -> tuple[Any, Mapping[str, str] | Any]:
        with self._lock:
            if self._channel is not None:
                return self._stub, self._metadata
        described = self.describe()
        with self._lock:
            if self._channel is None:
                at = admin_address(self.address, described)
                self._channel, self._metadata = admin_channel(self.address, at, self._credentials)
                self._stub = stubs.WeightsServiceStub(self._channel)  # type: ignore[no-untyped-call]
            return self._stub, self._metadata
