"""Ways whose time is measured: callers over a transport, and the same number of callers of a bare channel.

A way is opened once for each number of callers, and then runs round after round; between two of its rounds the others
have theirs, so that whatever else the machine does hits all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from expertctl.bench.path.bare import Bare, EventfdEcho, SocketEcho, StreamEcho
from expertctl.bench.path.measurements import Samples
from expertctl.bench.path.probe import Probe
from expertd import codec
from expertd_client.clients.async_client import AsyncExpertClient
from expertd_client.clients.client import ExpertClient
from expertd_client.exchange.session import INLINE, Session
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.table import TRANSPORTS, Make

__all__ = ["BARE", "CLIENTS", "NotToBeHadError", "TimedTransport", "bare_way", "client_way", "codec_ns"]

BARE: Mapping[str, str] = {INLINE: "stream", "shm": "eventfd", "cuda_ipc": "eventfd", "tcp": "socket"}
"""Which bare channel a transport is held against."""
CLIENTS = ("asyncio", "threads", "bytes")
"""bytes: streams that send a message that was made before, as the bare ones do: what is more is the server's."""
_OPEN_S = 30.0
_METHOD = "/expertd.v1.ExpertService/StreamForward"


class NotToBeHadError(Exception):
    """A transport that this client and that server do not have in common; the text says why."""


class TimedTransport(Protocol):
    samples: Samples

    async def round(self, load: Any, seconds: float) -> None:
        """Every caller sends and waits, again and again.  load: a Request for a client, bytes for a bare channel."""

    async def close(self) -> None: ...


async def client_way(client: str, transport: str, address: str, callers: int) -> TimedTransport:
    """Raises NotToBeHadError, or a row of the error table."""
    if client == "bytes" and transport == INLINE:
        return _Messages([StreamEcho(address, _METHOD) for _ in range(callers)])
    offers: list[Make] = []
    if transport != INLINE:
        found = next((entry for entry in TRANSPORTS if entry.name == transport), None)
        if found is None or client == "bytes":
            raise NotToBeHadError(f"this client has no such transport for callers of its {client} kind")
        offers = [found.loop if client == "asyncio" else found.blocking]
    way = (_Tasks if client == "asyncio" else _Threads)(address, callers, offers)
    try:
        for session in await way.open():
            if session.transport != transport:
                raise NotToBeHadError(session.refused.get(transport, f"the session is {session.transport}"))
    except BaseException:
        await way.close()
        raise
    return way


class _Tasks:
    """AsyncExpertClients, all in this loop."""

    def __init__(self, address: str, callers: int, offers: Sequence[Make]) -> None:
        self.samples = Samples()
        self._probes = [
            Probe(AioGrpcTransport(address, offers=[m(address, None) for m in offers])) for _ in range(callers)
        ]
        self._clients = [AsyncExpertClient(probe) for probe in self._probes]

    async def open(self) -> list[Session]:
        for client in self._clients:
            await client.describe(timeout_s=_OPEN_S)
        return [await client.session(timeout_s=_OPEN_S) for client in self._clients]

    async def round(self, load: Request, seconds: float) -> None:
        for probe in self._probes:
            probe.samples = self.samples
        start = time.perf_counter()
        await asyncio.gather(*(self._call(client, load, start + seconds) for client in self._clients))
        self.samples.wall_s += time.perf_counter() - start

    async def _call(self, client: AsyncExpertClient, request: Request, end: float) -> None:
        while (begin := time.perf_counter()) < end:
            answer = await client.forward_request(request)
            self.samples.whole.add(time.perf_counter() - begin)
            _note(self.samples, answer)
            answer.release()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class _Threads:
    """ExpertClients, each called by a thread."""

    def __init__(self, address: str, callers: int, offers: Sequence[Make]) -> None:
        self.samples = Samples()
        self._probes = [
            Probe(GrpcTransport(address, offers=[m(address, None) for m in offers])) for _ in range(callers)
        ]
        self._clients = [ExpertClient(probe) for probe in self._probes]

    async def open(self) -> list[Session]:
        def ask(client: ExpertClient) -> Session:
            client.describe(timeout_s=_OPEN_S)
            return client.session(timeout_s=_OPEN_S)

        return [await asyncio.to_thread(ask, client) for client in self._clients]

    async def round(self, load: Request, seconds: float) -> None:
        for probe in self._probes:
            probe.samples = self.samples

        def call(client: ExpertClient, end: float) -> None:
            while (begin := time.perf_counter()) < end:
                answer = client.forward_request(load)
                self.samples.whole.add(time.perf_counter() - begin)
                _note(self.samples, answer)
                answer.release()

        await _in_threads(call, self._clients, seconds, self.samples)

    async def close(self) -> None:
        for client in self._clients:
            await asyncio.to_thread(client.close)


class _Messages:
    """Streams of ready-made messages, all in this loop."""

    def __init__(self, streams: Sequence[StreamEcho]) -> None:
        self.samples = Samples()
        self._streams = streams

    async def round(self, load: Request, seconds: float) -> None:
        message = codec.encode_stream_request(load.view(1, 0))
        start = time.perf_counter()
        answers = await asyncio.gather(*(self._call(s, message, start + seconds) for s in self._streams))
        self.samples.wall_s += time.perf_counter() - start
        for data in answers:  # one of each round: reading them all would be a client's work
            answer = codec.decode_stream_response(data) if data else None
            if not isinstance(answer, codec.ForwardResponseView) or answer.timing is None:
                raise RuntimeError(f"a ready-made message: got {answer}, want an answer with its output and timing")
            self.samples.timings.append(answer.timing)

    async def _call(self, stream: StreamEcho, message: bytes, end: float) -> bytes:
        answer = b""
        while (begin := time.perf_counter()) < end or not answer:
            answer = await stream.ask(message)
            self.samples.whole.add(time.perf_counter() - begin)
        return answer

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()


async def _in_threads(call: Callable[[Any, float], None], callers: Sequence[Any], seconds: float, out: Samples) -> None:
    """call(caller, end) in a thread for each caller; raises what the first of them raised."""
    faults: list[BaseException] = []

    def run(caller: Any, end: float) -> None:
        try:
            call(caller, end)
        except BaseException as e:
            faults.append(e)

    def all_of_them() -> None:
        start = time.perf_counter()
        threads = [threading.Thread(target=run, args=(caller, start + seconds)) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out.wall_s += time.perf_counter() - start

    await asyncio.to_thread(all_of_them)
    if faults:
        raise faults[0]


def _note(samples: Samples, answer: ForwardResult) -> None:
    samples.timings.append(answer.timing)


# ---- bare channels ---------------------------------------------------------------------------------------------------


async def bare_way(name: str, bare: Bare, callers: int, most_bytes: int) -> TimedTransport:
    """name: a value of BARE."""
    if name == "stream":
        return _BareStreams([StreamEcho(f"127.0.0.1:{bare.stream}") for _ in range(callers)])
    if name == "socket":
        return _BareThreads([SocketEcho(bare, most_bytes) for _ in range(callers)])
    return _BareThreads([EventfdEcho(memory) for memory in bare.memories[:callers]])


class _BareStreams:
    def __init__(self, echoes: Sequence[StreamEcho]) -> None:
        self.samples = Samples()
        self._echoes = echoes

    async def round(self, load: bytes, seconds: float) -> None:
        async def call(echo: StreamEcho, end: float) -> None:
            while (begin := time.perf_counter()) < end:
                await echo.echo(load)
                self.samples.whole.add(time.perf_counter() - begin)

        start = time.perf_counter()
        await asyncio.gather(*(call(echo, start + seconds) for echo in self._echoes))
        self.samples.wall_s += time.perf_counter() - start

    async def close(self) -> None:
        for echo in self._echoes:
            await echo.close()


class _BareThreads:
    def __init__(self, echoes: Sequence[SocketEcho] | Sequence[EventfdEcho]) -> None:
        self.samples = Samples()
        self._echoes = echoes

    async def round(self, load: bytes, seconds: float) -> None:
        def call(echo: SocketEcho | EventfdEcho, end: float) -> None:
            while (begin := time.perf_counter()) < end:
                echo.echo(load)
                self.samples.whole.add(time.perf_counter() - begin)

        await _in_threads(call, self._echoes, seconds, self.samples)

    async def close(self) -> None:
        for echo in self._echoes:
            with contextlib.suppress(OSError):
                echo.close()


def codec_ns(request: Request, times: int = 15) -> tuple[int, int]:
    """What the client's codec takes, here: (request to bytes, bytes to an answer), median nanoseconds."""
    answer = codec.ForwardResponseView(1, request.view(1, 0).hidden_states, None, request.tokens)
    data = codec.encode_stream_response(answer)
    return (
        _median_ns(lambda: codec.encode_stream_request(request.view(1, 0)), times),
        _median_ns(lambda: codec.decode_stream_response(data), times),
    )


def _median_ns(call: Callable[[], object], times: int) -> int:
    found = []
    for _ in range(times):
        start = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - start)
    return int(statistics.median(found))
