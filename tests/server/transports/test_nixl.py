"""Sessions over NIXL: peers that forge, say garbage or are killed end, and hurt nobody else.  What is the same for all
ways beside the stream is in tests/client/transports/test_beside.py."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from beside_kit import Sums, Transport, inputs, missing, needs_nixl, summing_engine
from waiting import until

from expertd.errors import UnavailableError
from expertd.nixl.agent import Agent, AgentError
from expertd.nixl.notes import parse_answer, request_note
from expertd.nixl.relay import HELLO, MAGIC, MOST_METADATA
from expertd.shm.layout import CANCEL, FORWARD, Submission
from expertd.tcp.entry import enter, read_exactly
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient
from expertd_client.transports.nixl.session import NixlChannel
from expertd_server.config.values import Address
from expertd_server.engine.peers import PeerBounds
from expertd_server.transports.nixl import NixlEngine
from expertd_server.transports.tcp import TcpDoor

MISSING = missing()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"),
    needs_nixl,
    pytest.mark.timeout(120),
]

ARENA = 1 << 20
ENTRIES = 256


@contextlib.contextmanager
def opened(sums, **more):
    """(engine, door)"""
    engine = summing_engine(sums)
    engine.start()
    engine.open()
    relays = NixlEngine(engine, local=True)
    door = TcpDoor(relays, Address("127.0.0.1", 0), PeerBounds(ARENA), name="NIXL", **more)
    door.start()
    try:
        yield engine, door
    finally:
        sums.gate.set()
        door.close()
        engine.stop(10)


@pytest.fixture(scope="module")
def backend():
    return Sums()


@pytest.fixture(scope="module")
def served(backend):
    with opened(backend) as both:
        yield both
    until(lambda: not relays())


@pytest.fixture(scope="module")
def engine(served):
    return served[0]


@pytest.fixture(scope="module")
def door(served):
    return served[1]


@pytest.fixture(scope="module")
def other(door):
    """A client whom the others' deeds do not concern."""
    with connected(door) as client:
        yield client


@pytest.fixture
def sums(backend):
    yield backend
    backend.gate.set()


@pytest.fixture(autouse=True)
def nobody_else(door, other):
    """Before and after each test."""
    until(lambda: door.sessions == 1)
    yield
    right(other, 7)
    until(lambda: door.sessions == 1)
    until(lambda: len(relays()) == 2)


def connected(door):
    client = ExpertClient(Transport(door.offer, NixlChannel("127.0.0.1:1")), timeout_s=30)
    assert client.session(timeout_s=30).transport == "nixl", client.session()
    return client


def right(client, seed=0):
    args, want = inputs(5, seed=seed)
    assert np.allclose(client.forward(0, *args).output, want, rtol=1e-2)


def relays(role="", of=None):
    """Processes of relays that `of` started, by default this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"expertd.nixl.relay" in words and role.encode() in [*words[3:4], b""] and parent == (of or os.getpid()):
            found.append(int(folder.name))
    return found


class Peer:
    """A client that says what it likes: the other half of a FarRelay, in this process."""

    def __init__(self, door, hello=None):
        self.agent, self.heard = None, []
        token, endpoint, why = door.offer("forger", "")
        assert not why
        self.sock = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 10)
        assert enter(self.sock, token, 10) == ARENA
        if hello is not None:
            self.sock.sendall(hello)
            return
        self.memory = np.zeros(ARENA, np.uint8)
        self.agent = Agent(self.memory.ctypes.data, ARENA)
        mine = self.agent.metadata
        self.sock.sendall(HELLO.pack(MAGIC, self.memory.ctypes.data, ARENA, ENTRIES, len(mine)) + mine)
        until_s = time.monotonic() + 20
        _, address, _, _, n = HELLO.unpack(read_exactly(self.sock, HELLO.size, until_s))
        self.agent.meet(read_exactly(self.sock, n, until_s), address)
        self.sock.sendall(b".")
        assert read_exactly(self.sock, 1, until_s) == b"."

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.sock.close()

    def say(self, note):
        self.agent.write([], note)
        self.sock.sendall(b".")

    def look(self):
        """Which carries on what was said, too."""
        self.heard += self.agent.look()

    def hear(self):
        """The next notification."""
        until(lambda: self.look() or self.heard)
        return self.heard.pop(0)

    def ended(self):
        """Whether the session ends within seconds."""
        self.sock.settimeout(0.001)
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            if self.agent is not None:
                with contextlib.suppress(AgentError):
                    self.look()
            try:
                if not self.sock.recv(4096):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False


def forward(number, **more):
    f32, i32 = pb.DATA_TYPE_F32, pb.DATA_TYPE_I32
    s = Submission(kind=FORWARD, id=number + 1, tokens=1, top_k=2, hidden_size=32, ids=256, weights=512, out=768)
    s.hidden_dtype, s.ids_dtype, s.weights_dtype, s.out_dtype = f32, i32, f32, f32
    for name, value in more.items():
        setattr(s, name, value)
    return request_note(number, s)


def test_offsets_outside_of_the_region_are_the_requests_error_alone(door):
    with Peer(door) as peer:
        for number, wrong in enumerate(
            ({"out": ARENA}, {"hidden": 2**64 - 16}, {"ids": ARENA - 16 + 1}, {"weights": 8}, {"out": ARENA - 16})
        ):
            peer.say(forward(number, **wrong))
            _, answer = parse_answer(peer.hear())
            assert answer.refused
            assert b"outside of the session's memory" in answer.text
        peer.say(forward(5, tokens=2**32 - 1))
        assert b"got 4294967295 tokens" in parse_answer(peer.hear())[1].text
        peer.say(forward(6, hidden_size=64))
        assert b"got rows of 64" in parse_answer(peer.hear())[1].text
        peer.say(forward(7))
        number, answer = parse_answer(peer.hear())
        assert (number, answer.id, answer.refused) == (7, 8, 0)


@pytest.mark.parametrize(
    "notes",
    [
        [b"garbage"],
        [b""],
        [forward(0)[:-1]],
        [forward(0), forward(0, id=9)],  # the number again
        [forward(0), forward(1, id=1)],  # the id of one in flight
        [forward(1 << 40)],
        [forward(0, kind=4)],
        [forward(n) for n in range(ENTRIES + 1)],  # more than there are places
    ],
    ids=["garbage", "empty", "short", "repeated", "same id", "far ahead", "prepare", "too many"],
)
def test_forged_notifications_end_their_session_alone(door, sums, notes):
    with Peer(door) as peer:
        sums.gate.clear()
        for note in notes:
            peer.say(note)
        assert peer.ended()


def hello(metadata=b"x" * 300, magic=MAGIC, arena=ARENA, entries=ENTRIES, n=None):
    return HELLO.pack(magic, 4096, arena, entries, len(metadata) if n is None else n) + metadata


@pytest.mark.parametrize(
    "said",
    [
        hello(),
        hello(np.random.default_rng(0).bytes(1000)),
        hello(b"nixlSerDes|" + bytes(200)),
        hello(magic=b"expnixl0"),
        hello(arena=1 << 40),
        hello(entries=1),
        hello(n=MOST_METADATA + 1),
        hello(n=0),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_garbage_instead_of_metadata_ends_its_session_alone(door, said):
    with Peer(door, said) as peer:
        peer.sock.shutdown(socket.SHUT_WR)
        assert peer.ended()


def test_a_token_that_was_used_or_made_up_is_refused(door):
    token, endpoint, _ = door.offer("me", "")
    port = int(endpoint.rpartition(":")[2])
    for wrong in ("0" * 64, token[::-1]):
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(b"expdtcp1" + wrong.encode())
            assert read_exactly(sock, 1, time.monotonic() + 5) == b""
    assert len(relays("far")) == door.sessions == 1


@pytest.mark.parametrize("role", ["near", "far"])
def test_a_relay_that_is_killed_ends_its_session_and_no_other(door, sums, role):
    before = set(relays(role))
    with connected(door) as client:
        mine = set(relays(role)) - before
        sums.gate.clear()
        futures = [client.submit(0, *inputs(2)[0]) for _ in range(5)]
        os.kill(mine.pop(), signal.SIGKILL)
        for future in futures:
            with pytest.raises(UnavailableError, match="ended the session"):
                future.result(20)
        until(lambda: client.session().transport == "inline")
        assert "broke" in client.session().refused["nixl"]
        sums.gate.set()


CLIENT = """
import sys, time
from beside_kit import Transport, inputs
from expertd_client import ExpertClient
from expertd_client.transports.nixl.session import NixlChannel
print("up", flush=True)
token, endpoint = sys.stdin.readline().split()
client = ExpertClient(Transport(lambda caller, host: (token, endpoint, ""), NixlChannel("127.0.0.1:1")))
assert client.session(timeout_s=30).transport == "nixl", client.session()
futures = [client.submit(0, *inputs(2)[0]) for _ in range(8)]
print("in flight", flush=True)
time.sleep(60)
"""


def test_a_client_that_is_killed_leaves_nothing(door, sums, engine):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", CLIENT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            sums.gate.clear()
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            print(*door.offer("killed", "")[:2], file=process.stdin, flush=True)
            assert process.stdout.readline() == "in flight\n"
            near = relays("near", process.pid)
            assert near
        finally:
            process.kill()
    sums.gate.set()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in near))
    until(engine.idle)


def test_a_cancel_reaches_the_server():
    """What waits there is not computed; what nobody asked for is passed over."""
    sums = Sums()
    with opened(sums) as (engine, door), Peer(door) as peer:
        sums.gate.clear()
        peer.say(forward(0))
        until(lambda: peer.look() or engine.load().queued_requests == 1)  # and it computes, until the gate opens
        peer.say(forward(1))
        until(lambda: peer.look() or engine.load().queued_requests == 2)
        peer.say(request_note(2, Submission(kind=CANCEL, id=99)))
        peer.say(request_note(3, Submission(kind=CANCEL, id=2)))
        until(lambda: peer.look() or engine.load().queued_requests == 1)
        sums.gate.set()
        answers = [parse_answer(peer.hear())[1] for _ in range(2)]
        assert {a.id: a.name for a in answers}[2] == b"CANCELLED"


def test_answers_that_are_ready_arrive_though_the_server_closes():
    """Its relay is stopped while they are computed, and goes on when the session is over."""
    sums, before = Sums(), set(relays("far"))
    with opened(sums) as (engine, door), connected(door) as client:
        calls = [inputs(5, seed=n) for n in range(6)]
        far = (set(relays("far")) - before).pop()
        sums.gate.clear()
        futures = [client.submit(0, *args) for args, _ in calls]
        until(lambda: engine.load().queued_requests == len(calls))
        os.kill(far, signal.SIGSTOP)
        closing, ended = threading.Thread(target=door.close), select.poll()
        ended.register(door._peers._relays[1].owner, 0)
        try:
            sums.gate.set()
            until(engine.idle)
            closing.start()
            until(lambda: ended.poll(0))
        finally:
            os.kill(far, signal.SIGCONT)
        for future, (_, want) in zip(futures, calls, strict=True):
            assert np.allclose(future.result(20).output, want, rtol=1e-2)
        closing.join(20)


def test_without_room_the_reason_says_so():
    with opened(Sums(), most_sessions=1) as (_, door):
        assert door.offer("one", "")[2] == ""
        assert "the server has 1 sessions over NIXL" in door.offer("two", "")[2]
