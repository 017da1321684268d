"""The attacks of hostile.py, each as a process: python tests/load/attacks.py NAME ADDRESS METRICS SECONDS

Prints one line in the end: what became of it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rpc/server"))

from http2 import HalfSent

from expertd.v1 import expert_service_pb2 as pb

__all__ = ["ATTACKS"]

FORWARD, STREAM = "/expertd.v1.ExpertService/Forward", "/expertd.v1.ExpertService/StreamForward"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
OPTIONS += [("grpc.use_local_subchannel_pool", 1)]
H = 2048


def varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes((*out, n))


def sized(tag: bytes, data: bytes) -> bytes:
    return tag + varint(len(data)) + data


def synthetic(tokens: int, top_k: int, seed: int, **fields: int) -> pb.ForwardRequest:
    def tensor(dtype: int, *shape: int) -> pb.Tensor:
        return pb.Tensor(dtype=dtype, shape=shape, synthetic=pb.SyntheticValues(seed=seed))  # type: ignore[arg-type]

    return pb.ForwardRequest(
        hidden_states=tensor(3, tokens, H),
        topk_ids=tensor(5, tokens, top_k),
        topk_weights=tensor(1, tokens, top_k),
        **fields,  # type: ignore[arg-type]
    )


async def unary(address: str, data: bytes, seconds: float) -> str:
    """What one call ends with."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        begin = time.monotonic()
        try:
            await channel.unary_unary(FORWARD)(data, timeout=seconds)
            said = "OK"
        except grpc.aio.AioRpcError as e:
            said = outcome(e)
        return f"{said} after {time.monotonic() - begin:.2f} s"


def outcome(e: grpc.aio.AioRpcError) -> str:
    reason = dict(e.trailing_metadata() or ()).get("expertd-reason", "no reason")
    return f"{e.code().name} {reason}"


async def long_shape(address: str, _: str, seconds: float) -> str:
    """A synthetic tensor with a shape of 1 MB."""
    tensor = b"\x08\x03" + sized(b"\x12", b"\xff\xff\xff\xff\x0f" * 200_000) + b"\x32\x02\x08\x01"
    return await unary(address, b"\x08\x07" + sized(b"\x1a", tensor), seconds)


async def wide_routes(address: str, _: str, seconds: float) -> str:
    """40 bytes: 4096 tokens with all 128 experts each, over and over on one stream."""
    return await _pour(address, seconds, lambda n: synthetic(4096, 128, n % 4, request_id=n, output_form=2))


async def flood(address: str, _: str, seconds: float) -> str:
    """As much honest work as one stream takes: 1024 tokens each, as digests."""
    return await _pour(address, seconds, lambda n: synthetic(1024, 8, n % 4, request_id=n, output_form=2))


async def _pour(address: str, seconds: float, make: Callable[[int], pb.ForwardRequest], unread: bool = False) -> str:
    seen: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.stream_stream(STREAM)()

        async def read() -> None:
            while (data := await call.read()) is not grpc.aio.EOF:
                message = pb.StreamForwardResponse.FromString(data)
                seen[message.error.reason if message.HasField("error") else str(message.WhichOneof("kind"))] += 1

        reader = None if unread else asyncio.create_task(read())
        end, n = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < end:
                n += 1
                data = pb.StreamForwardRequest(forward=make(n)).SerializeToString()
                await asyncio.wait_for(call.write(data), max(0.01, end - time.monotonic()))
        except (asyncio.TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
            seen[type(e).__name__] += 1
        print(f"{n} sent: {dict(seen)}", flush=True)
        if reader is not None:
            reader.cancel()
        await asyncio.sleep(60)  # stays, and does not read
    return ""


async def offers(address: str, _: str, seconds: float) -> str:
    """An offer of 16 million transports."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.stream_stream(STREAM)()
        begin = time.monotonic()
        await call.write(sized(b"\x1a", b"\x0a\x00" * 16_000_000))
        try:
            message = pb.StreamForwardResponse.FromString(await asyncio.wait_for(call.read(), seconds))
            said = message.error.reason or f"{len(message.session.verdicts)} verdicts"
        except grpc.aio.AioRpcError as e:
            said = outcome(e)
        return f"{said} after {time.monotonic() - begin:.2f} s"


async def unread_refusals(address: str, _: str, seconds: float) -> str:
    """Requests without an id, and nobody who reads the refusals."""
    return await _pour(address, seconds, lambda n: pb.ForwardRequest(layer=n), unread=True)


async def unread_answers(address: str, _: str, seconds: float) -> str:
    """Answers of 8 MB, and nobody who reads them."""
    return await _pour(address, seconds, lambda n: synthetic(1024, 8, 1, request_id=n, output_dtype=1), unread=True)


async def half_sent(address: str, _: str, seconds: float) -> str:
    """20 connections, each with the beginning of a message of 60 MB."""
    return await _hold(address, seconds, connections=20, streams=1, size=60_000_000)


async def half_sent_more(address: str, _: str, seconds: float) -> str:
    """100 connections, each with the beginning of a message of 60 MB."""
    return await _hold(address, seconds, connections=100, streams=1, size=60_000_000)


async def half_sent_streams(address: str, _: str, seconds: float) -> str:
    """One connection with 100 calls, each with the beginning of a message of 20 MB."""
    return await _hold(address, seconds, connections=1, streams=100, size=20_000_000)


async def _hold(address: str, seconds: float, connections: int, streams: int, size: int) -> str:
    held: list[HalfSent] = []
    for _ in range(connections):
        try:
            held.append(HalfSent(address, STREAM, size, streams))
        except OSError:
            break
    end = time.monotonic() + seconds - 1
    sent, before = 0, -1
    while time.monotonic() < end and sent != before:
        before, sent = sent, sum(h.push(size - 1) for h in held)
    live = sum(not h.closed for h in held)
    print(f"{sent / 1e6:.0f} MB sent and held back, {live} of {connections} connections live", flush=True)
    await asyncio.sleep(60)
    return ""


async def burst(address: str, _: str, seconds: float) -> str:
    """6,000 unary calls at once over 6 connections."""
    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(6)]
    data = synthetic(1, 8, 1, output_form=2).SerializeToString()
    seen: Counter[str] = Counter()

    async def one(i: int) -> None:
        try:
            await channels[i % 6].unary_unary(FORWARD)(data, timeout=seconds)
            seen["OK"] += 1
        except grpc.aio.AioRpcError as e:
            seen[outcome(e)] += 1

    await asyncio.gather(*(one(i) for i in range(6000)))
    return str(dict(seen))


async def slow_metrics(_: str, metrics: str, seconds: float) -> str:
    """500 requests to the metrics, none of them complete."""
    host, port = metrics.rsplit(":", 1)
    kept = []
    for _ in range(500):
        try:
            sock = socket.create_connection((host, int(port)), timeout=0.2)
            sock.sendall(b"GET /metrics HTTP/1.1\r\n")
            kept.append(sock)
        except OSError:
            break
    print(f"{len(kept)} connections held open", flush=True)
    await asyncio.sleep(60)
    return ""


ATTACKS: dict[str, Callable[[str, str, float], Awaitable[str]]] = {
    f.__name__: f
    for f in (
        long_shape,
        wide_routes,
        offers,
        unread_refusals,
        unread_answers,
        half_sent,
        half_sent_more,
        half_sent_streams,
        burst,
        flood,
        slow_metrics,
    )
}

if __name__ == "__main__":
    print(asyncio.run(ATTACKS[sys.argv[1]](sys.argv[2], sys.argv[3], float(sys.argv[4]))), flush=True)
