"""Peers that forge, trickle, claim, do not read, or are killed: they end, and hurt nobody else."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from core_library import needs_core
from listener_kit import BOUNDS, E, H, K, M, batch, call, gone
from tcp_kit import HEAD, Twin, dial, request
from waiting import until

from expertd.codec import encode_stream_request
from expertd.tcp.entry import enter
from expertd_server.config.values import Address
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.transports.tcp import TcpListener

pytestmark = [needs_core, pytest.mark.timeout(60)]


@pytest.fixture
def patient(engine):
    """A listener that gives half a frame a minute."""
    d = TcpListener(engine, Address("127.0.0.1", 0), TcpBounds(64 << 10, 64 << 10, half_s=60))
    d.start()
    yield d
    d.close()


@pytest.mark.parametrize(
    "head",
    [
        {"magic": b"exf2"},
        {"sequence": 0},
        {"sequence": 3},
        {"length": 0},
        {"length": BOUNDS.most_message + 1},
        {"length": 2**32 - 1},
    ],
)
def test_a_forged_head_ends_its_session_alone(patient, head):
    """At once: not because its frame does not grow."""
    with Twin(patient) as other, Twin(patient) as peer:
        call(peer)
        x, ids, w = batch()
        peer.send_bytes(encode_stream_request(request(2, x, ids, w)), **head)
        assert peer.ended()
        gone(patient, sessions=1)
        call(other)


def test_half_a_frame_goes_in_time_and_hurts_nobody(listener):
    data = encode_stream_request(request(1, *batch()))
    with Twin(listener) as other, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(Twin(listener)) for _ in range(8)]
        for n, peer in enumerate(halves):
            peer.sock.sendall(peer.frame(data)[: 1 + 9 * n])
        call(other)
        for peer in halves:
            assert peer.ended()
        gone(listener, sessions=1)
        call(other, 2)


def test_a_frame_that_trickles_does_not_live_for_ever(engine):
    listener = TcpListener(engine, Address("127.0.0.1", 0), TcpBounds(64 << 10, half_s=0.2))
    listener.start()
    try:
        with Twin(listener) as peer:
            frame = peer.frame(encode_stream_request(request(1, *batch())))
            trickled = 0
            with contextlib.suppress(ConnectionError):
                for byte in frame:
                    peer.sock.sendall(bytes([byte]))
                    trickled += 1
                    time.sleep(0.1)
            assert 1 <= trickled < len(frame) / 2, "it has some time, and not all that it takes"
            gone(listener)
    finally:
        listener.close()


def test_claimed_lengths_are_bounded_over_all_sessions_and_leave_room(listener):
    """Each claims the largest message and sends none of it: together they may not have more than the bound."""
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(Twin(listener)) for _ in range(11)]
        for peer in greedy:
            peer.sock.sendall(HEAD.pack(b"exf1", BOUNDS.most_message, 1, 0))
        with Twin(listener) as honest:
            call(honest, tokens=M)
        gone(listener)


def test_one_that_claims_all_room_leaves_some_for_another_one(patient):
    with Twin(patient) as greedy, Twin(patient) as honest:
        greedy.sock.sendall(HEAD.pack(b"exf1", 64 << 10, 1, 0) + b"x")
        for n in range(1, 6):  # the first may be read before the claim
            call(honest, n)


def test_a_reader_that_stops_is_read_no_further_and_cut_off(listener, engine):
    """It has thousands of answers unread; another session is served meanwhile."""
    with Twin(listener) as other, Twin(listener) as peer:
        x, ids, w = batch(1)
        frame = encode_stream_request(request(1, x, ids, w, layer=3))  # refused: small answers
        sent, sending = 0, time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < sending:
                peer.send_bytes(frame)
                sent += 1
                if sent % 500 == 0:
                    call(other, sent)
        assert time.monotonic() < sending, "it is read without end"
        call(other, 1)
        gone(listener, sessions=1)
        until(lambda: not listener._tcp_connections.unwritten)  # a drain waits for no answer that nobody will read
    assert engine.load().queued_requests == 0


def test_a_slow_reader_gets_everything(listener):
    """Answers that the socket does not take at once."""
    with Twin(listener) as peer:
        x, ids, w = batch(M)
        got = []

        def read():
            time.sleep(0.1)  # the answers of meanwhile fill the socket
            got.extend(peer.receive() for _ in range(400))

        reader = threading.Thread(target=read)
        reader.start()
        for n in range(1, 401):
            peer.send(request(n, x, ids, w, layer=3))
        reader.join(20)
        assert sorted(e.request_id for e in got) == list(range(1, 401))
        assert {e.reason for e in got} <= {"LAYER_NOT_HELD", "TOO_MANY_REQUESTS_IN_FLIGHT"}


def hammer(endpoint, token):
    peer = Twin.__new__(Twin)
    peer.sock, peer.sent, peer.received = dial(endpoint), 0, 0
    enter(peer.sock, token, 10)
    n = 0
    while True:
        n += 1
        peer.send(request(n, *batch(M)))


def test_clients_killed_at_any_moment_leave_nothing_and_hurt_nobody(listener, engine):
    with Twin(listener) as good:
        call(good)
        gc.collect()  # engines of other tests have descriptors
        before = len(os.listdir("/proc/self/fd"))
        for n in range(10):
            token, endpoint, _ = listener.offer("caller", "")
            child = multiprocessing.get_context("fork").Process(target=hammer, args=(endpoint, token))
            child.start()
            time.sleep(0.01 + 0.01 * (n % 5))
            call(good, 2 * n + 2)
            os.kill(child.pid, signal.SIGKILL)
            child.join(10)
            child.close()
            call(good, 2 * n + 3)
            gone(listener, sessions=1)
        until(lambda: engine.load().queued_requests == 0)
        until(lambda: len(os.listdir("/proc/self/fd")) == before)


FRAMES = int(os.environ.get("EXPERTD_FUZZ_FRAMES", "4000"))
"""Of all hostile sessions together; 100000 for the long form."""


def garbled(rng, peer, n):
    """A frame of which something is wrong, mostly in the message."""
    tokens = int(rng.integers(0, M + 2))
    x, ids, w = np.ones((tokens, H)), rng.integers(-2, E + 1, (tokens, K)), np.ones((tokens, K))
    r = request(n, x, ids, w, hidden=rng.choice(["f32", "f16"]), layer=int(rng.integers(0, 2)))
    r.timeout_us = int(rng.choice([0, 1, 10**6]))
    data = bytearray(encode_stream_request(r))
    for _ in range(int(rng.integers(0, 4))):
        at = int(rng.integers(0, min(len(data), 80)))
        data[at] = int(rng.integers(0, 256))
    if rng.random() < 0.1:
        data = data[: int(rng.integers(1, len(data) + 1))]
    if rng.random() < 0.05:
        data = bytearray(rng.integers(0, 256, int(rng.integers(1, 300)), np.uint8).tobytes())
    frame = bytearray(peer.frame(bytes(data), lead=int(rng.integers(0, 1 << 32))))
    if rng.random() < 0.002:
        frame[int(rng.integers(0, HEAD.size))] ^= 1 << int(rng.integers(0, 8))
    return bytes(frame)


def test_garbled_frames_hurt_nobody_else(listener, engine):
    with Twin(listener) as good:
        call(good)
        gc.collect()  # engines of other tests have descriptors
        fds = len(os.listdir("/proc/self/fd"))
        left, seed = FRAMES, 0
        while left > 0:
            seed += 1
            rng = np.random.default_rng(seed)
            with Twin(listener) as peer:
                peer.sock.setblocking(False)
                for _ in range(min(left, 500)):
                    left -= 1
                    try:
                        frame, sent = garbled(rng, peer, left + 1), 0
                        end_s = time.monotonic() + 5
                        while sent < len(frame) and time.monotonic() < end_s:
                            with contextlib.suppress(BlockingIOError):
                                sent += peer.sock.send(frame[sent:])
                            with contextlib.suppress(BlockingIOError):
                                if not peer.sock.recv(1 << 16):
                                    raise ConnectionResetError
                    except ConnectionError:
                        break
            call(good, seed + 1)
        gone(listener, sessions=1)
        until(lambda: len(os.listdir("/proc/self/fd")) == fds)
    until(lambda: engine.load().queued_requests == 0)
