"""Hostile clients before a real engine and its listeners, and two honest ones beside them."""

from __future__ import annotations

import contextlib
import ctypes as C
import gc
import os
import socket
import struct
import time
from typing import Any

import numpy as np
import torch
from fuzzed import ARENA, DEADLINE_S, TOKENS, Fuzzed, H, disturb, fill, garbage, random_submission

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.in_flight import RequestsInFlight
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region, host_id
from expertd.tcp.client import Client as TcpClient
from expertd.tcp.entry import connect, enter, parse_endpoint
from expertd_server.config.values import Address
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.transports.shm import ShmListener
from expertd_server.transports.tcp import TcpListener

__all__ = ["HostileClients"]

_MOST = 6
"""Hostile sessions of each kind at a time."""
_STRANGERS = 16
_HEAD = struct.Struct("<4sIII")
_X = np.random.default_rng(0).integers(1, 9, (3, H)).astype(np.float32)
_IDS, _WEIGHTS = np.zeros((3, 2), np.int32), np.full((3, 2), 1.5, np.float32)


class _Doubles:
    """out = x * the weights' sum"""

    backend = "doubles"

    def __call__(
        self, hidden_states: Any, topk_ids: Any, topk_weights: Any, *, router_weight_on_input: bool = False, out: Any
    ) -> Any:
        return out.copy_(hidden_states * topk_weights.sum(1, keepdim=True))


class _Hostile:
    """One hostile client's session in shared memory."""

    def __init__(self, sock: socket.socket, region: Region) -> None:
        self.sock, self.region, self.sent = sock, region, 0
        self.ring = (Submission * region.entries).from_address(region.address + layout.PAGE)

    def submit(self, s: Submission) -> None:
        slot = self.ring[self.sent % self.region.entries]
        C.memmove(C.addressof(slot) + 8, C.addressof(s) + 8, C.sizeof(s) - 8)
        self.sent += 1
        slot.seq = self.sent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.region.close()


class HostileClients(Fuzzed):
    """Anybody may connect to the listeners, be given tokens, and do anything with what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        engine = self.engine = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=TOKENS))
        engine.hold([ServedLayer(0, 4, (0, 1, 2, 3), 2, H, 8, _Doubles(), "doubles")])
        engine.start()
        engine.open()
        each = layout.region_bytes(layout.ENTRIES, ARENA)
        self.shm = ShmListener(engine, arena_bytes=ARENA, most_bytes=4 * _MOST * each)
        self.shm.start()
        self.tcp = TcpListener(engine, Address("127.0.0.1", 0), TcpBounds(1 << 20), most_sessions=4 * _MOST)
        self.tcp.start()
        self.hostile: list[_Hostile] = []
        self.frames: list[socket.socket] = []
        self.strangers: list[socket.socket] = []
        self.honest_sock, region = self._enter_shm("honest")
        self.honest: list[RequestsInFlight] = [Client(region), TcpClient(self._enter_tcp("honest"))]
        self.check()
        self.fds = len(os.listdir("/proc/self/fd"))

    def _enter_shm(self, caller: str) -> tuple[socket.socket, Region]:
        token, endpoint, why = self.shm.offer(caller, host_id())
        if why:
            raise OSError(why)
        sock = self._to_shm(endpoint)
        try:
            sock.sendall(token.encode())
            return sock, Region.receive(sock)
        except BaseException as e:
            sock.close()
            raise OSError(str(e)) from e

    def _to_shm(self, endpoint: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        try:
            sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        except OSError:
            sock.close()
            raise
        return sock

    def _enter_tcp(self, caller: str) -> socket.socket:
        token, endpoint, why = self.tcp.offer(caller, host_id())
        if why:
            raise OSError(why)
        sock = connect("127.0.0.1", parse_endpoint(endpoint).port, DEADLINE_S)
        enter(sock, token, DEADLINE_S)
        sock.setblocking(False)
        return sock

    def _one(self) -> _Hostile:
        """Raises OSError where there is none."""
        if not self.hostile:
            raise OSError
        return self.rng.choice(self.hostile)

    # ---- shared memory

    def rule_enter(self) -> None:
        if len(self.hostile) < _MOST:
            self.hostile.append(_Hostile(*self._enter_shm("hostile")))

    def rule_submit(self) -> None:
        self._one().submit(random_submission(self.rng))

    def rule_submit_many(self) -> None:
        h = self._one()
        for _ in range(8):
            h.submit(random_submission(self.rng))

    def rule_ring(self) -> None:
        self._one().sock.send(b"\1" * self.rng.choice((1, 64)), socket.MSG_DONTWAIT)

    def rule_rewrite(self) -> None:
        """Or truncate."""
        disturb(self._one().region, self.rng)

    def rule_fill_and_block(self) -> None:
        fill(self._one().sock.fileno())

    def rule_says_it_sleeps(self) -> None:
        h = self._one()
        for at in (64, 128):
            C.c_uint32.from_address(h.region.address + at).value = 1

    def rule_half_close(self) -> None:
        self._one().sock.shutdown(self.rng.choice((socket.SHUT_RD, socket.SHUT_WR)))

    def rule_close(self) -> None:
        h = self._one()
        self.hostile.remove(h)
        h.close()

    # ---- either listener

    def rule_ask_for_tokens(self) -> None:
        self.shm.offer("hostile", host_id())
        self.tcp.offer("hostile", host_id())

    def rule_stranger(self) -> None:
        """Half a token, a wrong one, or nothing at all; then it stops."""
        while len(self.strangers) > _STRANGERS:
            self.strangers.pop(0).close()
        if self.rng.random() < 0.5:
            sock = self._to_shm(self.shm._endpoint)
        else:
            sock = connect("127.0.0.1", parse_endpoint(self.tcp._endpoint).port, DEADLINE_S)
        self.strangers.append(sock)
        sock.send(garbage(self.rng, self.rng.choice((1, 63, 64, 65, 72, 200))))

    # ---- TCP

    def rule_tcp_enter(self) -> None:
        if len(self.frames) < _MOST:
            self.frames.append(self._enter_tcp("hostile"))

    def rule_tcp_frame(self) -> None:
        """A frame whose lengths are true or lies, whole or cut."""
        if not self.frames:
            raise OSError
        sock, body = self.rng.choice(self.frames), garbage(self.rng, self.rng.choice((0, 1, 40, 400)))
        length = self.rng.choice((len(body), len(body), len(body), 0, 1 << 19, 2**32 - 1))
        head = _HEAD.pack(self.rng.choice((b"exf1", b"exf1", b"exf1", b"GET ")), length, 1, self.rng.choice((0, 7)))
        data = head + body
        try:
            sock.send(data[: self.rng.choice((len(data), len(data), self.rng.randrange(len(data) + 1)))])
        except OSError:
            self.frames.remove(sock)
            sock.close()

    def rule_tcp_fill(self) -> None:
        """Small requests that are refused, whose answers nobody reads."""
        if not self.frames:
            raise OSError
        sock = self.rng.choice(self.frames)
        for n in range(1, 65):
            sock.send(_HEAD.pack(b"exf1", 2, n, 0) + b"\x0a\x00")

    def rule_tcp_close(self) -> None:
        if self.frames:
            sock = self.frames.pop(self.rng.randrange(len(self.frames)))
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            sock.close()

    # ---- what holds

    def check(self) -> None:
        """Honest clients are answered, rightly and in time."""
        for client in self.honest:
            begun = time.monotonic()
            tensors = layout.Tensors(
                hidden=_X.ctypes.data, ids=_IDS.ctypes.data, weights=_WEIGHTS.ctypes.data,
                hidden_bytes=_X.nbytes, ids_bytes=_IDS.nbytes, weights_bytes=_WEIGHTS.nbytes, out_bytes=_X.nbytes,
            )  # fmt: skip
            s = Submission(
                tokens=3, top_k=2, kind=1, hidden_dtype=1, ids_dtype=5, weights_dtype=1, out_dtype=1, hidden_size=H
            )
            answer = Completion()
            ticket = client.call(s, tensors, answer, int(DEADLINE_S * 1e9), 50_000)
            self.took_s.append(time.monotonic() - begun)
            assert ticket > 0, "an honest client was not answered in time"
            assert not answer.refused, f"an honest client was refused: {answer.name!r} {answer.text!r}"
            out = np.frombuffer(C.string_at(client.output(ticket, s), _X.nbytes), np.float32)
            client.release(ticket)
            assert np.array_equal(out.reshape(_X.shape), _X * 3), "an honest client got a wrong answer"

    def close(self) -> None:
        """Everything hostile goes; what it had is given back, and the engine stops in time."""
        try:
            for each in (*self.hostile, *self.frames, *self.strangers):
                each.close()
            self.hostile, self.frames, self.strangers = [], [], []
            self._all_gone()
            self.check()
        finally:
            self.honest_sock.close()
            for client in self.honest:
                client.end()
                client.close()
            self.shm.close()
            self.tcp.close()
            stopped = self.engine.stop(DEADLINE_S) is not False
        assert stopped, "the engine did not stop in time"

    def _all_gone(self) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            found = self.shm.sessions, len(self.engine.shm_connections), self.tcp.sessions
            fds = len(os.listdir("/proc/self/fd"))
            if found == (1, 1, 1) and fds <= self.fds:
                return
            time.sleep(0.001)
            if until_s - time.monotonic() < DEADLINE_S / 2:
                gc.collect()
        raise AssertionError(f"{found} sessions are left, want (1, 1, 1); {fds} descriptors, want {self.fds}")
