"""Messages that nobody sends, against a live server, and a control between them.

    python tests/load/fuzz.py [--way stream|tcp|shm] [--messages 1000000] [--unary 20000] [--seed 0] [--json]

Starts `expertd serve` (tiny, two layers) and sends messages made field by field at the wire level (the generator of
tests/proto/codec/test_fuzz.py), whole requests with bits flipped, bytes inserted and removed, and requests whose
numbers are hostile, on one stream, and a part as unary calls.  After every 500 a control: its answer must have the
bits of the first, within a second.  tcp: the same messages in frames, some with a wrong head; shm: submissions near
what is right and none at all, and noise in the region; both beside an honest session (fuzz_sessions.py).  Prints what
the server said, and the memory it took.  Exit code 1 = a control that was wrong or late, a call that ended without a
reason, a server that is gone, or more than 200 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proto/codec"))

from fuzz_sessions import fuzz_sessions
from hostile import Server
from test_fuzz import Generator

from expertd.v1 import expert_service_pb2 as pb

__all__ = ["fuzz"]

ROOT = Path(__file__).resolve().parents[2]

FORWARD, STREAM = "/expertd.v1.ExpertService/Forward", "/expertd.v1.ExpertService/StreamForward"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
H, K = 256, 2
BETWEEN = 500
POOL = 30_000
CONTROL_ID = 1 << 60
LATE_S = 1.0
EXTREMES = (0, 1, 2, 63, 64, 65, 255, 256, 257, 4096, 4097, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def request(number: int, rng: random.Random) -> pb.ForwardRequest:
    """A sound one of a few tokens."""
    M = rng.randrange(1, 5)
    ids = np.array([rng.sample(range(8), K) for _ in range(M)], np.int32)
    x = np.full((M, H), rng.uniform(-1, 1), np.float32)
    w = np.full(ids.shape, 0.5, np.float32)
    return pb.ForwardRequest(
        request_id=number,
        layer=rng.randrange(2),
        hidden_states=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=x.shape, raw=x.tobytes()),
        topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, raw=ids.tobytes()),
        topk_weights=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=ids.shape, raw=w.tobytes()),
    )


def hostile(r: pb.ForwardRequest, rng: random.Random) -> pb.ForwardRequest:
    """Its numbers changed to what hurts: shapes, ids, dtypes, layers, scales; small `synthetic` tensors."""
    if rng.random() < 0.4:
        scaled(r.hidden_states, rng)
    for t in (r.hidden_states, r.topk_ids, r.topk_weights):
        if rng.random() < 0.4:
            t.shape[rng.randrange(2)] = rng.choice(EXTREMES)
        if rng.random() < 0.2:
            t.shape.append(rng.choice(EXTREMES))
        if rng.random() < 0.2:
            t.dtype = rng.randrange(9)  # type: ignore[assignment]
        if rng.random() < 0.2:
            t.synthetic.CopyFrom(pb.SyntheticValues(seed=rng.getrandbits(64), zipf_exponent=rng.choice((0, 1, 1e30))))
    if rng.random() < 0.2:
        r.layer = rng.choice(EXTREMES)
    if rng.random() < 0.2:
        r.timeout_us = rng.choice((1, 1 << 40, (1 << 64) - 1))
    if rng.random() < 0.1:
        r.grouped.CopyFrom(pb.GroupedRows(expert_ids=[rng.choice(EXTREMES)], row_counts=[rng.choice(EXTREMES)]))
    return r


def scaled(t: pb.Tensor, rng: random.Random) -> None:
    """As e4m3, with scales that are as many as they should be, or not, raw or typed, and of any bits."""
    count = -(-H // 128) * t.shape[0]
    count = rng.choice((count, count, 0, 1, count - 1, count + 1, H * t.shape[0], 1 << 12))
    t.dtype, t.raw = pb.DATA_TYPE_E4M3, rng.randbytes(rng.choice((H * t.shape[0], H, 0)))
    t.scales.block = rng.choice((128, 128, 128, *EXTREMES))
    if rng.random() < 0.7:
        t.scales.raw = rng.randbytes(4 * count + rng.choice((0, 0, 0, 1, 3)))
    if rng.random() < 0.3:
        t.scales.floats.values.extend(rng.choice((0.0, -1.0, float("nan"), float("inf"), 3e38)) for _ in range(count))


def messages(seed: int, stream: bool) -> Any:
    """Without end."""
    rng, g = random.Random(seed), Generator(seed, odd=0.06)
    cls = pb.StreamForwardRequest if stream else pb.ForwardRequest
    number = 0
    while True:
        number += 1
        kind = rng.randrange(4)
        if kind == 0:
            data = g.message(cls.DESCRIPTOR)
            yield g.broken(data) if rng.random() < 0.5 else data
            continue
        whole = request(number, rng)
        if kind == 1:
            whole = hostile(whole, rng)
        data = (pb.StreamForwardRequest(forward=whole) if stream else whole).SerializeToString()
        yield g.broken(data) if kind == 2 else data


def flipped(made: Iterator[bytes], seed: int) -> Iterator[bytes]:
    """The first of them, and then these with a byte or two changed: making one anew takes longer than the server."""
    rng, pool = random.Random(seed), []
    for _ in range(POOL):
        pool.append(next(made))
        yield pool[-1]
    while True:
        data = bytearray(rng.choice(pool))
        for _ in range(rng.randrange(1, 3)):
            if data:
                data[rng.randrange(min(len(data), 400))] = rng.getrandbits(8)
        yield bytes(data)


class Controls:
    """The same sound request again and again."""

    def __init__(self) -> None:
        self.first: bytes | None = None
        self.wrong, self.count, self.longest_s = 0, 0, 0.0

    def saw(self, answer: pb.ForwardResponse, took_s: float) -> None:
        self.count += 1
        self.longest_s = max(self.longest_s, took_s)
        self.first = self.first or answer.output.raw
        self.wrong += answer.output.raw != self.first or not self.first


async def _stream(address: str, count: int, seed: int, said: Counter[str], controls: Controls) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.stream_stream(STREAM)()
        came = asyncio.Event()
        begun = [0.0]

        async def read() -> None:
            while (data := await call.read()) is not grpc.aio.EOF:
                m = pb.StreamForwardResponse.FromString(data)
                if m.forward.request_id == CONTROL_ID:
                    controls.saw(m.forward, time.monotonic() - begun[0])
                    came.set()
                else:
                    said[m.error.reason if m.HasField("error") else str(m.WhichOneof("kind"))] += 1

        reader = asyncio.create_task(read())
        control = request(CONTROL_ID, random.Random(1))
        ask = pb.StreamForwardRequest(forward=control).SerializeToString()
        made = messages(seed, stream=True)
        for sent in range(1, count + 1):
            await call.write(next(made))
            if sent % BETWEEN == 0:
                came.clear()
                begun[0] = time.monotonic()
                await call.write(ask)
                waiting = asyncio.create_task(came.wait())
                await asyncio.wait({waiting, reader}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not came.is_set():
                    said["no answer to a control"] += 1
                    controls.wrong += 1
                    break
        await call.done_writing()
        await asyncio.wait_for(reader, 30)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            said[f"the stream ended with {code.name}: {await call.details()}"] += 1
            controls.wrong += 1


async def _unary(address: str, count: int, seed: int, said: Counter[str], controls: Controls) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        forward = channel.unary_unary(FORWARD)
        made = messages(seed, stream=False)

        async def one(data: bytes) -> None:
            try:
                await forward(data, timeout=30)
                said["unary OK"] += 1
            except grpc.aio.AioRpcError as e:
                reason = dict(e.trailing_metadata() or ()).get("expertd-reason", "")
                said[f"unary {reason or 'without a reason: ' + e.code().name}"] += 1
                controls.wrong += not reason

        control = request(CONTROL_ID, random.Random(1)).SerializeToString()
        for _ in range(0, count, 50):
            await asyncio.gather(*(one(next(made)) for _ in range(50)))
            begin = time.monotonic()
            controls.saw(pb.ForwardResponse.FromString(await forward(control, timeout=30)), time.monotonic() - begin)


def fuzz(address: str, stream: int, unary: int, seed: int) -> tuple[Counter[str], Controls]:
    """What the server said to so many messages on a stream, and to so many unary calls."""
    said: Counter[str] = Counter()
    controls = Controls()

    async def both() -> None:
        await _stream(address, stream, seed, said, controls)
        await _unary(address, unary, seed + 1, said, controls)

    asyncio.run(both())
    return said, controls


def fuzz_beside(address: str, way: str, count: int, seed: int) -> tuple[Counter[str], Controls]:
    """The same of a session over TCP ("tcp") or in shared memory ("shm")."""
    said: Counter[str] = Counter()
    controls = Controls()

    def saw(raw: bytes, took_s: float) -> None:
        controls.saw(pb.ForwardResponse(output=pb.Tensor(raw=raw)), took_s)

    fuzz_sessions(address, way, count, seed, flipped(messages(seed, stream=True), seed), said, saw)
    return said, controls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--way", choices=("stream", "tcp", "shm"), default="stream")
    parser.add_argument("--messages", type=int, default=1_000_000, help="on a stream, or in sessions")
    parser.add_argument("--unary", type=int, default=20_000, help="unary calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            ROOT,
            Path(folder) / "log",
            ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--threads", "1", "--tcp", "on"],
        )

        def attack(count: int, unary: int, seed: int) -> tuple[Counter[str], Controls]:
            if args.way == "stream":
                return fuzz(server.address, count, unary, seed)
            return fuzz_beside(server.address, args.way, count, seed)

        attack(2000, 500, args.seed + 1000)  # so that buffers have their size
        before, begin = server.memory(), time.monotonic()
        said, controls = attack(args.messages, args.unary, args.seed)
        took_s, grown = time.monotonic() - begin, (server.memory() - before) / 1e6
        alive = server.process.poll() is None
        server.stop()
        traces = (Path(folder) / "log").read_text().count("Traceback")
    out = {
        "way": args.way, "messages": args.messages, "unary": args.unary if args.way == "stream" else 0,
        "seconds": round(took_s), "grown_mb": round(grown, 1),
        "controls": controls.count, "wrong": controls.wrong, "longest_control_s": round(controls.longest_s, 3),
        "tracebacks": traces, "alive": alive, "said": dict(said.most_common()),
    }  # fmt: skip
    print(json.dumps(out) if args.json else "\n".join(f"{k}: {v}" for k, v in out.items()))
    return int(controls.wrong > 0 or controls.longest_s > LATE_S or grown > 200 or traces > 0 or not alive)


if __name__ == "__main__":
    raise SystemExit(main())
