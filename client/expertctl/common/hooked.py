"""A client's Transport with a hook for each request and each message, for commands that count or time them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.session import INLINE
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import (
    CallingConnection,
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

__all__ = ["Forward", "HookedTransport", "Sending"]

Forward: TypeAlias = Callable[[int, int, Request], None]
"""Connection.forward."""
Sending: TypeAlias = Callable[[str, Forward, int, int, Request], None]
"""Called instead of Connection.forward, which it calls; first is the name of the transport that carries the request."""


class HookedTransport:
    """`inner`, whose connections and sessions send through `sending`.

    delivering  makes of what takes messages another one that is given them; by default the same
    name        of what travels without a session
    """

    def __init__(
        self,
        inner: Transport,
        sending: Sending,
        delivering: Callable[[Deliver], Deliver] = lambda deliver: deliver,
        name: str = INLINE,
    ) -> None:
        self.target = inner.target
        self.offers: Sequence[SessionTransport] = [_Offer(offered, sending, delivering) for offered in inner.offers]
        self._inner, self._sending, self._delivering, self._name = inner, sending, delivering, name

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        return _Main(self._inner.connect(self._delivering(deliver), closed), self._sending, self._name)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        self._inner.unary(method, request, answer, timeout_s, wait_for_ready, waiter)

    def close(self) -> None:
        self._inner.close()

    async def wait_closed(self) -> None:
        await self._inner.wait_closed()


class _Offer:
    def __init__(self, inner: SessionTransport, sending: Sending, delivering: Callable[[Deliver], Deliver]) -> None:
        self.name = inner.name
        self._inner, self._sending, self._delivering = inner, sending, delivering

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def hooked(outcome: SessionConnection | Exception) -> None:
            ready(outcome if isinstance(outcome, Exception) else _Session(outcome, self._sending, self.name))

        self._inner.open(answer, self._delivering(deliver), closed, hooked)

    def close(self) -> None:
        self._inner.close()


class _Connection:
    def __init__(self, inner: Connection, sending: Sending, name: str) -> None:
        self._forward, self._sending, self._name = inner.forward, sending, name
        self.takes, self.cancel, self.close = inner.takes, inner.cancel, inner.close

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        self._sending(self._name, self._forward, request_id, timeout_us, request)


class _Main(_Connection):
    def __init__(self, inner: MainConnection, sending: Sending, name: str) -> None:
        super().__init__(inner, sending, name)
        self.offer = inner.offer


class _Session(_Connection):
    def __init__(self, inner: SessionConnection, sending: Sending, name: str) -> None:
        super().__init__(inner, sending, name)
        self._session, self.broke = inner, inner.broke

    @property
    def blocking(self) -> CallingConnection | None:
        return self._session.blocking
