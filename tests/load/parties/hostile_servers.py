"""Hostile servers before a real client of shared memory and one of TCP."""

from __future__ import annotations

import contextlib
import ctypes as C
import socket
import struct
import time

from fuzzed import ARENA, DEADLINE_S, Fuzzed, disturb, fill, garbage

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.in_flight import NoRoomError, RequestsInFlight, SessionEndedError
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region
from expertd.tcp.client import Client as TcpClient
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["HostileShmServer", "HostileTcpServer"]

_ENTRIES = 16
_WAIT_S = 0.0001
_HEAD = struct.Struct("<4sIII")
_OUT_BYTES = 128


class _HostileServer(Fuzzed):
    """A client's session whose server does anything.  The client keeps its deadline, and its tickets."""

    client: RequestsInFlight
    sock: socket.socket

    def __init__(self) -> None:
        super().__init__()
        self.open()

    def open(self) -> None:
        """A new session."""
        raise NotImplementedError

    def shut(self) -> None:
        self.client.end()
        self.client.close()
        self.sock.close()

    # ---- the honest client

    def rule_call(self) -> None:
        """An answer, no answer in time, or the end; nothing else."""
        self._call()

    def rule_send(self) -> None:
        """A request that nobody waits for, as an event loop's."""
        with contextlib.suppress(NoRoomError):
            self.client.send(_submission(), _tensors())

    def rule_loop(self) -> None:
        """What an event loop does when its socket is readable."""
        for look in (self.client.drain, self.client.poll):
            for ticket in list(look()):
                answer = Completion()
                self.client.answer(ticket, answer)
                self.client.release(ticket)

    def rule_watch(self) -> None:
        for ticket in list(self.client.watch(int(_WAIT_S * 1e9))):
            self.client.release(ticket)

    def _call(self) -> None:
        begun, client = time.monotonic(), self.client
        answer, spin_ns = Completion(), self.rng.choice((0, 20_000))
        try:
            ticket = client.call(_submission(), _tensors(), answer, int(_WAIT_S * 1e9), spin_ns)
            if ticket > 0:
                if not answer.refused:
                    assert len(C.string_at(client.output(ticket, _submission()), _OUT_BYTES)) == _OUT_BYTES
                client.release(ticket)
            else:
                client.abandon(-ticket)
        except SessionEndedError:
            assert client.over, "a session that is not over ended"
        except NoRoomError:
            pass
        self.took_s.append(time.monotonic() - begun)
        assert self.took_s[-1] < _WAIT_S + DEADLINE_S, "a call took longer than its time"

    def check(self) -> None:
        """Who is over, or used up, is opened anew."""
        if self.client.over or self.client.taken >= _ENTRIES:
            self.shut()
            self.open()

    def close(self) -> None:
        self._call()
        self.shut()


class HostileShmServer(_HostileServer):
    client: Client

    def open(self) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            region = self.region = Region.create(ARENA, entries=_ENTRIES)
            head = struct.pack("<8sIIQQ", b"expshm01", 2, _ENTRIES, layout.arena_offset(_ENTRIES), region.arena_bytes)
            C.memmove(region.address, head, len(head))
            region.send(self.sock)
            self.client = Client(Region.receive(theirs))
        at = region.address + layout.PAGE
        self.submissions = (Submission * _ENTRIES).from_address(at)
        self.completions = (Completion * _ENTRIES).from_address(at + _ENTRIES * C.sizeof(Submission))
        self.answered = 0

    def shut(self) -> None:
        super().shut()
        self.region.close()

    def rule_answer(self) -> None:
        """To one in flight, to one that was answered, to nobody; once, or again."""
        c = self.completions[self.answered % _ENTRIES]
        ids = (self.submissions[self.rng.randrange(_ENTRIES)].id, self.rng.randrange(1 << 12), 2**64 - 1)
        c.id = self.rng.choice((ids[0], *ids))
        c.refused, c.routes_computed = self.rng.choice((0, 1, 2**32 - 1)), 2**32 - 1
        C.memmove(C.addressof(c) + Completion.name.offset, garbage(self.rng, 440), 440)  # texts without an end
        self.answered += self.rng.choice((1, 1, 1, 1, 0, 2))
        c.seq = self.answered

    def rule_ring(self) -> None:
        self.sock.send(b"\1" * self.rng.choice((1, 64)), socket.MSG_DONTWAIT)

    def rule_rewrite(self) -> None:
        """Or truncate."""
        disturb(self.region, self.rng)

    def rule_fill_and_block(self) -> None:
        fill(self.sock.fileno())

    def rule_says_it_sleeps(self) -> None:
        C.c_uint32.from_address(self.region.address + 128).value = 1

    def rule_takes(self) -> None:
        """Lies about how much it took."""
        C.c_uint64.from_address(self.region.address + 192).value = self.rng.choice((0, 1, 16, 2**63, 2**64 - 1))

    def rule_end(self) -> None:
        how = self.rng.randrange(8)
        if how == 0:
            C.c_uint32.from_address(self.region.address + 256).value = 1
        elif how <= 2:
            self.sock.shutdown(socket.SHUT_WR if how == 1 else socket.SHUT_RDWR)

    def check(self) -> None:
        """Memory is the client's own: no more blocks than tickets."""
        assert self.client.blocks <= self.client.taken <= _ENTRIES, "blocks of the arena are lost"
        super().check()


class HostileTcpServer(_HostileServer):
    client: TcpClient

    def open(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname(), DEADLINE_S)
            self.sock, _ = listener.accept()
        self.sock.setblocking(False)
        self.client = TcpClient(ours)
        self.sent, self.heard = 0, b""

    def shut(self) -> None:
        with contextlib.suppress(OSError):  # so that no port waits for what may still come
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        super().shut()

    def _send(self, data: bytes, **lies: int) -> None:
        """A frame; lies: length, sequence or lead that are not so.  Perhaps cut: then it stops within it."""
        self.sent += 1
        head = {"length": len(data), "sequence": self.sent, "lead": 0} | lies
        frame = _HEAD.pack(self.rng.choice((b"exf1",) * 30 + (b"exf2",)), *head.values()) + data
        self.sock.send(frame if self.rng.random() < 0.9 else frame[: self.rng.randrange(len(frame))])

    def rule_answer(self) -> None:
        """Of the shape that was asked for, or of another one; with an id that may be in flight, or none."""
        columns = self.rng.choice((_OUT_BYTES // 4,) * 6 + (0, 1, 1 << 20))
        raw = bytes(self.rng.choice((_OUT_BYTES,) * 6 + (0, 4, 1 << 12)))
        tensor = pb.Tensor(dtype=self.rng.choice((1, 1, 1, 2, 4)), shape=[1, columns], raw=raw)
        answer = pb.ForwardResponse(request_id=self.rng.randrange(1 << 11), output=tensor, routes_computed=2**32 - 1)
        self._send(pb.StreamForwardResponse(forward=answer).SerializeToString())

    def rule_refuse(self) -> None:
        error = pb.RequestError(
            request_id=self.rng.randrange(1 << 11), reason="R" * self.rng.choice((1, 36, 4096)), message="x" * 5000
        )
        self._send(pb.StreamForwardResponse(error=error).SerializeToString())

    def rule_lie_about_lengths(self) -> None:
        lies = self.rng.choice(({"length": 0}, {"length": 2**32 - 1}, {"length": 1 << 16}, {"lead": 2**32 - 1},
                                {"sequence": 0}))  # fmt: skip
        if "lead" in lies or self.rng.random() < 0.2:
            self._send(garbage(self.rng, self.rng.choice((0, 1, 200))), **lies)

    def rule_garbage(self) -> None:
        """The body of a frame, or, now and then, what is no frame."""
        if self.rng.random() < 0.9:
            self._send(garbage(self.rng, self.rng.choice((1, 2, 40, 400))))
        else:
            self.sock.send(garbage(self.rng, 40))

    def rule_read(self) -> None:
        """Or not: then what the client sends fills the sockets."""
        self.sock.recv(self.rng.choice((1, 16, 1 << 16)))

    def rule_end(self) -> None:
        if self.rng.random() < 0.2:
            self.sock.shutdown(self.rng.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))


def _submission() -> Submission:
    return Submission(kind=1, tokens=1, top_k=2, hidden_size=_OUT_BYTES // 4, hidden_dtype=1, ids_dtype=5,
                      weights_dtype=1, out_dtype=1)  # fmt: skip


def _tensors() -> layout.Tensors:
    return layout.Tensors(hidden=b"x" * 128, ids=b"i" * 8, weights=b"w" * 8, hidden_bytes=128, ids_bytes=8,
                          weights_bytes=8, out_bytes=_OUT_BYTES)  # fmt: skip
