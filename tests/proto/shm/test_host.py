"""The server's side of a region without a server: csrc/host.cpp."""

import os
import select
import socket
import threading

import pytest

from expertd.shm.client import Client
from expertd.shm.host import Host
from expertd.shm.layout import CANCEL, FORWARD, Completion, Submission
from expertd.shm.library import LibraryMissingError, library
from expertd.shm.region import Region, supported
from expertd.shm.tickets import SessionEndedError


def _missing():
    try:
        library()
    except LibraryMissingError as e:
        return str(e)
    return supported()


MISSING = _missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(30)]


@pytest.fixture
def sides():
    """(host, client) of one region's memory."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = Region.create(1 << 16, 4)
        made.ring_by(ours)
        host = Host(made)
        made.send(ours)
        client = Client(Region.receive(theirs))
        yield host, client
        client.end()
        client.close()
        host.close()


def test_requests_come_in_turn_and_answers_go_to_those_that_asked(sides):
    host, client = sides
    tickets = [client.submit(Submission(kind=FORWARD, layer=n), announced=True) for n in range(4)]
    assert client.submit(Submission(kind=FORWARD)) == 0, "four are in flight"
    taken = []
    for n in range(4):
        s = Submission()
        assert host.take(s)
        assert (s.layer, s.id) == (n, tickets[n])
        taken.append(s.id)
    assert not host.take(Submission())
    for n in (2, 0, 3, 1):
        host.answer(Completion(id=taken[n], routes_computed=n, name=b"b", text=b"t", refused=n == 3))
    found = {}
    while len(found) < 4:
        for ticket in list(client.poll()):
            answer = Completion()
            client.answer(ticket, answer)
            found[ticket] = (answer.routes_computed, answer.refused)
            client.release(ticket)
    assert found == {tickets[n]: (n, int(n == 3)) for n in range(4)}
    for n in range(40):  # the rings go round
        ticket = client.submit(Submission(kind=FORWARD), announced=True)
        s = Submission()
        assert host.take(s)
        host.answer(Completion(id=s.id, routes_computed=n))
        assert list(client.poll()) == [ticket]
        client.release(ticket)


def test_a_recalled_request_is_answered_all_the_same(sides):
    host, client = sides
    ticket, s = client.submit(Submission(kind=FORWARD), announced=True), Submission()
    client.recall(ticket)
    assert host.take(s)
    assert s.kind == FORWARD
    assert host.take(s)
    assert (s.kind, s.id) == (CANCEL, ticket)
    host.answer(Completion(id=ticket, refused=1, name=b"CANCELLED"))
    assert list(client.poll()) == [ticket]


def test_who_sleeps_is_rung_for_once_and_the_end_is_seen(sides):
    host, client = sides
    host.sleeps(True)
    for _ in range(2):
        client.submit(Submission(kind=FORWARD))
    assert os.read(host.region.bell, 8) == b"\0"
    host.sleeps(False)
    client.submit(Submission(kind=FORWARD))
    assert not select.select([host.region.bell], [], [], 0)[0]
    s = Submission()
    assert host.take(s)
    ended = []

    def waits():
        with pytest.raises(SessionEndedError):
            client.wait(s.id, Completion(), 20 * 10**9)
        ended.append(1)

    waiter = threading.Thread(target=waits)
    waiter.start()
    host.end()
    waiter.join(20)
    assert ended
    assert client.over
