"""Requests as frames over TCP (expertd.tcp): for servers on other hosts, where both have it.

What has no form there (rows grouped by expert, values that the server draws, digests, messages larger than the
server takes) travels inline.  Where the session has TLS, so has the channel: nothing travels in plain text that did not
before.

    TcpChannel       ExpertClient: a caller waits for its own answer; a thread reads those that nobody waits for
    AioTcpChannel    AsyncExpertClient: everything in its event loop
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
from expertd_client.transports.beside import CallConnection, LoopConnection
from expertd_client.transports.beside_channel import CallChannel, LoopChannel
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.message import message_bytes
from expertd_client.transports.protocol import Closed, Deliver

__all__ = ["AioTcpChannel", "ByTcp", "TcpChannel", "TcpConnection", "TcpWay"]

_CONNECT_S = 3.0
HOSTS = "EXPERTD_TCP_HOSTS"
"""Of the environment: hosts, with commas between, to which a server may direct clients besides its own; "*" = any."""


class TcpWay:
    """To the server of one gRPC target.  credentials: those of the session; name: of the channel."""

    def __init__(self, target: str, credentials: Credentials | None, name: str) -> None:
        self._target, self._credentials = reach(target, credentials)
        self._name = name

    def enter(self, answer: pb.SessionAnswer) -> tuple[Client, int]:
        """The session, and the most bytes of a message.  Raises UnavailableError."""
        sock, most_bytes, _ = self.dial(answer)
        try:
            return Client(sock), most_bytes
        except LibraryMissingError as e:
            sock.close()
            raise UnavailableError(f"{self._name}: {e}") from e

    def dial(self, answer: pb.SessionAnswer) -> tuple[socket.socket, int, str]:
        """A connection that the server has let in, the number that it said, and its address.  Raises
        UnavailableError."""
        sock: socket.socket | None = None
        try:
            endpoint = parse_endpoint(answer.endpoint)
            if self._credentials.secure and not endpoint.secure:
                raise EntryError("the session has TLS, and the server names an endpoint without it")
            sock = connect(self._host(endpoint), endpoint.port, _CONNECT_S)
            address = str(sock.getpeername()[0])
            if endpoint.secure:
                sock = self._secured(sock, endpoint)
            most_bytes = enter(sock, answer.token, _CONNECT_S)
            if isinstance(sock, ssl.SSLSocket):
                sock = carried(sock, f"expertd-{self._name}-tls")
            return sock, most_bytes, address
        except (OSError, ValueError, EntryError) as e:
            if sock is not None:
                sock.close()
            raise UnavailableError(f"{self._name}: {e}") from e

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


class ByTcp:
    """Of a channel: its sessions begin with a TCP connection."""

    name: str

    def __init__(self, target: str, credentials: Credentials | None = None) -> None:
        super().__init__()
        self._way = TcpWay(target, credentials, self.name)


_Entered: TypeAlias = tuple[Client, int]
"""The session, and the most bytes of a message."""


class TcpChannel(ByTcp, CallChannel[_Entered]):
    """For ExpertClient."""

    name = "tcp"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return self._way.enter(answer)

    def _connection(self, entered: _Entered, deliver: Deliver, closed: Closed) -> TcpConnection:
        return TcpConnection(entered, deliver, closed)


class AioTcpChannel(ByTcp, LoopChannel[_Entered]):
    """For AsyncExpertClient, whose event loop opens it."""

    name = "tcp"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return self._way.enter(answer)

    def _leave(self, entered: _Entered) -> None:
        entered[0].close()

    def _connection(
        self, entered: _Entered, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop
    ) -> _AioTcpConnection:
        return _AioTcpConnection(entered, deliver, closed, loop)


class TcpConnection(CallConnection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends."""

    what = "tcp"

    def __init__(self, entered: _Entered, deliver: Deliver, closed: Closed) -> None:
        client, self.most_bytes = entered
        super().__init__(client, deliver, closed)

    def takes(self, request: Request) -> bool:
        return super().takes(request) and message_bytes(request) <= self.most_bytes


class _AioTcpConnection(LoopConnection):
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
