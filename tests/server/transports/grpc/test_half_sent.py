"""What is held of messages that are not whole: counted from what the kernel and the calls say, and judged."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import grpc
import pytest

from expertd_server.transports.grpc import tcp_info
from expertd_server.transports.grpc.half_sent import MESSAGE_S, STALL_S, Connection, HalfSent, _address, verdicts
from expertd_server.transports.grpc.tcp_info import Connected, Sockets, peer_of

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


@pytest.mark.parametrize("size", [2 * MB, 2 * MB // 15])
def test_messages_that_come_whole_go_on(size):
    """One message after the other, and never none begun."""
    c, received, now_s = connection(received=2 * MB), 2 * MB, 0.0
    for _ in range(int(7 * STALL_S)):
        received, now_s = received + size, now_s + 1
        c.whole += size
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


class Context:
    """grpc.aio's, whose caller sends `messages` and then nothing more."""

    def __init__(self, *messages) -> None:
        self.messages, self.status = list(messages), None

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5000"

    def invocation_metadata(self):
        return None

    async def read(self):
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def write(self, data) -> None: ...

    async def abort(self, code, details, metadata=()) -> None:
        self.status = code
        raise AbortedError


class AbortedError(Exception):
    pass


async def one(inner, context: Context, read=None) -> tuple[HalfSent, Connection, asyncio.Task]:
    """A call of one message, begun."""
    front = HalfSent(None, MB)
    handler = front._wrapped(grpc.unary_unary_rpc_method_handler(inner, read))
    call = asyncio.create_task(handler.stream_unary(None, context))
    await asyncio.sleep(0)
    (found,) = front._connections.values()
    return front, found, call


async def echo(data, context) -> bytes:
    return data


async def test_a_call_of_one_message_has_it_counted():
    _, c, call = await one(echo, Context(b"x" * 64_000))
    assert await call == b"x" * 64_000
    assert c.calls == 0
    assert 64_000 + 64_000 // 128 + 64_000 // 64 < c.whole < 64_000 + 64_000 // 128 + 64_000 // 64 + 2000
    assert not c.unsure


async def test_a_message_that_does_not_come_ends_its_call_with_a_reason():
    context = Context()
    front, c, call = await one(echo, context)
    front._give_up(time.monotonic() + MESSAGE_S - 1)
    await asyncio.sleep(0)
    assert c.calls == 1
    front._give_up(time.monotonic() + MESSAGE_S + 1)
    with pytest.raises(AbortedError):
        await call
    assert context.status is grpc.StatusCode.UNAVAILABLE
    assert (c.calls, c.unsure) == (0, True)


async def test_so_does_a_caller_who_leaves_but_nobody_is_told():
    context = Context()
    _, c, call = await one(echo, context)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (context.status, c.calls, c.unsure) == (None, 0, True)


@pytest.mark.parametrize("messages", [(grpc.aio.EOF,), (b"not a number",)])
async def test_no_message_and_one_that_cannot_be_read_are_refused(messages):
    context = Context(*messages)
    _, _, call = await one(echo, context, read=int)
    with pytest.raises(AbortedError):
        await call
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("messages", "unsure"), [((b"xyz", grpc.aio.EOF), False), ((b"xyz",), True)])
async def test_a_stream_that_ends_before_its_caller_did_leaves_a_rest(messages, unsure):
    front, got = HalfSent(None, MB), []

    async def inner(_, context) -> None:
        for _ in messages:
            got.append(await context.read())

    await front._wrapped(grpc.stream_stream_rpc_method_handler(inner)).stream_stream(None, Context(*messages))
    (c,) = front._connections.values()
    assert got == list(messages)
    assert c.whole > 3
    assert (c.calls, c.unsure) == (0, unsure)


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


def test_a_connection_that_is_looked_at_ends_when_its_owner_closes_it(pair, monkeypatch):
    """A second descriptor, however short-lived, would keep it open and in its owner's epoll."""
    here, there = pair
    copies = []
    monkeypatch.setattr(os, "dup", lambda fd: copies.append(fd) or fd)
    monkeypatch.setattr(socket.socket, "dup", lambda s: copies.append(s) or s)
    with tcp_info._borrowed(there.fileno(), os.fstat(there.fileno()).st_ino) as its:
        assert its.fileno() == there.fileno()
        there.close()
        assert here.recv(1) == b""
    assert not copies
    Sockets().connected(here.getsockname()[1])
    assert not copies


def test_a_connection_is_shut_and_no_other_that_has_its_number(pair):
    here, there = pair
    (c,) = Sockets().connected(there.getsockname()[1]).values()
    Sockets.shut(c._replace(inode=c.inode + 1))
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    Sockets.shut(c)
    assert here.recv(1) == b""
    assert there.fileno() == c.fd, "it is its owner's to close"
