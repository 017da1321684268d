"""What the other side of a session in shared memory can do to this one: to its threads, its deadlines, its other
sessions.  The hostile side is shm_attacker.py, a process that holds all that the protocol gives it."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from short import Shortage
from test_shm import MISSING, call, engine, enter, gone, leave, listener  # noqa: F401  fixtures
from waiting import until

from expertd.common import accepting
from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region, host_id
from expertd_server.transports.shm import ShmListener

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(180)]

WITHIN_S = 30.0


@contextlib.contextmanager
def attacker(*arguments, pass_fds=()):
    """Until it says that it is ready, and then killed."""
    program = Path(__file__).with_name("shm_attacker.py")
    child = subprocess.Popen(
        [sys.executable, str(program), *arguments], pass_fds=pass_fds, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def is_ready(child):
    assert select.select([child.stdout], [], [], WITHIN_S)[0]
    return child.stdout.readline() == "ready\n"


@pytest.mark.parametrize("how", ["fill", "half close", "punch", "forever"])
def test_a_hostile_client_stops_neither_the_others_nor_the_end(listener, engine, how):  # noqa: F811
    sock, region = enter(listener)
    good = Client(region)
    call(good)
    token, endpoint, why = listener.offer("attacker", host_id())
    assert not why
    with attacker("client", how, endpoint, token) as child:
        assert is_ready(child)
        begun = time.monotonic()
        for _ in range(5):
            call(good)
        assert time.monotonic() - begun < WITHIN_S
    gone(listener, engine, sessions=1)
    other, other_region = enter(listener)  # and new ones come
    client = Client(other_region)
    call(client)
    for s, c in ((sock, good), (other, client)):
        leave(s)
        c.end()
        c.close()
    assert engine.stop(WITHIN_S) is not False


def test_a_hostile_server_does_not_take_a_clients_deadline():
    ours, theirs = socket.socketpair()
    with ours, theirs, attacker("server", str(theirs.fileno()), pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        client = Client(Region.receive(ours))
        assert is_ready(child)
        took = []

        def calls():
            for _ in range(3):
                begun, ticket = time.monotonic(), client.submit(Submission(kind=layout.FORWARD))
                assert ticket
                assert not client.wait(ticket, Completion(), timeout_ns=200_000_000)
                client.abandon(ticket)
                took.append(time.monotonic() - begun)
            client.drain()

        thread = threading.Thread(target=calls, daemon=True)
        thread.start()
        thread.join(WITHIN_S)
        assert len(took) == 3
        assert not thread.is_alive()
        child.kill()
        until = time.monotonic() + WITHIN_S
        while not client.over:  # what it rang comes first, then its end
            client.drain()
            assert time.monotonic() < until
        client.end()
        client.close()


# ---- sessions are shared among callers -------------------------------------------------------------------------------


def test_one_caller_gets_half_of_the_sessions_and_another_one_still_gets_some(engine):  # noqa: F811
    listener = ShmListener(engine, arena_bytes=1 << 18, most_bytes=16 * layout.region_bytes(layout.ENTRIES, 1 << 18))  # noqa: F811
    listener.start()
    try:
        got = [listener.offer("greedy", host_id()) for _ in range(300)]
        assert sum(not why for *_, why in got) == 8
        assert "its share" in got[-1][2]
        assert not listener.offer("honest", host_id())[2]
    finally:
        listener.close()


def test_a_session_that_ends_gives_its_share_back(listener, engine):  # noqa: F811
    sessions = []
    while not (offer := listener.offer("one", host_id()))[2]:
        sessions.append(enter(listener, offer[0], offer[1]))
    assert sessions
    for sock, region in sessions:
        leave(sock)
        region.close()
    gone(listener, engine)
    assert not listener.offer("one", host_id())[2]


def test_no_descriptor_but_the_memory_is_given_to_a_client(listener):  # noqa: F811
    """What two processes have can be made blocking by either of them."""
    token, endpoint, _ = listener.offer("caller", host_id())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WITHIN_S)
        sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        sock.sendall(token.encode())
        _, fds, *_ = socket.recv_fds(sock, 64, 8)
        kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
        for fd in fds:
            os.close(fd)
    assert [kind.split()[0] for kind in kinds] == ["/memfd:expertd"]


# ---- a process that has no descriptor left ---------------------------------------------------------------------------


def test_without_descriptors_it_rests_and_serves_those_it_has(listener, engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(accepting, "REST_S", 3600)
    shortage = Shortage(monkeypatch)
    sock, region = enter(listener)
    leaving, left = enter(listener)
    _, endpoint, _ = listener.offer("attacker", host_id())
    shortage.lasts = True
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        until(lambda: shortage.asked)
        leave(leaving)
        left.close()
        gone(listener, engine, sessions=1)  # the listener's thread has looked again
        client = Client(region)
        call(client)
        assert shortage.asked == 1
    leave(sock)
    client.end()
    client.close()


def test_who_waited_for_a_descriptor_is_served(listener, monkeypatch):  # noqa: F811
    shortage = Shortage(monkeypatch)
    token, endpoint, _ = listener.offer("honest", host_id())
    shortage.lasts = True
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        sock.sendall(token.encode())
        until(lambda: shortage.asked)
        shortage.lasts = False
        sock.settimeout(WITHIN_S)
        Region.receive(sock).close()
