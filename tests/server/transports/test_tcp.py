"""Sessions over TCP: who may enter, many requests at once, a drain, and what is left behind."""

import contextlib
import fcntl
import gc
import os
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from core_library import needs_core
from listener_kit import BOUNDS, K, M, batch, call, gone
from short import NoThreads, Shortage
from tcp_kit import ARRAYS, HEAD, NUMBERS, Twin, dial, request
from waiting import until, until_inside

from expertd.common import accepting
from expertd.tcp.entry import ENTRY_BYTES, EntryError, enter
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.config.values import Address
from expertd_server.engine import core
from expertd_server.transports import tokens as tickets
from expertd_server.transports.tcp import TcpListener
from expertd_server.transports.tcp import listener as module

pytestmark = [needs_core, pytest.mark.timeout(60)]


def test_a_client_comes_calls_and_goes(listener):
    with Twin(listener) as peer:
        assert peer.most_bytes == BOUNDS.most_message
        for n in range(1, 20):
            answer = call(peer, n, 1 + n % M)
            assert answer.routes_computed == K * (1 + n % M)
            assert (answer.timing.backend, answer.timing.batch_requests) == ("doubles", 1)
            assert answer.timing.kernel_ns > 0
            assert not answer.load.draining
        assert listener.sessions == 1
    gone(listener)


@pytest.mark.parametrize("token", ["0" * 64, "z" * 64, "\x00" * 64, "f" * 64, " " * 64])
def test_a_token_that_is_not_valid_gets_nothing(listener, token, caplog):
    good, endpoint, _ = listener.offer("caller", "")
    with dial(endpoint) as sock:
        sock.settimeout(10)
        sock.sendall(b"expdtcp1" + token.encode())
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert listener.sessions == 0
    assert good not in caplog.text
    assert token not in caplog.text
    with Twin(listener) as peer:  # the next one is served
        call(peer)


def test_a_token_is_good_for_one_client_and_for_a_while(listener, monkeypatch):
    token, endpoint, _ = listener.offer("caller", "")
    with dial(endpoint) as first:
        enter(first, token, 10)
        with dial(endpoint) as second, pytest.raises((EntryError, ConnectionError)):
            enter(second, token, 10)
    late, *_ = listener.offer("caller", "")
    monkeypatch.setattr(tickets.time, "monotonic", (lambda now: lambda: now() + 11)(time.monotonic))
    with dial(endpoint) as sock, pytest.raises((EntryError, ConnectionError)):
        enter(sock, late, 10)


def test_who_says_nothing_or_something_else_is_sent_away(listener, monkeypatch):
    monkeypatch.setattr(module, "_ENTER_S", 0.2)
    _, endpoint, _ = listener.offer("caller", "")
    strangers = [dial(endpoint) for _ in range(10)]
    for n, sock in enumerate(strangers):
        sock.sendall([b"", b"expdtcp1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(72, b"\n")][n % 3])
    with Twin(listener) as peer:
        call(peer)
        for sock in strangers:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
            sock.close()
    gone(listener)


def test_so_many_may_be_entering_at_once(engine, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ENTERING", 2)
    monkeypatch.setattr(module, "_ENTER_S", 60)
    listener = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS)
    listener.start()
    try:
        _, endpoint, _ = listener.offer("caller", "")
        with dial(endpoint) as first, dial(endpoint) as second:
            with dial(endpoint) as third:
                assert third.recv(1) == b"", "no thread is left for it"
            for sock in (first, second):
                sock.sendall(b"x" * ENTRY_BYTES)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
        with Twin(listener) as peer:
            call(peer)
    finally:
        listener.close()


def test_sessions_are_bounded_and_a_draining_door_offers_nothing(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(Twin(listener))
        assert "no room for more" in listener.offer("caller", "")[2]
    gone(listener)
    listener.close()
    assert listener.offer("caller", "")[2] == "the server drains"


def test_requests_are_answered_by_their_numbers_and_more_than_the_bound_are_refused(listener, doubles):
    doubles.gate.clear()
    with Twin(listener) as peer:
        x, ids, w = batch(1)
        for n in range(1, 12):
            peer.send(request(n, x * n, ids, w))
        refused = [peer.receive() for _ in range(3)]
        assert {e.reason for e in refused} == {"TOO_MANY_REQUESTS_IN_FLIGHT"}
        assert [e.request_id for e in refused] == [9, 10, 11]
        assert all(e.retryable for e in refused)
        peer.send(request(4, x, ids, w))
        assert peer.receive().reason == "DUPLICATE_REQUEST_ID"
        doubles.gate.set()
        found = {a.request_id: np.frombuffer(a.output.raw, np.float32) for a in (peer.receive() for _ in range(8))}
        assert {n: np.array_equal(out, 3 * n * x[0]) for n, out in found.items()} == dict.fromkeys(range(1, 9), True)


def test_a_request_is_taken_back_and_its_number_is_free(listener, doubles):
    with Twin(listener) as peer:
        doubles.hold()
        x, ids, w = batch(1)
        peer.send(request(1, x, ids, w))
        doubles.until_held()  # it is computed, and the second waits
        peer.send(request(2, x, ids, w))
        for n in (2, 1, 77):
            peer.send(pb.CancelRequest(request_id=n))
        assert [(e.request_id, e.reason) for e in (peer.receive(), peer.receive())] == [
            (2, "CANCELLED"),
            (1, "CANCELLED"),
        ]
        doubles.gate.set()
        call(peer, 1)
        call(peer, 2)


def test_what_a_cancelled_request_is_computed_into_is_nobody_elses_memory(listener, engine, doubles):
    with Twin(listener) as peer:
        doubles.hold()
        peer.send(request(1, *batch(12, seed=1)))
        doubles.until_held()
        peer.send(pb.CancelRequest(request_id=1))
        assert peer.receive().reason == "CANCELLED"
        x, ids, w = batch(3, seed=2)
        peer.send(request(2, x, ids, w))  # read, and to be answered, while the first one is computed
        until(lambda: engine.load().queued_requests)
        doubles.gate.set()
        answer = peer.receive()
        assert np.array_equal(np.frombuffer(answer.output.raw, np.float32).reshape(x.shape), 3 * x)


def test_each_answer_is_counted_once_by_its_reason(listener, engine):
    with Twin(listener) as peer:
        for n in range(1, 4):
            call(peer, n)
        peer.send(request(4, *batch(), layer=3))
        assert peer.receive().reason == "LAYER_NOT_HELD"
        counts = dict(zip(core.REASONS, engine._core.answered(), strict=True))
        assert {reason: n for reason, n in counts.items() if n} == {"": 3, "LAYER_NOT_HELD": 1}


def test_a_request_has_its_time(listener, engine, doubles):
    with Twin(listener) as peer:
        doubles.hold()
        peer.send(request(1, *batch(1)))
        doubles.until_held()
        peer.send(request(2, *batch(1), timeout_us=500_000))
        peer.send(request(3, *batch(1)))
        until(lambda: engine.load().queued_requests >= 2)  # so the second has come, too, and may be refused by now
        time.sleep(0.5)
        doubles.gate.set()
        said = {m.request_id: m for m in (peer.receive() for _ in range(3))}
        assert said[2].reason == "DEADLINE_EXCEEDED"
        assert said[1].routes_computed == said[3].routes_computed == K


def test_a_drain_answers_what_was_taken(listener, engine, doubles):
    with Twin(listener) as peer:
        doubles.hold()
        peer.send(request(1, *batch()))
        doubles.until_held()
        engine.drain()
        peer.send(request(2, *batch()))
        assert peer.receive().reason == "DRAINING"
        drained = []
        thread = threading.Thread(target=lambda: drained.append(listener.drain(time.monotonic() + 60)))
        thread.start()
        until_inside(thread, "drain")
        assert not drained
        doubles.gate.set()
        assert peer.receive().routes_computed == 3 * K
        thread.join(60)
        assert drained == [True]
        assert peer.receive() is None


def test_a_socket_that_a_starting_child_has_a_copy_of_is_watched_no_more(engine):
    """The core would hear of it, and look for a session that is not there."""
    peers = engine.open_tcp_connections(BOUNDS)
    ours, theirs = socket.socketpair()
    fd = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 700)  # a number that nothing else gets meanwhile
    with ours, theirs:
        handle = peers.add(fd, "caller")
        until(lambda: fd in watched())
        theirs.close()
        until(lambda: handle in peers.gone())
        assert fd not in watched()


def watched():
    """Descriptors that epolls of this process tell of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
                found |= {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
    return found


def test_no_thread_and_no_socket_is_left_behind(engine):
    gc.collect()  # engines of other tests have descriptors
    before = len(os.listdir("/proc/self/fd"))
    listener = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS)
    listener.start()
    after = len(os.listdir("/proc/self/fd"))
    peers = [Twin(listener) for _ in range(3)]
    for peer in peers:
        call(peer)
    listener.close()
    assert listener.sessions == 0
    for peer in peers:
        assert peer.ended()
        peer.close()
    assert after - len(os.listdir("/proc/self/fd")) == 2, "the listener, and what woke the thread"
    assert before < after
    assert not [t for t in threading.enumerate() if t.name.startswith("expertd-tcp")]


assert ARRAYS.keys() == NUMBERS.keys()
assert struct.calcsize("<4sIII") == HEAD.size


# ---- a process that has nothing left for one more --------------------------------------------------------------------


def test_without_descriptors_it_rests_and_serves_those_it_has(listener, monkeypatch):
    monkeypatch.setattr(accepting, "REST_S", 3600)
    shortage = Shortage(monkeypatch)
    _, endpoint, _ = listener.offer("caller", "")
    with Twin(listener) as staying, Twin(listener) as leaving:
        shortage.lasts = True
        with dial(endpoint):
            until(lambda: shortage.asked)
            call(leaving)
            leaving.close()
            gone(listener, 1)  # the listener's thread has looked again
            call(staying)
            assert shortage.asked == 1


def test_who_waited_for_a_descriptor_is_served(listener, monkeypatch):
    shortage = Shortage(monkeypatch)
    token, endpoint, _ = listener.offer("caller", "")
    shortage.lasts = True
    with dial(endpoint) as sock:
        until(lambda: shortage.asked)
        shortage.lasts = False
        enter(sock, token, 10)
        until(lambda: listener.sessions == 1)


def test_without_threads_it_refuses_and_goes_on(engine, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ENTERING", 2)
    listener = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS)
    listener.start()
    try:
        short = NoThreads(monkeypatch, "_enter")
        _, endpoint, _ = listener.offer("caller", "")
        for _ in range(3):
            with dial(endpoint) as sock, contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert short.asked == 3
        short.lasts = False
        with Twin(listener) as peer:
            call(peer)
    finally:
        listener.close()
