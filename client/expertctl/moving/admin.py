"""One server's AdminService, called from any thread."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from expertd.errors import ExpertdError, UnavailableError
from expertd.ranges import format_ranges
from expertd.v1 import admin_service_pb2 as pb
from expertd.v1 import admin_service_pb2_grpc as stubs
from expertd.v1 import expert_service_pb2
from expertd_client.transports.address import parse_address, reach
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.common import call_failed, channel_options

__all__ = ["Admin", "admin_address", "name_of"]

_QUICK_S, _PREPARE_S = 5.0, 3600.0
_KEEPALIVE = (("grpc.keepalive_time_ms", 5_000), ("grpc.keepalive_timeout_ms", 5_000))
"""A server that hangs, or a network that is gone, is found out although loading may take an hour."""


def admin_address(address: str, described: expert_service_pb2.DescribeResponse) -> str:
    """Where the AdminService of the server at `address` listens.  Raises UnavailableError where it is off."""
    told = described.admin_address
    if not told:
        raise UnavailableError.about(
            f"{address}: AdminService", got="none", want="one", remedy="start the server with --admin-listen"
        )
    host, _, port = told.rpartition(":")
    if re.fullmatch(r"0\.0\.0\.0|\[[0:]+\]", host):  # every address of its host
        return parse_address(address).with_port(port)
    return told


def name_of(wanted: Mapping[int, tuple[int, ...]]) -> str:
    """Of a change: the same for the same experts, so that who asks again finds what is prepared."""
    text = ";".join(f"{n}:{format_ranges(e)}" for n, e in sorted(wanted.items()))
    return f"apply-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Admin:
    """server: its own address, for errors; address: of its AdminService."""

    def __init__(self, server: str, address: str, credentials: Credentials | None = None) -> None:
        address, c = reach(address, reach(server, credentials)[1])
        self._server, self._metadata = server, c.metadata()
        options, tls = channel_options([*c.options(), *_KEEPALIVE]), c.channel()
        self._channel: Any = (
            grpc.insecure_channel(address, options) if tls is None else grpc.secure_channel(address, tls, options)
        )
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
        return call_failed(error, self._server)
