"""How callers get their region: tokens, who may come, who goes, and what is left behind."""

import contextlib
import ctypes as C
import gc
import multiprocessing
import os
import signal
import socket
import time

import numpy as np
import pytest
import torch
from waiting import until

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, Submission
from expertd.shm.library import LibraryMissingError
from expertd.shm.library import library as client_library
from expertd.shm.region import Region, RegionError, host_id, supported
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.transports import tokens as tickets
from expertd_server.transports.shm import ShmListener
from expertd_server.transports.shm import listener as module

try:
    library()
    client_library()
    MISSING = supported()
except (CoreMissingError, LibraryMissingError) as e:
    MISSING = str(e)

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

H = 32


class Doubles:
    """out = x * the weights' sum"""

    backend = "doubles"

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        return out.copy_(hidden_states * topk_weights.sum(1, keepdim=True))


@pytest.fixture
def engine():
    e = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=16))
    e.hold([ServedLayer(0, 4, (0, 1, 2, 3), 2, H, 8, Doubles(), "doubles")])
    e.start()
    e.open()
    yield e
    e.stop(10)


@pytest.fixture
def listener(engine):
    d = ShmListener(engine, arena_bytes=1 << 18, most_bytes=4 << 20)
    d.start()
    yield d
    d.close()


def enter(listener, token=None, endpoint=""):
    """(socket, region) as a client."""
    if not endpoint:
        good, endpoint, why = listener.offer("caller", host_id())
        assert not why
        token = good if token is None else token
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
    try:
        sock.sendall(token.encode())
        return sock, Region.receive(sock)
    except BaseException:
        sock.close()
        raise


def call(client, tokens=3):
    """One request; its output is checked."""
    x = np.random.default_rng(0).integers(1, 9, (tokens, H)).astype(np.float32)
    ids, w = np.zeros((tokens, 2), np.int32), np.full((tokens, 2), 1.5, np.float32)
    s = Submission(tokens=tokens, top_k=2, kind=1, hidden_dtype=1, ids_dtype=5, weights_dtype=1, out_dtype=1)
    for name, array in (("hidden", x), ("ids", ids), ("weights", w), ("out", np.zeros_like(x))):
        offset = client.take(array.nbytes)
        client.region.view(offset, array.nbytes)[:] = array.tobytes()
        setattr(s, name, offset)
    answer = Completion()
    ticket = client.submit(s)
    assert client.wait(ticket, answer, 10**10)
    assert not answer.refused, (answer.reason, answer.text)
    out = np.frombuffer(bytes(client.region.view(s.out, x.nbytes)), np.float32).reshape(x.shape)
    assert np.array_equal(out, x * 3)
    for name in ("hidden", "ids", "weights", "out"):
        client.give(getattr(s, name))
    client.release(ticket)


def gone(listener, engine, sessions=0):
    until = time.monotonic() + 10
    while listener.sessions != sessions or len(engine.shm_connections) != sessions:
        assert time.monotonic() < until, (listener.sessions, len(engine.shm_connections))
        time.sleep(0.005)


def leave(sock):
    """The server sees it at once: the region has the socket, too."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def test_a_client_comes_calls_and_goes(listener, engine):
    sock, region = enter(listener)
    client = Client(region)
    for tokens in (1, 16, 5):
        call(client, tokens)
    assert listener.sessions == 1
    leave(sock)
    gone(listener, engine)
    client.end()
    client.close()


def test_another_host_and_an_unknown_one_are_told_why_not(listener):
    for host in ("", "other/123"):
        token, endpoint, why = listener.offer("caller", host)
        assert (token, endpoint) == ("", "")
        assert "host" in why


@pytest.mark.parametrize("token", ["0" * 64, "z" * 64, "\x00" * 64, "x" * 100])
def test_a_token_that_is_not_valid_gets_nothing(listener, engine, token):
    with pytest.raises(Exception, match=r"session: got 0 bytes|reset"):
        enter(listener, token)
    assert listener.sessions == 0
    sock, region = enter(listener)  # the next one is served
    leave(sock)
    region.close()


def test_a_token_is_good_for_one_client(listener):
    token, endpoint, _ = listener.offer("caller", host_id())
    sock, region = enter(listener, token)
    with pytest.raises(Exception, match=r"session: got 0 bytes|reset"):
        enter(listener, token)
    leave(sock)
    region.close()
    assert "\0" not in endpoint
    assert token not in endpoint


def test_a_token_is_forgotten_after_a_while(listener, monkeypatch):
    token, *_ = listener.offer("caller", host_id())
    monkeypatch.setattr(tickets.time, "monotonic", (lambda now: lambda: now() + 11)(time.monotonic))
    with pytest.raises(Exception, match=r"session: got 0 bytes|reset"):
        enter(listener, token)


def test_clients_that_say_nothing_are_sent_away(listener, engine, monkeypatch):
    monkeypatch.setattr(module, "_HELLO_S", 0.1)
    _, endpoint, _ = listener.offer("caller", host_id())
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for sock in silent:
        sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        sock.sendall(b"half")
    sock, region = enter(listener)
    client = Client(region)
    call(client)
    for s in silent:
        s.settimeout(10)
        assert s.recv(1) == b""
        s.close()
    leave(sock)
    gone(listener, engine)
    client.end()
    client.close()


def test_memory_of_all_sessions_is_bounded(listener):
    with contextlib.ExitStack() as stack:
        for n in range(100):
            token, _, why = listener.offer(f"caller {n}", host_id())
            if why:
                break
            sock, region = enter(listener, token, listener._endpoint)
            stack.callback(region.close)
            stack.callback(leave, sock)
        assert "used up" in why
        assert 2 <= listener.sessions <= 10


def test_a_draining_door_offers_nothing(listener):
    listener.close()
    assert listener.offer("caller", host_id())[2] == "the server drains"


def hammer(sock, region):
    client = Client(region)
    while True:
        call(client)


def test_clients_killed_at_any_moment_leave_nothing_and_hurt_nobody(listener, engine):
    def facts():
        gc.collect()  # engines of other tests have descriptors
        return len(os.listdir("/proc/self/fd"))

    good_sock, good_region = enter(listener)
    good = Client(good_region)
    call(good)
    before = facts()
    for n in range(12):
        sock, region = enter(listener)
        child = multiprocessing.get_context("fork").Process(target=hammer, args=(sock, region))
        child.start()
        sock.close()
        region.close()
        time.sleep(0.01 * (n % 5))
        call(good)
        os.kill(child.pid, signal.SIGKILL)
        child.join(10)
        child.close()
        call(good)
        gone(listener, engine, sessions=1)
    until(lambda: facts() == before)
    leave(good_sock)
    gone(listener, engine)
    good.end()
    good.close()


def test_too_many_connections_are_refused_for_that_reason(engine, caplog):
    """One user's connections, of which the listener holds two: the third is closed, and the log says why."""
    listener = ShmListener(engine, arena_bytes=1 << 18, most_guests=2)
    listener.start()
    socks = [enter(listener) for _ in range(2)]
    with caplog.at_level("WARNING"):
        with pytest.raises((OSError, RegionError)):
            enter(listener)
        until(lambda: caplog.messages)
    refused = "shared memory: refused a connection: 2 are open, with and without a session, want fewer"
    assert caplog.messages == [refused]
    for sock, region in socks:
        leave(sock)
        region.close()
    listener.close()


def test_a_closing_door_ends_sessions_and_clients_see_it(engine):
    listener = ShmListener(engine, arena_bytes=1 << 18)
    listener.start()
    sock, region = enter(listener)
    client = Client(region)
    call(client)
    listener.close()
    assert sock.recv(1) == b""
    until = time.monotonic() + 20
    while client.submit(Submission(kind=1)):
        assert time.monotonic() < until
        time.sleep(0.01)
    leave(sock)
    client.end()
    client.close()


# ---- hostile clients -------------------------------------------------------------------------------------------------


def garble(region, rng, frames, entries=256):
    """Submissions of random fields, some half right; then random words over the control page, the rings and the
    arena."""
    memory = np.frombuffer(region.view(-layout.arena_offset(entries), region.bytes), np.uint8)
    ring = (Submission * entries).from_address(region.address + layout.PAGE)
    word = memory[: layout.PAGE].view(np.uint64)
    for n in range(frames):
        s = ring[n % entries]
        raw = np.ctypeslib.as_array((C.c_uint8 * C.sizeof(Submission)).from_address(C.addressof(s)))
        raw[8:] = rng.integers(0, 256, len(raw) - 8, np.uint8)
        if rng.random() < 0.9:
            s.layer, s.tokens, s.top_k = 0, int(rng.integers(0, 20)), int(rng.integers(0, 6))
            s.kind, s.flags = int(rng.integers(0, 5)), int(rng.integers(0, 2))
            s.deadline_ns = 0 if rng.random() < 0.8 else int(rng.integers(0, 1 << 62))
            for name in ("hidden", "ids", "weights", "out"):
                setattr(s, name, int(rng.integers(0, 1 << 18)) & ~15)
            for name in ("hidden_dtype", "ids_dtype", "weights_dtype", "out_dtype"):
                setattr(s, name, int(rng.integers(0, 8)))
        s.seq = n + 1
        if rng.random() < 0.02:
            os.write(region.bell, b".")
        if rng.random() < 0.01:  # what it has sent changes while it is read
            at = int(rng.integers(0, len(memory) - 8))
            memory[at : at + 8] = rng.integers(0, 256, 8, np.uint8)
        if n % entries == entries - 1:
            time.sleep(0.001)
    word[rng.integers(0, len(word), 32)] = rng.integers(0, 1 << 63, 32, np.uint64)
    os.write(region.bell, b".")


FRAMES = int(os.environ.get("EXPERTD_FUZZ_FRAMES", "4000"))
"""Of all hostile sessions together; 100000 for the long form."""


def test_garbled_rings_hurt_nobody_else(listener, engine):
    good_sock, good_region = enter(listener)
    good = Client(good_region)
    call(good)
    gc.collect()  # engines of other tests have descriptors
    fds = len(os.listdir("/proc/self/fd"))
    for seed in range(8):
        sock, region = enter(listener)
        garble(region, np.random.default_rng(seed), FRAMES // 8)
        call(good)
        leave(sock)
        region.close()
        gone(listener, engine, sessions=1)
    call(good, 16)
    assert len(os.listdir("/proc/self/fd")) == fds
    leave(good_sock)
    gone(listener, engine)
    good.end()
    good.close()
