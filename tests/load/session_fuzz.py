"""Fuzzer of the session protocol: a state machine in which either party may at any step do any of stop, block, fill,
truncate, rewrite, close, lie about lengths.  The other one keeps its deadline, its memory and its other sessions.

    python tests/load/session_fuzz.py --steps 1000000 --seed 1

prints the steps by rule, how long honest requests took, and every violation.  Exit code 1 where there is one.

    HostileClients    before a real engine and its listeners: sessions in shared memory and over TCP, entered and not
    HostileServer     before a real client of shared memory

Between hostile steps an honest party goes on: a second client of the same engine, or the client itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes as C
import faulthandler
import fcntl
import gc
import logging
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region, host_id
from expertd.shm.tickets import NoRoomError, SessionEndedError
from expertd.tcp.entry import connect, enter, parse_endpoint
from expertd_server.config.values import Address
from expertd_server.engine.engine import Engine
from expertd_server.engine.peers import PeerBounds
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.shm import ShmDoor
from expertd_server.transports.tcp import TcpDoor

H, TOKENS = 32, 16
DEADLINE_S = 20.0
"""Of an honest request; it takes 0.1 ms where nobody else needs the machine."""
MOST_SESSIONS = 6
_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_ARENA = 1 << 16
_HEAD = struct.Struct("<4sIII")


class Doubles:
    """out = x * the weights' sum"""

    backend = "doubles"

    def __call__(
        self, hidden_states: Any, topk_ids: Any, topk_weights: Any, *, router_weight_on_input: bool = False, out: Any
    ) -> Any:
        return out.copy_(hidden_states * topk_weights.sum(1, keepdim=True))


class Machine:
    """Rules are the methods rule_*: one is drawn for each step.  check(): what always holds, every CHECK steps."""

    CHECK = 50

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.steps: Counter[str] = Counter()
        self.took_s: list[float] = []
        self.violations: list[str] = []
        self.rules = [getattr(self, name) for name in dir(self) if name.startswith("rule_")]

    def run(self, steps: int) -> None:
        for n in range(steps):
            rule = self.rng.choice(self.rules)
            with contextlib.suppress(OSError):  # of the hostile party's own calls
                rule()
            self.steps[rule.__name__.removeprefix("rule_")] += 1
            if n % self.CHECK == self.CHECK - 1:
                self.check()
            if n % 1000 == 0:
                faulthandler.dump_traceback_later(120, exit=True)
        faulthandler.cancel_dump_traceback_later()

    def check(self) -> None:
        raise NotImplementedError

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(f"step {sum(self.steps.values())}: {what}")


def garbage(rng: random.Random, size: int) -> bytes:
    return rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


def fill(fd: int) -> None:
    """Makes its open file blocking after nothing more fits into it."""
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(OSError):
        for _ in range(10_000):
            os.write(fd, b"\1")
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def disturb(region: Region, rng: random.Random) -> None:
    """Words of the control page, of the rings, or bytes of the arena; or holes in the memory."""
    page = region.address
    what = rng.randrange(5)
    if what == 0:
        C.c_uint32.from_address(page + 4 * rng.randrange(layout.PAGE // 4)).value = rng.choice((0, 1, 2**32 - 1))
    elif what == 1:
        at = rng.randrange(layout.PAGE, layout.arena_offset(region.entries) - 64)
        C.memmove(page + at, garbage(rng, 64), 64)
    elif what == 2:
        C.memmove(region.arena + rng.randrange(region.arena_bytes - 64), garbage(rng, 64), 64)
    elif what == 3:
        LIBC.fallocate(region._fds[0], _PUNCH, C.c_long(rng.randrange(16) << 12), C.c_long(1 << 14))
    else:
        with contextlib.suppress(PermissionError):
            os.ftruncate(region._fds[0], rng.choice((0, 4096, 1 << 30)))
            raise AssertionError("its size is not sealed")


LIBC = C.CDLL(None)


def random_submission(rng: random.Random) -> Submission:
    """Fields close to what is right, and lies about lengths."""
    s = Submission()
    s.kind, s.layer = rng.choice((0, 1, 1, 1, 2, 3, 4, 9)), rng.choice((0, 0, 0, 1, 2**32 - 1))
    s.tokens, s.top_k = rng.choice((0, 1, 3, TOKENS, TOKENS + 1, 2**32 - 1)), rng.choice((0, 1, 2, 2, 4, 2**31))
    s.hidden_dtype, s.ids_dtype = rng.choice((1, 1, 2, 3, 4, 255)), rng.choice((5, 5, 6, 0))
    s.weights_dtype, s.out_dtype = rng.choice((1, 1, 2, 0)), rng.choice((1, 1, 4, 77))
    s.flags, s.hidden_size, s.id = rng.choice((0, 0, 1, 2, 65535)), rng.choice((0, H, 7)), rng.randrange(1 << 10)
    s.deadline_ns, s.number = rng.choice((0, 1, 2**64 - 1)), rng.choice((0, 1, 1 << 16, 2**32 - 1))
    for name in ("hidden", "ids", "weights", "out", "scales"):
        setattr(s, name, rng.choice((0, 4096, 8192, _ARENA - 16, _ARENA, 8, 2**64 - 16, rng.randrange(1 << 16))))
    return s


class Hostile:
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


class HostileClients(Machine):
    """Anybody may connect to the listeners, be given tokens, and do anything with what comes of it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        engine = self.engine = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=TOKENS))
        engine.hold([ServedLayer(0, 4, (0, 1, 2, 3), 2, H, 8, Doubles(), "doubles")])
        engine.start()
        engine.open()
        each = layout.region_bytes(layout.ENTRIES, _ARENA)
        self.shm = ShmDoor(engine, arena_bytes=_ARENA, most_bytes=4 * MOST_SESSIONS * each)
        self.shm.start()
        self.tcp = TcpDoor(engine, Address("127.0.0.1", 0), PeerBounds(1 << 20), most_sessions=4 * MOST_SESSIONS)
        self.tcp.start()
        self.x = np.random.default_rng(seed).integers(1, 9, (3, H)).astype(np.float32)
        self.hostile: list[Hostile] = []
        self.frames: list[socket.socket] = []
        self.strangers: list[socket.socket] = []
        self.honest_sock, region = self._enter("honest")
        self.honest = Client(region)
        self.check()
        gc.collect()
        self.fds = len(os.listdir("/proc/self/fd"))

    def _enter(self, caller: str) -> tuple[socket.socket, Region]:
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

    def _one(self) -> Hostile:
        """Raises OSError where there is none."""
        if not self.hostile:
            raise OSError
        return self.rng.choice(self.hostile)

    # ---- rules

    def rule_enter(self) -> None:
        if len(self.hostile) < MOST_SESSIONS and self.rng.random() < 0.1:
            self.hostile.append(Hostile(*self._enter("hostile")))

    def rule_submit(self) -> None:
        self._one().submit(random_submission(self.rng))

    def rule_submit_many(self) -> None:
        h = self._one()
        for _ in range(8):
            h.submit(random_submission(self.rng))

    def rule_ring(self) -> None:
        self._one().sock.send(b"\1" * self.rng.choice((1, 64)), socket.MSG_DONTWAIT)

    def rule_rewrite(self) -> None:
        disturb(self._one().region, self.rng)

    def rule_fill(self) -> None:
        if self.rng.random() < 0.05:
            fill(self._one().sock.fileno())

    def rule_says_it_sleeps(self) -> None:
        h = self._one()
        for at in (64, 128):
            C.c_uint32.from_address(h.region.address + at).value = 1

    def rule_half_close(self) -> None:
        if self.rng.random() < 0.02:
            self._one().sock.shutdown(self.rng.choice((socket.SHUT_RD, socket.SHUT_WR)))

    def rule_close(self) -> None:
        if self.rng.random() < 0.02:
            h = self._one()
            self.hostile.remove(h)
            h.close()

    def rule_ask_for_tokens(self) -> None:
        if self.rng.random() < 0.02:
            self.shm.offer("hostile", host_id())
            self.tcp.offer("hostile", host_id())

    def rule_stranger(self) -> None:
        """Half a token, a wrong one, or nothing at all; over either listener."""
        if self.rng.random() > 0.02:
            return
        while len(self.strangers) > 16:
            self.strangers.pop(0).close()
        if self.rng.random() < 0.5:
            sock = self._to_shm(self.shm._endpoint)
        else:
            sock = connect("127.0.0.1", parse_endpoint(self.tcp._endpoint).port, DEADLINE_S)
        self.strangers.append(sock)
        sock.send(garbage(self.rng, self.rng.choice((1, 63, 64, 65, 72, 200))))

    def rule_tcp_enter(self) -> None:
        if len(self.frames) >= MOST_SESSIONS or self.rng.random() > 0.05:
            return
        token, endpoint, why = self.tcp.offer("hostile", host_id())
        if why:
            raise OSError(why)
        sock = connect("127.0.0.1", parse_endpoint(endpoint).port, DEADLINE_S)
        self.frames.append(sock)
        enter(sock, token, DEADLINE_S)
        sock.setblocking(False)

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

    def rule_tcp_close(self) -> None:
        if self.frames and self.rng.random() < 0.05:
            sock = self.frames.pop(self.rng.randrange(len(self.frames)))
            if self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            sock.close()

    # ---- what holds

    def check(self) -> None:
        """The honest client is answered, rightly and in time."""
        begun, client = time.monotonic(), self.honest
        ids, w = np.zeros((3, 2), np.int32), np.full((3, 2), 1.5, np.float32)
        s = Submission(tokens=3, top_k=2, kind=1, hidden_dtype=1, ids_dtype=5, weights_dtype=1, out_dtype=1)
        offsets = []
        for name, array in (("hidden", self.x), ("ids", ids), ("weights", w), ("out", np.zeros_like(self.x))):
            offset = client.take(array.nbytes)
            assert offset is not None
            client.region.view(offset, array.nbytes)[:] = array.tobytes()
            setattr(s, name, offset)
            offsets.append(offset)
        answer, ticket = Completion(), client.submit(s)
        there = ticket and client.wait(ticket, answer, int(DEADLINE_S * 1e9))
        self.took_s.append(time.monotonic() - begun)
        self.must(bool(there), "the honest client was not answered in time")
        if there:
            out = np.frombuffer(bytes(client.region.view(s.out, self.x.nbytes)), np.float32).reshape(self.x.shape)
            good = not answer.refused and np.array_equal(out, self.x * 3)
            self.must(good, f"the honest client got another answer: {answer.name!r} {answer.text!r}")
            client.release(ticket)
        for offset in offsets:
            client.give(offset)

    def close(self) -> None:
        """Everything hostile goes; what it had is given back, and the engine stops in time."""
        for each in (*self.hostile, *self.frames, *self.strangers):
            each.close()
        self.hostile, self.frames, self.strangers = [], [], []
        until_s = time.monotonic() + DEADLINE_S
        while (self.shm.sessions, len(self.engine.sessions), self.tcp.sessions) != (1, 1, 0):
            if time.monotonic() > until_s:
                self.must(False, f"{self.shm.sessions} and {self.tcp.sessions} sessions are left, want 1 and 0")
                break
            time.sleep(0.01)
        self.check()
        while len(os.listdir("/proc/self/fd")) > self.fds and time.monotonic() < until_s:
            gc.collect()
            time.sleep(0.05)
        left = len(os.listdir("/proc/self/fd")) - self.fds
        self.must(left <= 0, f"{left} descriptors are left")
        self.honest_sock.close()
        self.honest.end()
        self.honest.close()
        self.shm.close()
        self.tcp.close()
        self.must(self.engine.stop(DEADLINE_S) is not False, "the engine did not stop in time")


class HostileServer(Machine):
    """A client's session whose server does anything."""

    WAIT_S = 0.002

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        gc.collect()
        self.fds = len(os.listdir("/proc/self/fd"))
        self._open()

    def _open(self) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            region = self.region = Region.create(_ARENA, entries=16)
            head = struct.pack("<8sIIQQ", b"expshm01", 2, 16, layout.arena_offset(16), region.arena_bytes)
            C.memmove(region.address, head, len(head))
            region.send(self.sock)
            self.client = Client(Region.receive(theirs))
        at = region.address + layout.PAGE
        self.submissions = (Submission * 16).from_address(at)
        self.completions = (Completion * 16).from_address(at + 16 * C.sizeof(Submission))
        self.answered = 0

    def _shut(self) -> None:
        self.client.end()
        self.client.close()
        self.sock.close()
        self.region.close()

    # ---- rules

    def rule_answer(self) -> None:
        """To one in flight, to one that was answered, to nobody; once, or again."""
        c = self.completions[self.answered % 16]
        c.id = self.rng.choice((self.submissions[self.rng.randrange(16)].id, self.rng.randrange(1 << 12), 2**64 - 1))
        c.refused, c.routes_computed = self.rng.choice((0, 1, 2**32 - 1)), 2**32 - 1
        C.memmove(C.addressof(c) + Completion.name.offset, garbage(self.rng, 440), 440)  # texts without an end
        self.answered += self.rng.choice((1, 1, 1, 1, 0, 2))
        c.seq = self.answered

    def rule_ring(self) -> None:
        self.sock.send(b"\1" * self.rng.choice((1, 64)), socket.MSG_DONTWAIT)

    def rule_rewrite(self) -> None:
        disturb(self.region, self.rng)

    def rule_fill(self) -> None:
        if self.rng.random() < 0.05:
            fill(self.sock.fileno())

    def rule_says_it_sleeps(self) -> None:
        C.c_uint32.from_address(self.region.address + 128).value = 1

    def rule_takes(self) -> None:
        C.c_uint64.from_address(self.region.address + 192).value = self.rng.choice((0, 1, 16, 2**63, 2**64 - 1))

    def rule_end(self) -> None:
        if self.rng.random() < 0.01:
            how = self.rng.randrange(3)
            if how == 0:
                C.c_uint32.from_address(self.region.address + 256).value = 1
            else:
                self.sock.shutdown(socket.SHUT_WR if how == 1 else socket.SHUT_RDWR)

    def rule_call(self) -> None:
        """The honest client's request: an answer, no answer in time, or the end; nothing else."""
        begun, client = time.monotonic(), self.client
        tensors = layout.Tensors(hidden=b"x" * 128, ids=b"i" * 8, weights=b"w" * 8, hidden_bytes=128, ids_bytes=8,
                                 weights_bytes=8, out_bytes=128)  # fmt: skip
        answer = Completion()
        try:
            spin_ns = self.rng.choice((0, 50_000))
            ticket = client.call(Submission(kind=1), tensors, answer, int(self.WAIT_S * 1e9), spin_ns)
            if ticket > 0:
                client.release(ticket)
            else:
                client.abandon(-ticket)
        except SessionEndedError:
            self.must(client.over, "a session that is not over ended")
        except NoRoomError:
            pass
        self.took_s.append(time.monotonic() - begun)
        self.must(self.took_s[-1] < self.WAIT_S + DEADLINE_S, "a call took longer than its time")

    def rule_loop(self) -> None:
        """An event loop's client."""
        for look in (self.client.drain, self.client.poll):
            for ticket in list(look()):
                self.client.release(ticket)

    def check(self) -> None:
        """Memory is the client's own: no more blocks than tickets.  Who is over, or used up, is opened anew."""
        self.must(self.client.blocks <= self.client.taken <= 16, "blocks of the arena are lost")
        if self.client.over or self.client.taken == 16:
            self._shut()
            self._open()

    def close(self) -> None:
        self._shut()
        gc.collect()
        left = len(os.listdir("/proc/self/fd")) - self.fds
        self.must(left <= 0, f"{left} descriptors are left")


def fuzz(make: Callable[[int], Any], steps: int, seed: int) -> Any:
    """The machine after so many steps."""
    machine = make(seed)
    try:
        machine.run(steps)
    finally:
        machine.close()
    return machine


def shown(machine: Any) -> Iterator[str]:
    times = sorted(machine.took_s)
    name, slowest = type(machine).__name__, times[-1] * 1e3
    yield f"{name}: {sum(machine.steps.values())} steps, {len(times)} honest requests"
    p50, p99 = times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3
    yield f"  p50 {p50:.2f} ms, p99 {p99:.2f}, slowest {slowest:.1f}"
    yield "  " + ", ".join(f"{rule} {n}" for rule, n in sorted(machine.steps.items()))
    yield f"  violations: {len(machine.violations)}"
    yield from (f"    {v}" for v in machine.violations[:20])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="of both machines together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each wrong token
    bad = 0
    for make in (HostileClients, HostileServer):
        machine = fuzz(make, args.steps // 2, args.seed)
        print("\n".join(shown(machine)), flush=True)
        bad += len(machine.violations)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
