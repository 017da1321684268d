"""Which transport carried each request of a load.

A client may send a request over gRPC although a faster session is open: the server generates its tensors, its answer is
a digest, or the session's memory is in use.  So the session's name alone does not say how requests travelled."""

from __future__ import annotations

from collections import Counter

from expertctl.common.hooked import Forward, HookedTransport
from expertd_client.exchange.session import INLINE
from expertd_client.requests.request import Request
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.protocol import Transport
from expertd_client.transports.table import loop_transports

__all__ = ["Carried", "counted_transport"]

Carried = Counter[str]
"""Requests by transport: a name of exchange.session.Session, or "unary"."""


def counted_transport(
    address: str, credentials: Credentials, carried: Carried, unary: bool = False, only: str | None = None
) -> Transport:
    """AsyncExpertClient's own transport to a server, which counts in `carried`.  only: offer this one alone; "grpc":
    none."""

    def sending(name: str, forward: Forward, request_id: int, timeout_us: int, request: Request) -> None:
        forward(request_id, timeout_us, request)
        carried[name] += 1  # not where it raised: then nothing was sent

    offers = [t for t in loop_transports(address, credentials) if only in (None, t.name)]
    main = AioGrpcTransport(address, unary=unary, credentials=credentials, offers=offers)
    return HookedTransport(main, sending, name="unary" if unary else INLINE)
