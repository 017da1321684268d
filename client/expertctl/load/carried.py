"""Which transport carried each request of a load.

A client may send a request over gRPC although a faster session is open: the server generates its tensors, its answer is
a digest, or the session's memory is in use.  So the session's name alone does not say how requests travelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.session import INLINE
from expertd_client.requests.request import Request
from expertd_client.transports.core_connection import BlockingConnection
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.protocol import (
    Closed,
    Connection,
    Deliver,
    MainConnection,
    Ready,
    SessionConnection,
    SessionTransport,
    Transport,
    Waiter,
)
from expertd_client.transports.table import loop_transports

__all__ = ["Carried", "counted_transport"]

Carried = Counter[str]
"""Requests by transport: a name of exchange.session.Session, or "unary"."""


def counted_transport(
    address: str, credentials: Credentials, carried: Carried, unary: bool = False, only: str | None = None
) -> Transport:
    """AsyncExpertClient's own transport to a server, which counts in `carried`.  only: offer this one alone; "grpc":
    none."""
    offers = [_Offer(t, carried) for t in loop_transports(address, credentials) if only in (None, t.name)]
    main = AioGrpcTransport(address, unary=unary, credentials=credentials, offers=offers)
    return _Counted(main, carried, "unary" if unary else INLINE)


class _Counted:
    """A Transport whose connections count."""

    def __init__(self, inner: Transport, carried: Carried, name: str) -> None:
        self.target = inner.target
        self.offers: Sequence[SessionTransport] = inner.offers
        self._inner, self._carried, self._name = inner, carried, name

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        return _Main(self._inner.connect(deliver, closed), self._carried, self._name)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        self._inner.unary(method, request, answer, timeout_s, wait_for_ready, waiter)

    def close(self) -> None:
        self._inner.close()

    async def wait_closed(self) -> None:
        await self._inner.wait_closed()


class _Offer:
    """A SessionTransport whose connections count."""

    def __init__(self, inner: SessionTransport, carried: Carried) -> None:
        self.name = inner.name
        self._inner, self._carried = inner, carried

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def counted(outcome: SessionConnection | Exception) -> None:
            ready(outcome if isinstance(outcome, Exception) else _Session(outcome, self._carried, self.name))

        self._inner.open(answer, deliver, closed, counted)

    def close(self) -> None:
        self._inner.close()


class _Connection:
    def __init__(self, inner: Connection, carried: Carried, name: str) -> None:
        self._connection, self._carried, self._name = inner, carried, name
        self.takes, self.cancel, self.close = inner.takes, inner.cancel, inner.close

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        self._connection.forward(request_id, timeout_us, request)
        self._carried[self._name] += 1  # not where it raised: then nothing was sent


class _Main(_Connection):
    def __init__(self, inner: MainConnection, carried: Carried, name: str) -> None:
        super().__init__(inner, carried, name)
        self.offer = inner.offer


class _Session(_Connection):
    def __init__(self, inner: SessionConnection, carried: Carried, name: str) -> None:
        super().__init__(inner, carried, name)
        self._session, self.broke = inner, inner.broke

    @property
    def blocking(self) -> BlockingConnection | None:
        return self._session.blocking
