"""The fuzz of sessions beside the stream: frames over TCP, submissions in shared memory, of a caller who writes what
he likes, and an honest one beside him who asks the same again and again on a session of his own.  See fuzz.py.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

from expertd.codec import decode_stream_response
from expertd.shm import layout
from expertd.shm.region import host_id
from expertd.tcp.entry import connect, enter, parse_endpoint
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.shm.connection import ShmTransport, enter_session
from expertd_client.transports.tcp.connection import TcpTransport

__all__ = ["fuzz_sessions"]

STREAM = "/expertd.v1.ExpertService/StreamForward"
BETWEEN = 500
H, K = 256, 2
_HEAD = struct.Struct("<4sIII")
_MAGIC = b"exf1"
_PATIENCE_S = 30.0


@contextlib.contextmanager
def offered(address: str, way: str) -> Iterator[pb.SessionAnswer]:
    """The answer to an offer of that way alone, while its stream stands."""
    over = threading.Event()

    def asks() -> Iterator[bytes]:
        offer = pb.SessionOffer(transports=[way], host_id=host_id())
        yield pb.StreamForwardRequest(session=offer).SerializeToString()
        over.wait(_PATIENCE_S)

    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream = channel.stream_stream(STREAM)(asks(), timeout=_PATIENCE_S)
        answer = pb.StreamForwardResponse.FromString(next(stream)).session
        if not answer.token:
            raise SystemExit(f"fuzz: {way} is not offered: {answer}")
        yield answer
        over.set()


class Frames:
    """A session over TCP of a caller who sends anything."""

    def __init__(self, address: str, said: Counter[str]) -> None:
        with offered(address, "tcp") as answer:
            where = parse_endpoint(answer.endpoint)
            self._sock = connect(where.host or "127.0.0.1", where.port, 10)
            enter(self._sock, answer.token, 10)
        self._sock.settimeout(_PATIENCE_S)
        self.sent, self.over = 0, False
        self._said = said
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, data: bytes, rng: random.Random) -> None:
        """One frame, whose head is wrong now and then: then the session ends."""
        self.sent += 1
        if not data and rng.random() < 0.95:  # an empty frame ends the session, too
            data = b"\0"
        head = [_MAGIC, len(data), self.sent & 0xFFFFFFFF, rng.choice((0, 0, len(data), rng.getrandbits(32)))]
        if rng.random() < 0.0005:
            part = rng.randrange(3)
            head[part] = rng.randbytes(4) if part == 0 else rng.getrandbits(32)
        with contextlib.suppress(OSError):
            self._sock.sendall(_HEAD.pack(*head) + data)
            return
        self.over = True

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as answers:
                while len(head := answers.read(_HEAD.size)) == _HEAD.size:
                    data = answers.read(length := _HEAD.unpack(head)[1])
                    if len(data) < length:
                        break  # the session ended while it was written
                    m = decode_stream_response(data)
                    self._said[m.reason if isinstance(m, pb.RequestError) else type(m).__name__] += 1
        except OSError:
            pass
        self.over = True

    def close(self) -> None:
        self._sock.close()
        self._reader.join(_PATIENCE_S)


class Noise:
    """A session in shared memory of a caller who writes anything anywhere in it."""

    def __init__(self, address: str) -> None:
        with offered(address, "shm") as answer:
            self._sock, self._client = enter_session(answer)
        region = self._client.region
        self._base, self._bell = region.address, region.bell
        self._entries, self._arena, self._arena_bytes = region.entries, region.arena, region.arena_bytes
        self._ring = (layout.Submission * self._entries).from_address(self._base + layout.PAGE)
        self._taken = C.c_uint64.from_address(self._base + _TAKEN)
        self.sent = 0

    def send(self, rng: random.Random) -> None:
        """One submission, when the one before has been taken; and noise in the arena, and in the control page."""
        size = C.sizeof(layout.Submission)
        at = C.addressof(self._ring[self.sent % self._entries])
        noise = bytearray(rng.randbytes(size))
        if rng.random() < 0.9:
            near(layout.Submission.from_buffer(noise), self._arena_bytes, rng)
        C.memmove(at + 8, bytes(noise[8:]), size - 8)
        if rng.random() < 0.1:
            junk = rng.randbytes(64)
            C.memmove(self._arena + rng.randrange(1 << 16), junk, len(junk))
        if rng.random() < 0.01:  # what the server wrote there for the client, and the bells' flags
            C.memmove(self._base + 4 * rng.randrange(48), rng.randbytes(4), 4)
        self.sent += 1
        C.c_uint64.from_address(at).value = self.sent
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell, b".")

    def wait(self) -> bool:
        """Until everything was taken; False: it was not."""
        end = time.monotonic() + _PATIENCE_S
        while self._taken.value < self.sent:
            if time.monotonic() > end:
                return False
            time.sleep(0)
        return True

    def close(self) -> None:
        self._sock.close()
        self._client.close()


_TAKEN = 192
"""Of the count of taken submissions in the control page (csrc/layout.h): after the head and two bells of 64 bytes."""


def near(s: layout.Submission, arena_bytes: int, rng: random.Random) -> None:
    """Fields close to what is right."""
    s.kind = rng.choice((1, 1, 1, 1, 1, 0, 2, 3, 4, 9))
    s.layer, s.tokens, s.top_k = rng.choice((0, 1, 1, 2)), rng.choice((0, 1, 4, 5)), rng.choice((1, K, K, 9))
    s.hidden_dtype, s.ids_dtype = rng.choice((1, 2, 3, 4, 5)), rng.choice((5, 6, 1))
    s.weights_dtype, s.out_dtype = rng.choice((1, 2, 3)), rng.choice((1, 3, 4))
    s.flags, s.hidden_size = rng.choice((0, 0, 0, 1, 2, 255)), rng.choice((0, H, H, 255))
    s.deadline_ns = rng.choice((0, 0, 1, time.monotonic_ns() + rng.randrange(1, 10**8)))
    for name in ("hidden", "ids", "weights", "out", "scales"):
        offsets = (0, 4096, 8192, 1 << 14, arena_bytes - 16, arena_bytes, rng.getrandbits(64), rng.getrandbits(16) | 1)
        setattr(s, name, rng.choice((0, 4096, 8192, 1 << 14, 1 << 15, *offsets)))


class Honest:
    """Asks the same on a session of its own.  saw: gets the answer's bytes and the time that it took."""

    def __init__(self, address: str, way: str, saw: Callable[[bytes, float], None]) -> None:
        channel: Any = ShmTransport() if way == "shm" else TcpTransport(address)
        self._client = ExpertClient(GrpcTransport(address, offers=[channel]), timeout_s=_PATIENCE_S)
        self._way, self._saw = way, saw
        rng = np.random.default_rng(1)
        self._x = rng.standard_normal((3, H), np.float32)
        self._ids = np.array([[0, 1], [2, 3], [4, 5]], np.int32)

    def ask(self) -> None:
        begin = time.monotonic()
        answer = self._client.forward(0, self._x, self._ids, np.full((3, K), 0.5, np.float32))
        self._saw(answer.output.tobytes(), time.monotonic() - begin)

    def close(self) -> None:
        agreed = self._client.session().transport
        self._client.close()
        if agreed != self._way:
            raise SystemExit(f"fuzz: the honest caller's session was {agreed}, want {self._way}")


def fuzz_sessions(
    address: str, way: str, count: int, seed: int, made: Iterator[bytes], said: Counter[str],
    saw: Callable[[bytes, float], None],
) -> None:  # fmt: skip
    """So many messages of `made` over TCP, or so many submissions ("shm").  said: what the server says; saw: see
    Honest."""
    rng, honest = random.Random(seed), Honest(address, way, saw)
    session: Frames | Noise | None = None
    for n in range(count):
        if session is None:
            session = Frames(address, said) if way == "tcp" else Noise(address)
            said["sessions"] += 1
        if isinstance(session, Frames):
            session.send(next(made), rng)
            over = session.over
        else:
            session.send(rng)
            over = n % 20_000 == 19_999 or (n % 128 == 127 and not session.wait())
        if over:
            session.close()
            session = None
        if n % BETWEEN == BETWEEN - 1:
            honest.ask()
    if session is not None:
        session.close()
    honest.close()
