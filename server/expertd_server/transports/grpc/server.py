"""The gRPC side: a listening server in front of a Service, its health, and how it drains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from expertd_server.config.values import Address
from expertd_server.engine.admission import State
from expertd_server.service.service import Service
from expertd_server.transports.grpc import channelz
from expertd_server.transports.grpc.disconnects import tell_of_leaving_at_debug
from expertd_server.transports.grpc.half_sent import HalfSent
from expertd_server.transports.grpc.loop_thread import LoopThread
from expertd_server.transports.grpc.reflection import add_reflection
from expertd_server.transports.grpc.service import Servicer
from expertd_server.transports.security import Gate, Security, tls_credentials
from expertd_server.views.call_metrics import SERVICE

__all__ = ["LOOP", "ExpertServer", "GrpcTransport", "bindable"]

_POLL_S = 0.005
"""How often a draining server looks whether it is done."""
_QUIET_S, _QUIET_LIMIT_S = 0.15, 2.0
"""gRPC resets a call that comes in the moment in which the server closes: its caller sees CANCELLED and can't know that
nothing was computed.  So a drained server closes when no call came for _QUIET_S, at the latest after _QUIET_LIMIT_S."""
_REPORT_S = 0.01
"""Batches are counted together this long after the first of them: counting one takes as long as answering it."""
_CONNECTIONS, _CALLS = 1024, 4096
"""Connections; calls of one connection.  What a client sends beyond it before it has seen the settings of a new
connection is refused without a reason (REFUSED_STREAM), so it is more than the service takes (see Servicer)."""
_PENDING = _CONNECTIONS * _CALLS
_CLOSE_S = 2.0
"""For the last bytes of answers, once every call is over; a connection that says nothing any more would take it all."""
_UNREAD_S, _UNREAD_DRAINING_S, _IDLE_S = 60.0, 3.0, 900.0
"""How long a caller may leave a message unread that is being written; while the server drains; and how long a stream
may stay without a message, which is the same as half of one: gRPC does not tell."""
_SLACK = 2
"""gRPC's own limit is this many times ours: up to it one large request fails alone, with its reason."""


_OPEN = Security()


class ExpertServer:
    """A gRPC server in front of a Service.  Its methods are the event loop's that made it.

    address: where it listens, known after start()
    """

    def __init__(self, service: Service, security: Security = _OPEN) -> None:
        self.service = service
        self._gate = gate = Gate(security.callers, service.metrics.reloaded)
        self._credentials = tls_credentials(security, service.metrics.reloaded, service.metrics.certificate_until.set)
        self.servicer = Servicer(service, gate)
        self._bell, self._reporting = -1, False
        self._borrow_outcomes()
        self._watchers: list[asyncio.Task[None]] = []
        self._health = health.aio.HealthServicer()
        tell_of_leaving_at_debug()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", min(_SLACK * service.limits.max_message_bytes, (1 << 31) - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent share of its calls
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.enable_channelz", int(security.channelz)),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                # gRPC's own limit of calls that nobody has looked at yet (1000, from 3000 on all) ends them with a bare
                # CANCELLED that nobody counts.  Ours are the engine's queue and the streams of a connection.
                ("grpc.server.max_pending_requests", _PENDING),
                ("grpc.server.max_pending_requests_hard_limit", _PENDING),
                ("grpc.max_concurrent_streams", _CALLS),
                ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
                # A connection that is gone without a word, or says none of TLS and HTTP/2, goes in time.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.server_handshake_timeout_ms", 10_000),
            ]
        )
        limits = service.limits
        most = max(limits.max_half_sent_bytes, _SLACK * limits.max_message_bytes)
        self._half_sent = front = HalfSent(self._server, most, service.metrics.connection_cut)
        front.add_generic_rpc_handlers((self.servicer.handler(),))
        named = [SERVICE]
        if security.kserve:
            from expertd_server.transports.kserve.service import KSERVE, KServe  # its messages exist once in a process

            named.append(KSERVE)
            front.add_generic_rpc_handlers((KServe(service, self.servicer).handler(),))
        if security.health:
            named.append(health.SERVICE_NAME)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, front)
        if security.channelz:
            named.append(channelz.NAME)
            channelz.add_channelz(front, gate)
        if security.reflection:
            add_reflection(front, named, gate)

    async def start(self, listen: Address) -> Address:
        """Listen; health is NOT_SERVING.  Raises OSError where the address cannot be had."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        with bindable(listen):
            try:
                if self._credentials is None:
                    port = self._server.add_insecure_port(str(listen))
                else:
                    port = self._server.add_secure_port(str(listen), self._credentials)
            except RuntimeError as e:
                raise OSError(str(e)) from e
        await self._server.start()
        self._watchers = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._half_sent.watch(0 if listen.path else port)),
        ]
        self.address = listen if listen.path else Address(listen.host, port)
        return self.address

    async def _watch(self) -> None:
        """Callers that do not read what they asked for, and the file of callers, though nobody calls."""
        while True:
            draining = self.service.engine.state is State.DRAINING
            self.servicer.cut_off_the_silent(_UNREAD_DRAINING_S if draining else _UNREAD_S, _IDLE_S)
            self.service.refusals.flush()
            self._gate.look()
            await asyncio.sleep(0.5)

    async def open(self) -> None:
        """Health is SERVING, if the service does."""
        if self.service.engine.state is State.SERVING:
            await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, until_s: float) -> bool:
        """Health is NOT_SERVING; when everything taken is answered, close.  until_s: time.monotonic() at which it
        closes all the same: False."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        while time.monotonic() < until_s and not self._idle():
            await asyncio.sleep(_POLL_S)
        if done := self._idle():
            await self._quiet(min(until_s, time.monotonic() + _QUIET_LIMIT_S))
        await self._server.stop(min(_CLOSE_S, max(0.1, until_s - time.monotonic())) if done else 0)
        for task in self._watchers:
            task.cancel()
        return done

    def _idle(self) -> bool:
        return self.servicer.open_calls == 0 and self.service.engine.idle()

    async def _quiet(self, until_s: float) -> None:
        """Return when no call has come for _QUIET_S, or at the monotonic time `until_s`."""
        begun, since = self.servicer.calls_begun, time.monotonic()
        while (now := time.monotonic()) < until_s and now - since < _QUIET_S:
            await asyncio.sleep(_POLL_S)
            if self.servicer.calls_begun != begun:
                begun, since = self.servicer.calls_begun, time.monotonic()

    async def close(self) -> None:
        """Close at once, whatever is under way."""
        for task in self._watchers:
            task.cancel()
        await self._server.stop(0)
        if self._bell >= 0:
            asyncio.get_running_loop().remove_reader(self._bell)
            self._bell = -1
            self.service.engine.delivery.take_back()

    def _borrow_outcomes(self) -> None:
        """The loop that writes the answers hands them out itself: a thread between would be one more to wake."""
        delivery, loop = self.service.engine.delivery, asyncio.get_running_loop()

        def ring() -> None:
            delivery.deliver()
            if not self._reporting:
                self._reporting = True
                loop.call_later(_REPORT_S, report)

        def report() -> None:
            self._reporting = False
            delivery.report()

        self._bell = delivery.lend()
        loop.add_reader(self._bell, ring)

    async def _report(self, status: Any) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(name, status)


LOOP = LoopThread()
"""Of all gRPC servers of this process."""


class GrpcTransport:
    """gRPC as a Transport: an ExpertServer on the loop that all of this process share."""

    def __init__(self, service: Service, listen: Address, security: Security = _OPEN) -> None:
        self._service, self._listen, self._security = service, listen, security
        self._server: ExpertServer | None = None

    def start(self) -> str:
        """Raises OSError where the address cannot be had."""
        LOOP.acquire()
        try:
            self._server = LOOP.run(self._make())
        except BaseException:
            LOOP.release()
            raise
        return str(self._server.address)

    async def _make(self) -> ExpertServer:
        server = ExpertServer(self._service, self._security)
        try:
            await server.start(self._listen)
        except BaseException:
            await server.close()
            raise
        return server

    def open(self) -> None:
        """Health is SERVING."""
        if self._server is not None:
            LOOP.run(self._server.open())

    def drain(self, until_s: float) -> bool:
        """See ExpertServer."""
        return self._server is None or LOOP.run(self._server.drain(until_s))

    def close(self) -> None:
        """Close at once."""
        server, self._server = self._server, None
        if server is not None:
            LOOP.run(server.close())
            LOOP.release()


@contextlib.contextmanager
def bindable(a: Address) -> Iterator[None]:
    """Inside, `a` can be bound.  Raises OSError where it is taken or not ours: gRPC would tell only its own log why.  A
    socket in the file system is its owner's alone."""
    if not a.path:
        _try_bind(a)
        yield
        return
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(a.path).st_mode):
            raise FileExistsError(errno.EEXIST, "is there, and no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            if s.connect_ex(a.path) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        os.unlink(a.path)  # left behind by a server that was killed
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _try_bind(a: Address) -> None:
    family, kind, proto, _, where = socket.getaddrinfo(a.host, a.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(where)
