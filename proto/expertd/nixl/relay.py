"""The relays of a session, each a process: python -m expertd.nixl.relay ROLE OWNER WIRE BELL, three sockets.

OWNER    to the process that started it: the region comes first; then one line goes back, READY or why not.  When
         either side closes it the session is over.
WIRE     to the other relay: what each needs to know of the other, then a byte for each notification, so that a
         relay sleeps while nothing is under way.  When either closes it the session is over.
BELL     to whoever else has the region: wakes who sleeps.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import time

from expertd.nixl.agent import Agent, AgentError
from expertd.nixl.find import NixlMissingError
from expertd.nixl.notes import (
    ForgedError,
    Numbers,
    Range,
    answer_note,
    inputs,
    output,
    parse_answer,
    parse_request,
    request_note,
)
from expertd.shm.client import Client
from expertd.shm.host import Host
from expertd.shm.layout import CANCEL, Completion, Submission
from expertd.shm.library import LibraryMissingError
from expertd.shm.region import Region, RegionError
from expertd.tcp.entry import read_exactly

__all__ = ["FAR", "HELLO", "MAGIC", "MOST_METADATA", "NEAR", "READY", "FarRelay", "NearRelay", "main"]

NEAR, FAR = "near", "far"
READY = "ready"
MAGIC = b"expnixl1"
HELLO = struct.Struct("<8sQQII")
"""Magic, address and bytes of the arena, entries of a ring, bytes of the metadata that follows."""
MOST_METADATA = 64 << 10
_MEET_S = 10.0
_SPIN_S = 50e-6
"""How long a relay looks without sleeping after something came."""
_HOT_S = 0.05
"""How long it looks for what was announced; then it naps in between."""
_NAP_MS, _SLEEP_MS = 1, 100
_AFTERMATH_S = 0.1
"""How long after the last word it naps instead of sleeping: what NIXL took for sent may still want to be carried on."""
_FORGET_S = 5.0
"""How long it waits for what was announced and did not come, or for the announcement of what did."""
_LAST_S = 1.0
"""For answers that are ready when the server ends the session."""


class OverError(Exception):
    """The session is over; the text says why, where somebody wants to know."""


class Relay:
    """What both have in common.  region: this host's half, laid out, whose bell rings when it has something."""

    def __init__(self, region: Region, owner: socket.socket, wire: socket.socket) -> None:
        self._region, self._owner, self._wire = region, owner, wire
        self._rings = socket.socket(fileno=os.dup(region.bell))
        self._agent = Agent(region.arena, region.arena_bytes)
        self._numbers = Numbers(4 * region.entries)
        self._sent = self._expected = 0
        self._answer = Completion()

    def meet(self) -> None:
        """The other relay.  Raises OverError, AgentError, OSError."""
        r, until_s = self._region, time.monotonic() + _MEET_S
        mine = self._agent.metadata
        self._wire.settimeout(_MEET_S)
        self._wire.sendall(HELLO.pack(MAGIC, r.arena, r.arena_bytes, r.entries, len(mine)) + mine)
        said = read_exactly(self._wire, HELLO.size, until_s)
        if len(said) < HELLO.size:
            raise OverError("the other side went before it was ready; its log says why")
        magic, arena, arena_bytes, entries, n = HELLO.unpack(said)
        if magic != MAGIC or (arena_bytes, entries) != (r.arena_bytes, r.entries) or not 0 < n <= MOST_METADATA:
            raise OverError("what answers there speaks another protocol, or another version of this one")
        metadata = read_exactly(self._wire, n, until_s)
        if len(metadata) < n:
            raise OverError("the other side went before it was ready; its log says why")
        self._agent.meet(metadata, arena)
        self._wire.sendall(b".")
        if read_exactly(self._wire, 1, until_s) != b".":
            raise OverError("the other side did not take this one's metadata; its log says why")
        self._wire.setblocking(False)
        self._owner.setblocking(False)

    def run(self) -> None:
        """Until the session is over: raises OverError, ForgedError, AgentError, OSError."""
        poll = select.poll()
        for fd in (self._region.bell, self._wire.fileno(), self._owner.fileno()):
            poll.register(fd, select.POLLIN)
        moved_s = time.monotonic()
        while True:
            if self._carry() | self._hear():
                moved_s = time.monotonic()
                continue
            quiet_s = time.monotonic() - moved_s
            busy = self._expected > 0 or self._agent.under_way > 0
            if quiet_s < (_HOT_S if busy else _SPIN_S):
                if busy:
                    self._listen(poll, 0)
                os.sched_yield()
                continue
            if quiet_s > _FORGET_S:
                self._expected = 0
            if not busy and self._nods_off():
                continue
            self._listen(poll, _NAP_MS if busy or quiet_s < _AFTERMATH_S else _SLEEP_MS)
            self._wakes()
            if not busy and self._expected > 0:
                moved_s = time.monotonic()

    def _listen(self, poll: select.poll, timeout_ms: int) -> None:
        for fd, _ in poll.poll(timeout_ms):
            if fd == self._region.bell:
                with contextlib.suppress(BlockingIOError):
                    self._rings.recv(4096, socket.MSG_DONTWAIT)
            elif fd == self._wire.fileno():
                self._take_rings()
            else:
                raise OverError("")

    def _take_rings(self) -> None:
        with contextlib.suppress(BlockingIOError):
            said = self._wire.recv(4096)
            if not said:
                self._other_gone()
            self._expected += len(said)

    def _write(self, ranges: list[Range], note: bytes) -> None:
        self._agent.write(ranges, note)
        with contextlib.suppress(BlockingIOError):  # as many rings as a socket holds wake it as well
            self._wire.send(b".")

    def _number(self) -> int:
        self._sent += 1
        return self._sent - 1

    def _hear(self) -> bool:
        notes = self._agent.look()
        for note in notes:
            self._expected -= 1
            self._take(note)
        return bool(notes)

    def _other_gone(self) -> None:
        raise OverError("")

    def _carry(self) -> bool:
        """Whether the region had something for the other side."""
        raise NotImplementedError

    def _take(self, note: bytes) -> None:
        """What came from there, into the region."""
        raise NotImplementedError

    def _nods_off(self) -> bool:
        """The bell rings from now on.  True: something came meanwhile."""
        raise NotImplementedError

    def _wakes(self) -> None:
        """It need not any more."""

    def close(self) -> None:
        """The session is over on this side."""
        raise NotImplementedError


class NearRelay(Relay):
    """Stands for the server, before a client."""

    def __init__(self, region: Region, owner: socket.socket, wire: socket.socket) -> None:
        self._host = Host(region)
        self._in_flight: set[int] = set()
        self._request = Submission()
        super().__init__(region, owner, wire)

    def _carry(self) -> bool:
        s, any_ = self._request, False
        while self._host.take(s):
            any_ = True
            if s.kind == CANCEL:
                self._write([], request_note(self._number(), s))
            else:
                self._in_flight.add(s.id)
                self._write([*inputs(s)], request_note(self._number(), s))
        return any_

    def _take(self, note: bytes) -> None:
        number, answer = parse_answer(note)
        self._numbers.take(number)
        if answer.id not in self._in_flight:
            raise ForgedError("answer: got one to a request that is not in flight")
        self._in_flight.remove(answer.id)
        self._host.answer(answer)

    def _nods_off(self) -> bool:
        self._host.sleeps(True)
        return self._carry()

    def _wakes(self) -> None:
        self._host.sleeps(False)

    def _other_gone(self) -> None:
        """It rang for each answer before it went: those are still on their way."""
        until_s = time.monotonic() + _LAST_S
        with contextlib.suppress(AgentError):
            while self._expected > 0 and time.monotonic() < until_s:
                self._hear()
        raise OverError("")

    def close(self) -> None:
        self._host.end()


class FarRelay(Relay):
    """Stands for a client, before the engine's core."""

    def __init__(self, region: Region, owner: socket.socket, wire: socket.socket) -> None:
        self._client = Client(region)
        self._in_flight: dict[int, Submission] = {}  # by ticket, with the other side's id
        self._tickets: dict[int, int] = {}  # by that
        super().__init__(region, owner, wire)

    def _carry(self) -> bool:
        return self._answers(self._client.poll())

    def _answers(self, tickets: object) -> bool:
        any_ = False
        for ticket in list(tickets):  # type: ignore[call-overload]
            any_ = True
            answer, s = self._answer, self._in_flight.pop(ticket)
            self._client.answer(ticket, answer)
            self._client.release(ticket)
            del self._tickets[s.id]
            answer.id = s.id
            self._write([] if answer.refused or not s.tokens else [output(s)], answer_note(self._number(), answer))
        if not any_ and self._client.over:
            raise OverError("")
        return any_

    def _take(self, note: bytes) -> None:
        number, s = parse_request(note)
        self._numbers.take(number)
        if s.kind == CANCEL:
            if s.id in self._tickets:
                self._client.recall(self._tickets[s.id])
            return
        if s.id in self._tickets:
            raise ForgedError("request: got the id of one that is in flight")
        ticket = self._client.submit(s, announced=True)
        if not ticket:
            if self._client.over:
                raise OverError("")
            raise ForgedError(f"requests: got more than {self._region.entries} in flight, as many as a session holds")
        self._tickets[s.id], self._in_flight[ticket] = ticket, s

    def _nods_off(self) -> bool:
        return self._answers(self._client.drain())

    def close(self) -> None:
        """Answers that are there arrive, unless the other side is gone."""
        until_s = time.monotonic() + _LAST_S
        with contextlib.suppress(OverError, AgentError, OSError):
            while self._answers(self._client.poll()):
                pass
        with contextlib.suppress(AgentError):
            while self._agent.under_way and time.monotonic() < until_s:
                self._agent.look()
        self._client.end()


def main(role: str, *descriptors: str) -> int:
    owner, wire, bell = (socket.socket(fileno=int(fd)) for fd in descriptors)
    relay: Relay | None = None
    try:
        owner.settimeout(_MEET_S)
        region = Region.receive(owner, bell)
        relay = (NearRelay if role == NEAR else FarRelay)(region, owner, wire)
        relay.meet()
        owner.send(f"{READY}\n".encode())
        relay.run()
    except (OverError, ForgedError, AgentError, NixlMissingError, LibraryMissingError, RegionError, OSError) as e:
        with contextlib.suppress(OSError):
            owner.send(f"{e}\n".encode())
    finally:
        if relay is not None:
            relay.close()
    sys.stdout.flush()
    os._exit(0)  # NIXL's own end waits for peers that are gone; the kernel's does not


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
