"""Requests as frames over TCP (expertd.tcp): for servers on other hosts, where both have it.

What has no form there (rows grouped by expert, values that the server draws, digests, messages larger than the
server takes) travels inline.  Where the session has TLS, so has the channel: nothing travels in plain text that did not
before.

    TcpTransport       ExpertClient: a caller waits for its own answer; a thread reads those that nobody waits for
    AsyncTcpTransport    AsyncExpertClient: everything in its event loop
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import TypeAlias

from expertd.errors import UnavailableError
from expertd.tcp.client import Client
from expertd.tcp.entry import Endpoint, EntryError, connect, enter, host_of, parse_endpoint
from expertd.tcp.library import LibraryMissingError
from expertd.tcp.tls import carried
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.transports.address import reach
from expertd_client.transports.core_connection import AsyncConnection, BlockingConnection
from expertd_client.transports.core_transport import AsyncTransport, BlockingTransport
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.message import message_bytes
from expertd_client.transports.protocol import Closed, Deliver

__all__ = ["AsyncTcpTransport", "TcpTransport", "TcpConnection", "TcpDialer"]

_CONNECT_S = 3.0
HOSTS = "EXPERTD_TCP_HOSTS"
"""Of the environment: hosts, with commas between, to which a server may direct clients besides its own; "*" = any."""


_Entered: TypeAlias = tuple[Client, int]
"""The connection, and the most bytes of a message."""


class TcpDialer:
    """Opens connections to the server of one gRPC target.  credentials: those of the session."""

    def __init__(self, target: str, credentials: Credentials | None) -> None:
        self._target, self._credentials = reach(target, credentials)

    def enter(self, answer: pb.SessionAnswer) -> _Entered:
        """A connection that the server has let in, and the most bytes of a message.  Raises UnavailableError."""
        sock: socket.socket | None = None
        try:
            endpoint = parse_endpoint(answer.endpoint)
            if self._credentials.secure and not endpoint.secure:
                raise EntryError("the session has TLS, and the server names an endpoint without it")
            sock = connect(self._host(endpoint), endpoint.port, _CONNECT_S)
            if endpoint.secure:
                sock = self._secured(sock, endpoint)
            most_bytes = enter(sock, answer.token, _CONNECT_S)
            if isinstance(sock, ssl.SSLSocket):
                sock = carried(sock, "expertd-tcp-tls")
            return Client(sock), most_bytes
        except (OSError, ValueError, EntryError, LibraryMissingError) as e:
            if sock is not None:
                sock.close()
            raise UnavailableError(f"tcp: {e}") from e

    def _host(self, endpoint: Endpoint) -> str:
        """Where to connect: a server directs its clients to its own host, to no other one that their user did not
        allow.  Raises EntryError, OSError."""
        own = host_of(self._target)
        if not endpoint.host and not own:
            raise EntryError(f"the server is reached by {self._target}, which names no host")
        if endpoint.host in ("", own):
            return own
        allowed = os.environ.get(HOSTS, "").split(",")
        if endpoint.host in allowed or "*" in allowed:
            return endpoint.host
        here = _addresses(own) if own else _addresses("localhost")
        found = sorted(_addresses(endpoint.host) & here)
        if not found:
            raise EntryError(
                f"the server directs to another host than its own, {endpoint.host}; {HOSTS}={endpoint.host} allows it"
            )
        return found[0]

    def _secured(self, sock: socket.socket, endpoint: Endpoint) -> socket.socket:
        """After the handshake.  Raises OSError."""
        try:
            name = self._credentials.server_name or host_of(self._target) or endpoint.host
            return self._credentials.context().wrap_socket(sock, server_hostname=name)
        except BaseException:
            sock.close()
            raise


def _addresses(host: str) -> set[str]:
    return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


class TcpTransport(BlockingTransport[_Entered]):
    """For ExpertClient."""

    name = "tcp"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return TcpDialer(self._target, self._credentials).enter(answer)

    def _connection(self, entered: _Entered, deliver: Deliver, closed: Closed) -> TcpConnection:
        return TcpConnection(entered, deliver, closed)


class AsyncTcpTransport(AsyncTransport[_Entered]):
    """For AsyncExpertClient, whose event loop opens it."""

    name = "tcp"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return TcpDialer(self._target, self._credentials).enter(answer)

    def _leave(self, entered: _Entered) -> None:
        entered[0].close()

    def _connection(
        self, entered: _Entered, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop
    ) -> _AsyncTcpConnection:
        return _AsyncTcpConnection(entered, deliver, closed, loop)


class TcpConnection(BlockingConnection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends."""

    what = "tcp"

    def __init__(self, entered: _Entered, deliver: Deliver, closed: Closed) -> None:
        client, self.most_bytes = entered
        super().__init__(client, deliver, closed)

    def takes(self, request: Request) -> bool:
        return super().takes(request) and message_bytes(request) <= self.most_bytes


class _AsyncTcpConnection(AsyncConnection):
    """One session, in an event loop."""

    what = "tcp"

    def __init__(self, entered: _Entered, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop) -> None:
        self._frames, self._most_bytes = entered
        self._writes = False
        super().__init__(self._frames, deliver, closed, loop, self._frames.sock.fileno())

    def takes(self, request: Request) -> bool:
        return super().takes(request) and message_bytes(request) <= self._most_bytes

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        super().forward(request_id, timeout_us, request)
        self._write()

    def cancel(self, request_id: int) -> None:
        super().cancel(request_id)
        self._write()

    def _come(self) -> None:
        super()._come()
        self._write()

    def _write(self) -> None:
        """Have the loop say when the socket takes more, as long as something waits for it."""
        if self._over or self._writes == bool(self._frames.waiting):
            return
        self._writes = not self._writes
        if self._writes:
            self._loop.add_writer(self._fds[0], self._come)
        else:
            self._loop.remove_writer(self._fds[0])

    def _release(self) -> None:
        if self._writes:
            self._loop.remove_writer(self._fds[0])
