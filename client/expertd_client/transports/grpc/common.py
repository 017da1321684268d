"""What both gRPC transports share: method paths, channel options, and how the end of a call reads."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from expertd.errors import (
    REASON_KEY,
    BadResponseError,
    ExpertdError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
    from_rpc_error,
)
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "ADMIN",
    "FORWARD",
    "HEALTH",
    "STREAM_FORWARD",
    "UNARY",
    "Wanted",
    "ChannelOptions",
    "bad_answer",
    "call_failed",
    "channel_options",
    "hidden_status",
    "now_us",
    "path",
    "stream_ended",
    "unary_timeout_s",
]

_SERVICE = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name


def path(method: str) -> str:
    """What gRPC calls a method of ExpertService."""
    return f"/{_SERVICE}/{method}"


FORWARD, STREAM_FORWARD = path("Forward"), path("StreamForward")

UNARY = "unary calls have no session"
"""Why such a transport has no channel."""

ChannelOptions = Sequence[tuple[str, Any]]


class Wanted(NamedTuple):
    """service: that a call is for.  address: of `expertd serve`, where that answers, for people."""

    service: str
    address: str


_GRPC = Wanted(_SERVICE, "its gRPC address (--listen of expertd serve, by default port 50051)")
HEALTH = Wanted("grpc.health.v1.Health", _GRPC.address)
ADMIN = Wanted(
    "the services that change experts and weights",
    "its admin address (--admin-listen of expertd serve; expertctl finds it by the gRPC address)",
)

_OPTIONS: dict[str, Any] = {
    # The server's limit holds (Describe tells it); gRPC's own 4 MiB is less than 512 tokens of a usual model.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # A server that comes back is found within a second; gRPC's own largest pause is two minutes.
    "grpc.initial_reconnect_backoff_ms": 50,
    "grpc.max_reconnect_backoff_ms": 1000,
    # One TCP connection for each client: by default gRPC lets all channels of a process to one address share one.
    "grpc.use_local_subchannel_pool": 1,
}


def channel_options(extra: ChannelOptions = ()) -> list[tuple[str, Any]]:
    """The options of a channel; those in `extra` win."""
    return list({**_OPTIONS, **dict(extra)}.items())


def now_us() -> int:
    """For ForwardRequest.sent_us."""
    return time.monotonic_ns() // 1000


def call_failed(error: grpc.RpcError, target: str, wanted: Wanted = _GRPC) -> ExpertdError:
    """The row of the error table behind a failed call that this client did not cancel; its text begins with the
    server's address.  wanted: what was called there."""
    row = from_rpc_error(error)
    if isinstance(row, RequestCancelledError) and not _has_reason(error):  # a server or proxy that was going away
        row = UnavailableError("the other side cancelled the call; send again, or to another replica")
    said = row.message
    if isinstance(row, UnavailableError) and not _has_reason(error) and (m := _UNREACHABLE.match(said)):
        cause = m[1] or m[2]
        said = f"got {cause}, want an expertd server that listens there{_TLS * (cause == 'Socket closed')}"
        if _RESET in said:
            said += ": its address is that of --listen, not that of the TCP transport (--tcp-listen)"
    if isinstance(row, UnimplementedError) and said == "Method not found!":
        said = f"got a gRPC server without {wanted.service}, want an expertd server: {wanted.address}"
    if isinstance(row, UnavailableError) and _HTTP.search(said):
        said = (
            f"got a server that speaks HTTP/1, as expertd's metrics address does (--metrics-listen, by default port"
            f" 9464), want an expertd server: {wanted.address}"
        )
    if said == "Deadline Exceeded":  # gRPC's own words: no server said them
        said = "got no answer in time, want one; look whether it serves there, or give it more time"
    row.args = (f"{target}: {said}",)
    row.__cause__ = error
    return row


_UNREACHABLE = re.compile(
    r"failed to connect to all addresses; last error: [A-Z_]+: \S+: (?:Failed to connect to remote host: )?(.+)"
    r"|errors resolving .*: ([^:\]]+)\]*$"
)
"""What grpcio (1.85) says where nobody listens, with the cause as its group; other texts stay as they are."""


_TLS = (
    "; a server with TLS closes the connection of a client without TLS, and with --tls-client-ca that of one without a"
    " certificate for client authentication from that authority"
)
"""Neither side is told more: in TLS 1.3 a client has finished before the server looks at its certificate."""


_RESET = "Connection reset by peer"
"""What the TCP transport's address does with gRPC."""
_HTTP = re.compile("Failed parsing HTTP/2")
"""What grpcio (1.85) says of an answer in HTTP/1."""


def _has_reason(error: grpc.RpcError) -> bool:
    call: Any = error
    return REASON_KEY in dict(call.trailing_metadata() or ())


def stream_ended(error: grpc.RpcError | None, target: str, closing: bool) -> ExpertdError:
    """Why a stream ended.

    error      what grpcio raised; None = the server ended it in order
    closing    whether this client ended it
    """
    if closing:
        return RequestCancelledError(f"{target}: this client was closed before the answer came")
    if error is None:
        return UnavailableError(f"{target}: the server ended the stream; send again, or to another replica")
    return call_failed(error, target)


def bad_answer(error: InvalidRequestError, target: str) -> BadResponseError:
    """An answer that is no message of this contract."""
    bad = BadResponseError(f"{target}: {error.message}", request_id=error.request_id)
    bad.__cause__ = error
    return bad


def unary_timeout_s(timeout_us: int) -> float | None:
    """The gRPC deadline of a unary Forward: the request's own timeout; None = none."""
    return timeout_us * 1e-6 if timeout_us else None


def hidden_status(error: grpc.RpcError) -> bool:
    """Whether grpc.aio hides the status that the stream ended with: where a write begins after the end has come and
    before it was seen, this text replaces what the server said (12 of 300 streams to a server without the method)."""
    call: Any = error
    return call.code() is grpc.StatusCode.INTERNAL and call.details() == "Internal error from Core"
