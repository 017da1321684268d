"""One server's AdminService, called from any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from expertd.common.ranges import format_ranges
from expertd.errors import ExpertdError
from expertd.v1 import admin_service_pb2 as pb
from expertd.v1 import admin_service_pb2_grpc as stubs
from expertd.v1 import expert_service_pb2
from expertd_client.transports.admin import admin_channel
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.common import ADMIN, call_failed

__all__ = ["Admin", "name_of"]

_QUICK_S, _PREPARE_S = 5.0, 3600.0


def name_of(wanted: Mapping[int, tuple[int, ...]]) -> str:
    """Of a change: the same for the same experts, so that who asks again finds what is prepared."""
    text = ";".join(f"{n}:{format_ranges(e)}" for n, e in sorted(wanted.items()))
    return f"apply-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Admin:
    """server: its own address, for errors; address: of its AdminService."""

    def __init__(self, server: str, address: str, credentials: Credentials | None = None) -> None:
        self._server = server
        self._channel, self._metadata = admin_channel(server, address, credentials)
        self._stub: Any = stubs.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def prepare(
        self,
        wanted: Mapping[int, tuple[int, ...]],
        fingerprint: str = "",
        dry_run: bool = False,
        told: Callable[[int], None] = lambda done: None,
    ) -> expert_service_pb2.Memory:
        """Returns when it is ready.  told: how many layers are, as they get ready."""
        layers: dict[tuple[int, ...], list[int]] = {}
        for n, experts in wanted.items():
            layers.setdefault(experts, []).append(n)
        request = pb.PrepareRequest(
            change=name_of(wanted),
            layers={format_ranges(ns): format_ranges(e) if e else "" for e, ns in layers.items()},
            fingerprint=fingerprint,
            dry_run=dry_run,
        )
        answer = pb.PrepareResponse()
        try:
            for answer in self._stub.Prepare(request, timeout=_PREPARE_S, metadata=self._metadata):
                told(answer.done)
        except grpc.RpcError as error:
            raise self._failed(error) from error
        return answer.memory

    def commit(self, wanted: Mapping[int, tuple[int, ...]], epoch: int = 0, linger_s: float = 0.0) -> None:
        request = pb.CommitRequest(change=name_of(wanted), epoch=epoch, linger_ms=round(1e3 * linger_s))
        self._call(self._stub.Commit, request, linger_s + 90.0)

    def abort(self, change: str) -> None:
        self._call(self._stub.Abort, pb.AbortRequest(change=change), 600.0)

    def status(self) -> pb.StatusResponse:
        answer: pb.StatusResponse = self._call(self._stub.Status, pb.StatusRequest(), _QUICK_S)
        return answer

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failed(error) from error

    def _failed(self, error: grpc.RpcError) -> ExpertdError:
        return call_failed(error, self._server, ADMIN)
