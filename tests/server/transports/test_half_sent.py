"""What is held of messages that are not whole: counted from what the kernel and the calls say, and judged."""

from __future__ import annotations

import os
import socket

import pytest

from expertd_server.transports.half_sent import STALL_S, Connection, _address, verdicts
from expertd_server.transports.tcp_info import Connected, Sockets, peer_of

MB = 1_000_000


def connection(received: int = 0, whole: int = 0, calls: int = 1, now_s: float = 0.0) -> Connection:
    c = Connection(None, now_s)
    c.calls, c.whole = calls, whole
    c.look(received, now_s)
    return c


def test_what_came_and_is_not_whole_is_held():
    c = connection(received=5 * MB, whole=2 * MB)
    assert c.held == 3 * MB
    c.whole += 3 * MB
    c.look(5 * MB, 0.0)
    assert c.held == 0


def test_more_than_came_is_no_credit_for_what_comes():
    c = connection(received=100, whole=MB)
    c.look(100 + 2 * MB, 0.0)
    assert c.held == 2 * MB


def test_a_second_costs_pings():
    c = connection(now_s=5000.0)
    c.look(2000, 5001.0)
    assert c.held == 2000 - 1024


def test_where_no_call_is_open_nothing_is_held():
    c = connection(received=5 * MB)
    c.unsure = True
    c.calls = 0
    c.look(6 * MB, 0.0)
    assert (c.held, c.unsure) == (0, False)
    c.calls = 1
    c.look(6 * MB + 10, 0.0)
    assert c.held == 10


@pytest.mark.parametrize("unsure", [False, True])
def test_what_does_not_grow_stalls(unsure):
    c = connection(received=2 * MB)
    c.unsure = unsure
    assert not c.stalls(STALL_S)
    c.look(2 * MB + 60_000, STALL_S + 0.1)
    assert c.stalls(STALL_S + 0.1) is not unsure


def test_nor_what_trickles():
    c, received, now_s = connection(received=2 * MB), 2 * MB, 0.0
    while now_s < 6 * STALL_S:
        received, now_s = received + 200_000, now_s + 1
        c.look(received, now_s)
        assert not c.stalls(now_s)
    c.look(received + 200_000, now_s + 1)
    assert c.stalls(now_s + 1)


def test_messages_that_come_whole_go_on():
    """One message after the other, and never none begun."""
    c, received, now_s = connection(received=2 * MB), 2 * MB, 0.0
    for _ in range(int(7 * STALL_S)):
        received, now_s = received + 2 * MB, now_s + 1
        c.whole += 2 * MB
        c.look(received, now_s)
        assert not c.stalls(now_s)
    c.whole += 1000  # is not worth naming
    c.look(received + 1000, now_s + 6 * STALL_S + 1)
    assert c.stalls(now_s + 6 * STALL_S + 1)


def test_little_never_stalls():
    assert not connection(received=MB).stalls(1000.0)


def test_one_connection_alone_may_hold_the_limit():
    assert verdicts([connection(received=8 * MB)], 8 * MB, 0.0) == []
    alone = connection(received=8 * MB + 1, now_s=5000.0)
    assert verdicts([alone], 8 * MB, 5000.0) == [(alone, "half-sent messages hold too much")]


def test_all_together_hold_four_thirds_and_the_longest_goes_first():
    many = [connection(received=2 * MB) for _ in range(8)]
    for n, c in enumerate(many):
        c._whole_s = float(n)
    gone = [c for c, _ in verdicts(many, 8 * MB, 9.0)]
    assert gone == many[:3], "2 + 3 x 10 fits 32, and 2 + 3 x 12 does not"


def test_what_stalls_goes_first_and_is_counted_no_more():
    stalled, other = connection(received=8 * MB), connection(received=8 * MB, now_s=STALL_S)
    later = STALL_S + 0.5
    assert verdicts([other, stalled], 8 * MB, later) == [(stalled, "half-sent messages do not go on")]


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:192.0.2.1:5000", ("192.0.2.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", ("fe80::1", 5000)),
        ("unix:/tmp/x", None),
        ("unix:", None),
    ],
)
def test_grpcs_names_of_peers(name, peer):
    assert _address(name) == peer


def test_ipv4_in_ipv6_is_ipv4():
    assert peer_of("::ffff:192.0.2.1", 1) == ("192.0.2.1", 1)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as s, socket.create_connection(s.getsockname()) as here:
        there, _ = s.accept()
        with there:
            there.settimeout(5)
            here.settimeout(5)
            yield here, there


def test_the_kernel_says_what_came(pair):
    here, there = pair
    port = there.getsockname()[1]
    here.sendall(bytes(70_000))
    got = 0
    while got < 70_000:
        got += len(there.recv(1 << 20))
    found = Sockets().connected(port)
    assert found == {here.getsockname(): Connected(there.fileno(), os.fstat(there.fileno()).st_ino, 70_000)}


def test_a_connection_is_shut_and_no_other_that_has_its_number(pair):
    here, there = pair
    (c,) = Sockets().connected(there.getsockname()[1]).values()
    Sockets.shut(c._replace(inode=c.inode + 1))
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    Sockets.shut(c)
    assert here.recv(1) == b""
    assert there.fileno() == c.fd, "it is its owner's to close"
