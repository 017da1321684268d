"""What callers have begun to send and not finished.

gRPC takes a message whole before anybody sees it, and what it holds of those that are not whole is bounded by nobody.
The kernel knows how much came on each connection, and every call of ours how much came whole: the difference is held
(`Connection`), and `verdicts()` says which connections have to go, because too much is held or because nothing comes of
it.  A call that is one message, and does not bring it in time, fails alone.

Where there is no TCP_INFO (not Linux, or a socket in the file system, which is its owner's) only that last is done.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import grpc

from expertd.errors import ExpertdError, MalformedMessageError, UnavailableError
from expertd_server.engine.admission import fits
from expertd_server.transports.grpc.tcp_info import Peer, Sockets, peer_of

# Why it is so: decision 149 in DECISIONS.md.
__all__ = ["Connection", "HalfSent", "verdicts"]

log = logging.getLogger(__name__)

MESSAGE_S = 60.0
"""For the message of a call that is one message, from the call's beginning."""
STALL_S = 10.0
"""For the next _PROGRESS bytes of what was begun, and six times as long for the rest of it."""
_ALL_S = 6 * STALL_S
_MUCH = 1 << 20
"""What is held below this is headers, windows and pings, or does not matter."""
_PROGRESS = 1 << 16
_PER_MESSAGE, _PER_CALL, _PER_SECOND = 256, 512, 1024
_PER_BYTE_IN, _PER_BYTE_OUT = 7, 6
"""What carries messages: bytes a message, a call besides its metadata, a second (pings), and a 128th of what comes
(frames, TLS) and a 64th of what goes (its windows).  More than it is: an estimate that grew by itself would end a
connection that has done nothing."""
_LOOK_S, _SOON_S = 0.25, 0.05
_BUSY = 20
"""A look may take a 20th of the time."""


class Connection:
    """calls: open now.  whole: bytes of what came whole since the last look, and of what carried it.  held: bytes that
    came and are no whole message yet, at the last look.  unsure: a call has ended within its message, so `held` may be
    more than there is, until no call is open."""

    __slots__ = (
        *("_grew_at", "_grew_s", "_seen_s", "_taken", "_whole_s"),
        *("calls", "held", "peer", "unsure", "whole"),
    )

    def __init__(self, peer: Peer | None, now_s: float) -> None:
        self.peer = peer
        self.calls = self.whole = self.held = self._taken = self._grew_at = 0
        self.unsure = False
        self._seen_s = self._grew_s = self._whole_s = now_s

    def look(self, received: int, now_s: float) -> None:
        """received: all bytes that ever came."""
        if not self.calls:
            self._taken, self.whole, self.unsure = received, 0, False
        if self.whole * 16 >= self.held:
            self._whole_s = now_s
        carried = self.whole + int(_PER_SECOND * (now_s - self._seen_s))
        self._taken, self.whole, self._seen_s = min(received, self._taken + carried), 0, now_s
        self.held = received - self._taken
        if self.held < _MUCH or received - self._grew_at >= _PROGRESS:
            self._grew_at, self._grew_s = received, now_s

    def waits_s(self, now_s: float) -> float:
        """For how long no message came whole that is worth naming beside what is held."""
        return now_s - self._whole_s

    def stalls(self, now_s: float) -> bool:
        """Whether what is held was begun too long ago, or does not grow."""
        late = now_s - self._grew_s > STALL_S or self.waits_s(now_s) > _ALL_S
        return late and self.held >= _MUCH and not self.unsure


def verdicts(connections: Iterable[Connection], limit: int, now_s: float) -> list[tuple[Connection, str]]:
    """Which connections have to go, and why: what stalls; then, while more is held than `limit` allows (admission's
    `fits`, so that who holds much leaves room for the next), those on which nothing came whole for longest."""
    out, left = [], []
    for c in connections:
        if c.stalls(now_s):
            out.append((c, "half-sent messages do not go on"))
        elif c.held:
            left.append(c)
    all_ = sum(c.held for c in left)
    for c in sorted(left, key=lambda c: -c.waits_s(now_s)):
        if not fits(c.held, all_, limit):
            out.append((c, "half-sent messages hold too much"))
            all_ -= c.held
    return out


class HalfSent:
    """Stands before a grpc.aio server's handlers, and looks at its connections.  On the event loop.

    limit: bytes that one connection may hold where no other does.  cut: told of each connection that is ended
    """

    def __init__(self, server: Any, limit: int, cut: Callable[[str], None] = lambda why: None) -> None:
        self._server, self._limit, self._cut = server, limit, cut
        self._connections: dict[str, Connection] = {}
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._sockets = Sockets()

    # ---- before the handlers -----------------------------------------------------------------------------------------

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Generic(h, self._wrapped) for h in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self._server.add_registered_method_handlers(service, {n: self._wrapped(h) for n, h in handlers.items()})

    def _wrapped(self, h: Any) -> Any:
        """The same handler, seen from its call's beginning on: gRPC calls one that takes one message when that is
        whole, and one that takes a stream at once."""
        if not h.request_streaming and not h.response_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._one(h.unary_unary, h.request_deserializer), response_serializer=h.response_serializer
            )
        if not h.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._one(h.unary_stream, h.request_deserializer), response_serializer=h.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            self._many(h.stream_stream), h.request_deserializer, h.response_serializer
        )

    def _one(self, inner: Any, read: Callable[[bytes], Any] | None) -> Any:
        async def method(_: Any, context: Any) -> Any:
            connection = self._begun(context)
            data = None
            try:
                try:
                    data = await self._message(context, connection)
                    out = await inner(_read(data, read) if read else data, context)
                    connection.whole += len(out) >> _PER_BYTE_OUT if isinstance(out, bytes) else 0
                    return out
                except ExpertdError as e:
                    log.debug("a call of %s: %s", context.peer(), e.message)
                    e.__traceback__ = None
                    await context.abort(e.code.grpc, e.message, e.to_trailing_metadata())
            except grpc.aio.AbortError as e:
                data = None
                raise _alone(e) from None
            finally:
                connection.calls -= 1

        return method

    async def _message(self, context: Any, connection: Connection) -> bytes:
        """The one message of a call.  Raises MalformedMessageError, UnavailableError."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = time.monotonic()
        whole = False
        try:
            data = await context.read()
            whole = True
        except asyncio.CancelledError:
            if task in self._waiting:
                raise
            raise UnavailableError(
                f"call: its message did not come whole in {MESSAGE_S:.0f} s; send it again"
            ) from None
        finally:
            self._waiting.pop(task, None)
            connection.unsure |= not whole
        if data is grpc.aio.EOF:
            raise MalformedMessageError("call: it ended without a message; want one")
        _came(connection, data)
        return data  # type: ignore[no-any-return]

    def _many(self, inner: Any) -> Any:
        generates = inspect.isasyncgenfunction(inner)

        async def method(messages: Any, context: Any) -> None:
            connection = self._begun(context)
            counting = _Counting(context, connection)
            try:
                if not generates:
                    await inner(messages, counting)
                    return
                async for answer in inner(messages, context):
                    await context.write(answer)
            except grpc.aio.AbortError as e:
                raise _alone(e) from None
            finally:
                connection.unsure |= not counting.ended
                connection.calls -= 1

        return method

    def _begun(self, context: Any) -> Connection:
        name = context.peer()
        connection = self._connections.get(name)
        if connection is None:
            connection = self._connections[name] = Connection(_address(name), time.monotonic())
        connection.calls += 1
        connection.whole += _PER_CALL + sum(len(k) + len(v) for k, v in context.invocation_metadata() or ())
        return connection

    # ---- looking -----------------------------------------------------------------------------------------------------

    async def watch(self, port: int) -> None:
        """For ever; port: where the server listens, 0 = nowhere that has connections to look at."""
        while True:
            begin = time.monotonic()
            self._give_up(begin)
            much = self._look(port, begin) if port else False
            took = time.monotonic() - begin
            await asyncio.sleep(max(_SOON_S if much else _LOOK_S, _BUSY * took))

    def _give_up(self, now_s: float) -> None:
        """End the calls that wait too long for their message."""
        for task in [t for t, since in self._waiting.items() if now_s - since > MESSAGE_S]:
            del self._waiting[task]
            task.cancel()

    def _look(self, port: int, now_s: float) -> bool:
        """End the connections that hold too much.  Whether much is held."""
        sockets = self._sockets.connected(port)
        for name, connection in list(self._connections.items()):
            socket = sockets.get(connection.peer) if connection.peer else None
            if socket is not None:
                connection.look(socket.received, now_s)
            elif connection.calls:
                connection.held = 0
            else:
                del self._connections[name]
        for connection, why in verdicts(self._connections.values(), self._limit, now_s):
            log.warning("closing the connection of %s: %s (%d bytes)", connection.peer, why, connection.held)
            self._cut(why)
            assert connection.peer is not None  # nothing is held of others
            self._sockets.shut(sockets[connection.peer])
        return sum(c.held for c in self._connections.values()) > self._limit // 4


class _Generic(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, inner: grpc.GenericRpcHandler, wrapped: Callable[[Any], Any]) -> None:
        self._inner, self._wrapped = inner, wrapped

    def service(self, details: Any) -> Any:
        handler = self._inner.service(details)
        return None if handler is None else self._wrapped(handler)


class _Counting:
    """The context of a stream's handler, which counts what comes whole."""

    def __init__(self, context: Any, connection: Connection) -> None:
        self._context, self._connection = context, connection
        self._read, self._write = context.read, context.write
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        data = await self._read()
        if data is grpc.aio.EOF:
            self.ended = True
        else:
            _came(self._connection, data)
        return data

    def write(self, data: bytes) -> Any:
        self._connection.whole += len(data) >> _PER_BYTE_OUT
        return self._write(data)


def _alone(e: Exception) -> Exception:
    """`e` without the functions that it came through, which have the message in their hands: gRPC keeps the exception
    of an aborted call, and that would keep the context that it is kept in, until the collector of cycles comes, some
    hundred calls later."""
    e.__context__ = None
    return e.with_traceback(None)


def _came(connection: Connection, data: bytes) -> None:
    n = len(data)
    connection.whole += n + (n >> _PER_BYTE_IN) + _PER_MESSAGE


def _read(data: bytes, read: Callable[[bytes], Any]) -> Any:
    """Raises MalformedMessageError."""
    try:
        return read(data)
    except Exception as e:
        raise MalformedMessageError(f"message: {e}") from e


def _address(name: str) -> Peer | None:
    """ "ipv4:192.0.2.1:5000" and "ipv6:%5B::1%5D:5000" -> address and port."""
    family, _, rest = unquote(name).partition(":")
    host, _, port = rest.rpartition(":")
    return peer_of(host.strip("[]"), int(port)) if family in ("ipv4", "ipv6") else None
