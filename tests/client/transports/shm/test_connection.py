"""ExpertClient over shared memory: what it alone has (test_beside.py has the rest), against the real listener and
engine; the gRPC in between is a function."""

import asyncio
import contextlib
import secrets
import socket
import threading
import time

import numpy as np
import pytest
import torch
from connection_kit import E, H, Sums, Transport, inputs, missing, summing_engine

from expertd.errors import BadShapeError, DeadlineExceededError, ExpertIdOutOfRangeError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient, ExpertCluster
from expertd_client.cluster import cluster as cluster_module
from expertd_client.transports.shm import connection as shm
from expertd_client.transports.shm import entry
from expertd_client.transports.shm.connection import AsyncShmTransport, ShmTransport
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.shm import ShmListener

MISSING = missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def client(sums):
    engine = summing_engine(sums)
    engine.start()
    engine.open()
    listener = ShmListener(engine, arena_bytes=1 << 18)
    listener.start()
    c = ExpertClient(Transport(listener.offer, ShmTransport()))
    c.listener, c.engine = listener, engine
    assert c.session().transport == "shm"
    yield c
    sums.gate.set()
    c.close()
    listener.close()
    engine.stop(10)


@pytest.mark.parametrize(
    ("endpoint", "token"),
    [
        ("unix-abstract:{name}", "0" * 64),  # any other listener of the host
        ("unix-abstract:expertd-{hex}", "GET / HTTP/1.0\r\n\r\n"),
        ("unix-abstract:expertd-{hex}", "0" * 63 + "\n"),
        ("unix-abstract:expertd-{hex}\0x", "0" * 64),
    ],
)
def test_a_server_directs_nobody_at_other_sockets(endpoint, token):
    """Nothing is sent where the endpoint or the token has another form."""
    digits = secrets.token_hex(16)
    names = [f"expertd-{digits}", f"expertd-{digits}\0x"] if "{hex}" in endpoint else [f"someone-{digits}"]
    for name in names:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen(1)
            listener.setblocking(False)
            answer = pb.SessionAnswer(endpoint=endpoint.format(name=name, hex=digits), token=token)
            with pytest.raises(UnavailableError, match="another"):
                shm.enter_session(answer)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_process_of_another_user_gets_no_token(monkeypatch):
    digits = secrets.token_hex(16)
    monkeypatch.setattr(entry.os, "getuid", lambda: 1234)
    monkeypatch.setattr(entry, "peer_uid", lambda sock: 4321)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0expertd-{digits}")
        listener.listen(1)
        with pytest.raises(UnavailableError, match="another user"):
            shm.enter_session(pb.SessionAnswer(endpoint=f"unix-abstract:expertd-{digits}", token="0" * 64))
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(100) == b"", "nothing was sent"


def test_a_full_backlog_is_waited_for():
    """A Unix socket says EAGAIN at once."""
    digits = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(f"\0expertd-{digits}")
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(f"\0expertd-{digits}")
        full = stack.enter_context(socket.socket(socket.AF_UNIX))
        full.setblocking(False)
        with pytest.raises(BlockingIOError):
            full.connect(f"\0expertd-{digits}")
        got = []

        def serve():
            for n in range(2):
                accepted, _ = listener.accept()
                with accepted:
                    got.append(accepted.recv(100) if n else b"")

        thread = threading.Timer(0.1, serve)
        thread.start()
        with pytest.raises(UnavailableError, match="got 0 bytes"):
            shm.enter_session(pb.SessionAnswer(endpoint=f"unix-abstract:expertd-{digits}", token="0" * 64))
        thread.join(20)
        assert got == [b"", b"0" * 64]


@pytest.mark.parametrize("how", ["does not accept", "has a full backlog", "says nothing"])
def test_a_server_that_lets_nobody_in_is_left(how, monkeypatch):
    monkeypatch.setattr(entry, "_CONNECT_S", 0.2)
    digits = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(f"\0expertd-{digits}")
        listener.listen(0)
        if how == "has a full backlog":
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0expertd-{digits}")
        elif how == "says nothing":
            threading.Thread(target=lambda: stack.enter_context(listener.accept()[0]), daemon=True).start()
        raised = []

        def enters():
            try:
                shm.enter_session(pb.SessionAnswer(endpoint=f"unix-abstract:expertd-{digits}", token="0" * 64))
            except UnavailableError as e:
                raised.append(str(e))

        thread = threading.Thread(target=enters, daemon=True)
        thread.start()
        thread.join(20)
        assert len(raised) == 1, "it waits for ever"
        assert raised[0].startswith("shared memory: ")


def test_an_answer_names_its_backend(client, sums):
    """Also where the completion's place held an error before, and where a plan has several."""
    (x, ids, w), _ = inputs(3)
    assert client.forward(0, x, ids, w).timing.backend == "sums"
    assert client.submit(0, x, ids, w).result(20).timing.backend == "sums"
    slot = client.slot(*x.shape, ids.shape[1], "f32")
    slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x, ids, w
    slot.forward(0)
    assert slot.timing.backend == "sums"
    for _ in range(300):  # more than the ring has places
        with pytest.raises(ExpertIdOutOfRangeError):
            client.forward(0, x, ids + E, w)
    assert client.forward(0, x, ids, w).timing.backend == "sums"
    long = "a name that is longer than the thirty-five bytes there are"
    plan = ((2, "few"), (None, long))
    client.engine.hold([ServedLayer(0, E, tuple(range(E)), 2, H, 8, sums, "sums", plan=plan)])
    assert client.forward(0, x[:2], ids[:2], w[:2]).timing.backend == "few"
    assert client.forward(0, x, ids, w).timing.backend == long[:35]


def test_many_threads_share_a_session(client):
    wrong = []

    def caller(seed):
        args, want = inputs(3, seed=seed)
        wrong.extend(n for n in range(50) if not np.allclose(client.forward(0, *args).output, want, rtol=1e-2))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- a cluster of one ------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(client):
    with ExpertCluster(["door"], transport=lambda address: Transport(client.listener.offer, ShmTransport())) as made:
        made.forward(0, *inputs(2)[0])
        [made.member] = made._members.by_address.values()
        yield made


def test_a_cluster_of_one_server_asks_it_on_the_callers_thread(cluster, monkeypatch):
    monkeypatch.setattr(cluster_module, "start", None)  # nothing flies
    for seed in range(20):
        kind = "numpy" if seed % 2 else "torch"
        args, want = inputs(1 + seed % 9, kind, seed=seed)
        answer = cluster.forward(0, *args)
        assert np.allclose(np.asarray(answer.output), want, rtol=1e-2)
        assert type(answer.output) is type(args[0])
        part = answer.parts[0]
        routed = int((np.asarray(args[1]) >= 0).any(1).sum())
        assert (part.server, part.tokens, part.routes) == ("door", routed, answer.routes_computed)
        del answer
    out = np.full((4, H), np.nan, np.float32)
    args, want = inputs(4)
    assert cluster.forward(0, *args, out=out).output is out
    assert np.allclose(out, want, rtol=1e-2)
    assert cluster.member.outstanding == 0
    assert cluster.member.exchange._link.session_connection._client.blocks == 0


def test_a_cluster_of_one_server_says_what_that_says_and_goes_on(cluster, sums):
    (x, ids, w), want = inputs(3)
    with pytest.raises(BadShapeError):
        cluster.forward(0, x[:, : H // 2].copy(), ids, w)
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        cluster.forward(0, x, ids, w, timeout_s=0.05)
    sums.gate.set()
    assert np.allclose(cluster.forward(0, x, ids, w, timeout_s=10).output, want, rtol=1e-2)
    assert cluster.member.outstanding == 0


def test_a_session_that_ends_fails_over_to_what_is_left(cluster, client):
    client.listener.close()
    with pytest.raises(UnavailableError):  # the inline way of these tests answers nothing
        cluster.forward(0, *inputs(3)[0], timeout_s=2)
    assert cluster.member.outstanding == 0


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_sent_again_and_again_without_a_copy(client):
    slot = client.slot(5, H, 2, "f32")
    way = client._exchange._link.session_connection
    for seed in range(20):
        (x, ids, w), want = inputs(5, seed=seed)
        slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x, ids, w
        slot.output[:] = np.nan
        output = slot.forward(0, timeout_s=20)
        assert output is slot.output
        assert np.allclose(output, want, rtol=1e-2)
        assert slot.routes_computed == int((ids >= 0).sum())
        assert slot.timing.batch_requests == 1
    assert way._client.blocks == 1
    kept = slot.output[2:]
    del slot, output
    assert way._client.blocks == 1, "somebody still reads it"
    del kept
    assert way._client.blocks == 0


def test_a_slot_tells_of_refusals_and_deadlines_and_goes_on(client, sums):
    slot = client.slot(3, H, 2, "f32")
    (x, ids, w), want = inputs(3)
    slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x, ids, w
    slot.topk_ids[1, 0] = 99
    with pytest.raises(ExpertIdOutOfRangeError, match="got 99"):
        slot.forward(0)
    slot.topk_ids[:] = ids
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        slot.forward(0, timeout_s=0.05)
    sums.gate.set()
    assert np.allclose(slot.forward(0, timeout_s=20), want, rtol=1e-2)


def test_a_slot_of_other_rows_than_the_layers_is_refused(client):
    slot = client.slot(3, 2 * H, 2, "f32")
    slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = 1, 0, 1
    with pytest.raises(BadShapeError, match=rf"got \[3, {2 * H}\], want \[M, {H}\]"):
        slot.forward(0, timeout_s=20)


def test_a_slot_outlives_its_session(client):
    slot = client.slot(3, H, 2, "f32")
    (x, ids, w), _ = inputs(3)
    slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x, ids, w
    client.listener.close()
    until = time.monotonic() + 10
    while client.session().transport == "shm" and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(UnavailableError, match=r"^inline$"):
        slot.forward(0)
    assert np.array_equal(slot.hidden_states, x), "its memory is still there"


def test_what_a_call_prepares_goes_where_it_is_refused_or_too_late(client, sums):
    (x, ids, w), want = inputs(3)
    x, ids, w = map(torch.from_numpy, (x, ids, w))
    way = client._exchange._link.session_connection
    for _ in range(3):
        with pytest.raises(ExpertIdOutOfRangeError):
            client.forward(0, x, ids + E, w)
        assert (way._client.blocks, way._client.taken, way._users) == (0, 0, 1)
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        client.forward(0, x, ids, w, timeout_s=0.05)
    sums.gate.set()
    with client.forward(0, x, ids, w, timeout_s=20) as answer:
        assert np.allclose(answer.output, want, rtol=1e-2)
    assert way._users == 1


def test_a_call_is_expected_until_the_session_is_over(client, monkeypatch):
    way, rung = client._exchange._link.session_connection, []
    monkeypatch.setattr(way._client, "expect", lambda: rung.append(1))
    client.expect()
    assert (rung, way._users) == ([1], 1)
    client.listener.close()
    until = time.monotonic() + 10
    while client.session().transport == "shm" and time.monotonic() < until:
        time.sleep(0.01)
    client.expect()
    way.expect()
    client.close()
    client.expect()
    assert rung == [1]


# ---- no room ---------------------------------------------------------------------------------------------------------


def test_what_finds_no_room_travels_inline(client):
    args, want = inputs(64)
    kept = []
    while len(kept) < 100 and not client._transport.inline.asked:
        with contextlib.suppress(UnavailableError):
            kept.append(client.forward(0, *args).output)
    assert 2 <= len(kept) < 100
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.submit(0, *args).result(10)
    kept.clear()
    assert np.allclose(client.forward(0, *args).output, want, rtol=1e-2), "there is room again"
    assert client._transport.inline.asked == 2


# ---- threads that wait for themselves, and a reader beside them ------------------------------------------------------


# ---- in an event loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["while it connects", "when it has connected"])
def test_a_loop_that_ends_while_a_session_is_entered_leaves_no_socket(monkeypatch, when):
    entering, goes_on, closed = threading.Event(), threading.Event(), []

    class Closes:
        def __init__(self, name):
            self.close = lambda: closed.append(name)
            self.end = lambda: None

    def enter_session(answer):
        entering.set()
        assert goes_on.wait(10)
        return Closes("socket"), Closes("region")

    monkeypatch.setattr(shm, "enter_session", enter_session)
    channel = AsyncShmTransport()

    async def ends_early():
        channel.open(None, *[lambda *a: pytest.fail("nobody is left to be told")] * 3)
        await asyncio.sleep(0)
        assert await asyncio.to_thread(entering.wait, 10)
        if when == "when it has connected":
            goes_on.set()
            time.sleep(0.1)  # the loop is told, and has no turn before it ends
        else:
            asyncio.get_running_loop().call_soon(threading.Timer(0.1, goes_on.set).start)

    asyncio.run(ends_early())
    assert set(closed) == {"socket", "region"}
