"""csrc/ask.cpp in Python, on the sessions of `world`: it reads and writes the memory of the real CallMemory."""

from __future__ import annotations

import contextlib
import ctypes as C
from struct import Struct
from typing import Any

import numpy as np
import virtual
from virtual import point
from world import H, K, Memory, array_at

from expertd.shm.in_flight import NoRoomError
from expertd.shm.layout import Completion, Submission
from expertd_client.cluster import native
from expertd_client.cluster.join import Sum, join_numpy

_CALL_AT = native.BATCH.size + native.OWNERS.size
_TOLD = Struct("=" + native._TOLD)
_DONE, _TIME_OVER, _AMISS = 0, 1, 2
_MEMORY: Any = C.c_char * (1 << 20)


class Asking:
    """The library with ask() and wait() of its own."""

    def __init__(self, library: Any) -> None:
        for name in ("scan", "count", "gather", "join", "sizes"):
            setattr(self, name, getattr(library, name))

    def ask(self, at: int, until_ns: int) -> int:
        point()
        call = _Call(at)
        for n in range(call.owners):
            tokens, routes, begin = call.found[n], call.found[call.owners + n], call.found[2 * call.owners + n]
            if tokens:
                call.send(self, n, tokens, routes, begin)
        return self.wait(at, until_ns)

    def wait(self, at: int, until_ns: int) -> int:
        call, scheduler = _Call(at), virtual.now()
        while True:
            point()
            for share in call.shares():
                share.look()
            how = call.outcome()
            if how != _TIME_OVER or scheduler.now_s * 1e9 >= until_ns:
                break
            waits = next(share for share in call.shares() if share.told[1] == native.IN_FLIGHT)
            waits.memory.sleep(waits.told[0], until_ns * 1e-9)
        if how == _DONE and call.out:
            call.add_up()
        point()
        return how


class _Call:
    """The memory of a desk."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._memory = _MEMORY.from_address(at)
        batch = native.BATCH.unpack_from(self._memory, 0)
        self.tokens, self.rows_bytes = batch[7], batch[4:7]
        _, _, self.experts, self.owners = native.OWNERS.unpack_from(self._memory, native.BATCH.size)
        (self.shares_at, self.count, sessions, found, self.rows, _, _, _, self.out, self.stride, _, _) = (
            native.CALL.unpack_from(self._memory, _CALL_AT)
        )
        self.sessions = (C.c_int64 * self.owners).from_address(sessions)[:]
        self.found = (C.c_int64 * (3 * self.owners)).from_address(found)[:]

    def send(self, library: Any, owner: int, tokens: int, routes: int, begin: int) -> None:
        x, ids = np.empty((tokens, H), np.float32), np.empty((tokens, K), np.int32)
        weights = np.empty((tokens, K), np.float32)
        room = native.Room(native.at(x), 0, native.at(ids), native.at(weights))
        owners_at, rows_at = self.at + native.BATCH.size, self.rows + 8 * begin
        library.gather(self.at, owners_at, owner, rows_at, tokens, C.byref(room))
        share = _Share(self.shares_at + self.count * native.SHARE_BYTES, self.sessions[owner])
        form = C.string_at(self.at + _CALL_AT + native.CALL.size, native.FORM.size)
        C.memmove(share.at + native.SUBMISSION_AT, form, native.FORM.size)
        Submission.from_address(share.at + native.SUBMISSION_AT).tokens = tokens
        _HEAD.pack_into(share.view, 0, C.addressof(share.memory.session), owner, rows_at, tokens, routes)
        self.count += 1
        C.c_int64.from_address(self.at + _CALL_AT + 8).value = self.count
        ticket = 0
        with contextlib.suppress(NoRoomError):
            ticket = share.memory.put(x, ids, weights, False)
        sent_ns = virtual.monotonic_ns()
        share.tell(ticket, native.IN_FLIGHT if ticket else 0, 0, sent_ns, 0, 0, 0, 0.0, b"")

    def shares(self) -> list[_Share]:
        return [_Share(self.shares_at + n * native.SHARE_BYTES) for n in range(self.count)]

    def outcome(self) -> int:
        waits = False
        for share in self.shares():
            if share.told[1] == native.IN_FLIGHT:
                waits = True
            elif share.told[1] != native.ANSWERED or share.answer.routes_computed != share.head[4]:
                return _AMISS
        return _TIME_OVER if waits else _DONE

    def add_up(self) -> None:
        out = np.empty((self.tokens, H), np.float32)
        sums = []
        for share in self.shares():
            tokens = share.head[3]
            rows = np.frombuffer(C.string_at(share.head[2], 8 * tokens), np.int64)
            address = share.memory.output(share.told[0], None)
            sums.append(Sum(rows, array_at(address, (tokens, H), np.float32).copy()))
        join_numpy(sums, out)
        for n in range(self.tokens):
            C.memmove(self.out + n * self.stride, out[n].tobytes(), 4 * H)
        for share in self.shares():
            share.memory.release(share.told[0])


_HEAD = Struct("=5q")


class _Share:
    def __init__(self, at: int, session: int = 0) -> None:
        self.at = at
        self.view = (C.c_char * native.SHARE_BYTES).from_address(at)
        self.head = _HEAD.unpack_from(self.view, 0)
        self.told = _TOLD.unpack_from(self.view, native.TOLD_AT)
        self.answer = Completion.from_address(at + native.ANSWER_AT)
        self.memory = Memory.by_session[session or self.head[0]]

    def tell(self, *told: Any) -> None:
        _TOLD.pack_into(self.view, native.TOLD_AT, *told)
        self.told = told

    def look(self) -> None:
        if self.told[1] != native.IN_FLIGHT:
            return
        found, ticket = self.memory.see(self.told[0]), self.told[0]
        if found < 0:
            self.tell(ticket, native.LOST, *self.told[2:])
        elif found > 0:
            self.memory.answer(ticket, self.answer)
            self.tell(ticket, native.ANSWERED, 0, self.told[3], virtual.monotonic_ns(), 51_000, 0, 1000.0, b"sums")
