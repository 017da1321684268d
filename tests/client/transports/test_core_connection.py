"""ExpertClient over shared memory and TCP: what is the same, against the real listeners and the real engine; the gRPC
in between is a function."""

import asyncio
import gc
import os
import sys
import threading
import time

import numpy as np
import pytest
import torch
from connection_kit import Sums, Transport, inputs, missing, summing_engine, way
from waiting import until

from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    UnavailableError,
)
from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.requests.e4m3 import quantize
from expertd_client.transports.shm.connection import AsyncShmTransport, ShmTransport
from expertd_client.transports.tcp.connection import AsyncTcpTransport, TcpTransport
from expertd_server.config.values import Address
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.transports.shm import ShmListener
from expertd_server.transports.tcp import TcpListener

MISSING = missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

WHERE = "127.0.0.1:1"


@pytest.fixture(params=["shm", "tcp"])
def name(request):
    return request.param


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def engine(sums):
    engine = summing_engine(sums, max_tokens=4096)
    engine.start()
    engine.open()
    yield engine
    sums.gate.set()
    engine.stop(10)


@pytest.fixture
def listener(engine, name):
    if name == "shm":
        listener = ShmListener(engine, arena_bytes=8 << 20)
    else:
        listener = TcpListener(engine, Address("127.0.0.1", 0), TcpBounds(8 << 20))
    listener.start()
    yield listener
    listener.close()


def connected(listener, name):
    channel = ShmTransport() if name == "shm" else TcpTransport(WHERE)
    client = ExpertClient(Transport(listener.offer, channel))
    assert client.session(timeout_s=30).transport == name, client.session()
    return client


def loop_channel(name):
    return AsyncShmTransport() if name == "shm" else AsyncTcpTransport(WHERE)


@pytest.fixture
def client(listener, name):
    with connected(listener, name) as client:
        yield client


def test_answers_are_right_in_numpy_and_torch(client):
    for seed in range(40):
        kind = "numpy" if seed % 2 else "torch"
        args, want = inputs(1 + seed % 9, kind, seed=seed)
        answer = client.forward(0, *args)
        assert np.allclose(np.asarray(answer.output), want, rtol=1e-2)
        assert answer.routes_computed == int((np.asarray(args[1]) >= 0).sum())
        assert answer.timing.batch_requests == 1
        assert answer.timing.kernel_ns > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("output", ["f32", "bf16", "f16"])
def test_every_dtype_comes_and_goes(client, dtype, output):
    (x, ids, w), want = inputs(5, "torch")
    answer = client.forward(0, x.to(dtype), ids.long(), w.to(dtype), output_dtype=output)
    assert answer.output.dtype == {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[output]
    assert np.allclose(answer.output.float().numpy(), want, rtol=1e-2)


def test_hidden_states_as_e4m3_with_scales(client):
    (x, ids, w), want = inputs(9)
    answer = client.forward(0, quantize(x), ids, w, output_dtype="f32")
    assert np.allclose(answer.output, want, rtol=0.07, atol=0.01)
    assert client._transport.inline.asked == 0


@pytest.mark.parametrize("tokens", [1, 700, 4096])
def test_large_messages_and_small_ones(client, tokens):
    """What does not go at once, waited for and submitted."""
    args, want = inputs(tokens)
    for _ in range(3):
        futures = [client.submit(0, *args) for _ in range(4)]
        assert np.allclose(client.forward(0, *args).output, want, rtol=1e-2)
        for f in futures:
            assert np.allclose(f.result(20).output, want, rtol=1e-2)
        del futures, f


def test_an_output_is_the_callers_to_write_to_and_goes_back_with_its_last_view(client):
    args, want = inputs(8)
    kept = []
    for _ in range(5):
        answer = client.forward(0, *args)
        answer.output += 1
        kept.append(answer.output[2:4])
        del answer
    assert all(np.allclose(rows, want[2:4] + 1, rtol=1e-2) for rows in kept)
    assert way(client)._client.taken == 5
    del kept
    assert way(client)._client.taken == 0


def test_an_output_outlives_its_session(client):
    args, want = inputs(8)
    answer = client.forward(0, *args)
    client.close()
    assert np.allclose(answer.output, want, rtol=1e-2)


def test_waiting_callers_and_futures_share_the_session(client, sums):
    wrong = []

    def waits(seed):
        args, want = inputs(2, seed=seed)
        wrong.extend(n for n in range(60) if not np.allclose(client.forward(0, *args).output, want, rtol=1e-2))

    def submits(seed):
        args, want = inputs(400 * (seed % 2) + 2, seed=seed)
        for n in range(20):
            futures = [client.submit(0, *args) for _ in range(3)]
            wrong.extend(n for f in futures if not np.allclose(f.result(20).output, want, rtol=1e-2))

    threads = [threading.Thread(target=f, args=(i,)) for i, f in enumerate((waits, submits) * 3)]
    for t in threads:
        t.start()
    time.sleep(0.02)
    sums.gate.clear()  # everybody sleeps
    time.sleep(0.1)
    sums.gate.set()
    for t in threads:
        t.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_an_error_of_the_server_is_the_same_row_as_inline(client, engine):
    (x, ids, w), _ = inputs(3)
    ids[1, 0] = 99
    with pytest.raises(ExpertIdOutOfRangeError, match=r"topk_ids\[1, 0\].*got 99"):
        client.forward(0, x, ids, w)
    ids[1, 0] = -1
    with pytest.raises(LayerNotHeldError, match="layer: got 5"):
        client.submit(5, x, ids, w).result(10)
    engine.drain()
    with pytest.raises(DrainingError):
        client.forward(0, x, ids, w)


def test_what_does_not_fit_travels_inline(client):
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *inputs(2)[0], digest=True)
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *inputs(70_000)[0])  # larger than the region, or than the server's messages
    assert client._transport.inline.asked == 2


def test_a_deadline_ends_a_request_and_its_place_comes_back_when_the_server_has_answered(client, sums):
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        client.forward(0, *inputs(2)[0], timeout_s=0.05)
    assert way(client)._client.taken == 1, "the server may still read there"
    future = client.submit(0, *inputs(2)[0])
    assert future.cancel()
    sums.gate.set()
    client.forward(0, *inputs(1)[0])
    until(lambda: way(client)._client.taken == 0)


def test_a_server_that_goes_fails_what_is_in_flight_and_what_comes_later_travels_inline(client, sums, listener, name):
    sums.gate.clear()
    failed = []

    def waits():
        with pytest.raises(UnavailableError, match="ended the session"):
            client.forward(0, *inputs(2)[0])
        failed.append(1)

    waiter = threading.Thread(target=waits)
    waiter.start()
    future = client.submit(0, *inputs(2)[0])
    until(lambda: way(client)._client.taken == 2)
    listener.close()
    with pytest.raises(UnavailableError, match="ended the session"):
        future.result(10)
    waiter.join(10)
    assert failed
    sums.gate.set()
    until(lambda: client.session().transport == "inline")
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *inputs(2)[0])
    assert "broke" in client.session().refused[name]


def test_a_stream_that_ends_first_fails_who_waits_with_what_may_be_tried_again(client, sums):
    """A server that is killed ends both; whoever waits in the session must not hear that this client was closed."""
    sums.gate.clear()
    future, failed = client.submit(0, *inputs(2)[0]), []

    def waits():
        with pytest.raises(UnavailableError, match="reset"):
            client.forward(0, *inputs(2)[0])
        failed.append(1)

    waiter = threading.Thread(target=waits)
    waiter.start()
    until(lambda: way(client)._client.taken == 2)
    client._exchange._transport.inline.closed(UnavailableError("connection reset"))
    waiter.join(10)
    sums.gate.set()
    assert failed
    with pytest.raises(UnavailableError, match="reset"):
        future.result(10)


def test_an_idle_session_sees_its_end(client, listener):
    client.forward(0, *inputs(2)[0])
    listener.close()
    until(lambda: client.session().transport == "inline")


def test_sessions_leave_no_descriptors(client, listener, name):
    gc.collect()  # engines of other tests have descriptors
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with connected(listener, name) as c:
            c.forward(0, *inputs(2)[0])
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_loop_has_its_own_way(listener, name):
    channel = loop_channel(name)
    async with AsyncExpertClient(Transport(listener.offer, channel)) as c:
        assert (await c.session(timeout_s=30)).transport == name
        for seed, most in enumerate((8, 8, 2000)):
            calls = [inputs(1 + n * most // 8, seed=seed) for n in range(8)]
            answers = await asyncio.gather(*(c.forward(0, *args) for args, _ in calls))
            for answer, (_, want) in zip(answers, calls, strict=True):
                assert np.allclose(answer.output, want, rtol=1e-2)
        with pytest.raises(ExpertIdOutOfRangeError):
            await c.forward(0, inputs(1)[0][0], np.array([[99, 0]], np.int32), np.ones((1, 2), np.float32))
        await asyncio.to_thread(listener.close)
        for _ in range(500):
            if (await c.session()).transport == "inline":
                break
            await asyncio.sleep(0.01)
        assert "broke" in (await c.session()).refused[name]


async def test_a_loop_looks_by_itself_for_answers_that_come_soon_and_not_for_others(listener, name, sums, monkeypatch):
    """A quick answer is found without the bell; one that takes longer than looking is worth is waited for."""
    channel = loop_channel(name)
    async with AsyncExpertClient(Transport(listener.offer, channel)) as c:
        assert (await c.session(timeout_s=30)).transport == name
        connection, args = c._opened[1]._link.session_connection, inputs(2)[0]
        looked, poll = [0], connection._client.poll

        def counted():
            looked[0] += 1
            return poll()

        monkeypatch.setattr(connection._client, "poll", counted)
        connection._usual_ns = 0
        await c.forward(0, *args)
        assert looked[0] > 0
        connection._usual_ns, looked[0] = 10**9, 0
        await c.forward(0, *args)
        assert looked[0] == 0
        assert connection._usual_ns < 10**9, "it learns that they are quick again"
        connection._usual_ns = 0
        sums.gate.clear()
        slow = asyncio.ensure_future(c.forward(0, *args))
        quiet = 0
        while quiet < 20:  # pytest ends it where it does not go to sleep
            at = looked[0]
            await asyncio.sleep(0.005)
            quiet = quiet + 1 if looked[0] == at else 0
        assert not slow.done()
        sums.gate.set()
        await slow


@pytest.mark.parametrize(("kind", "most"), [("numpy", 60), ("torch", 90)])
def test_a_small_forward_takes_few_steps_of_python(engine, kind, most):
    """Between two calls of an engine all of it is cold, and each step costs several times what it does in a loop."""
    listener = ShmListener(engine, arena_bytes=8 << 20)
    listener.start()
    try:
        with connected(listener, "shm") as client:
            args, _ = inputs(1, kind)
            for _ in range(3):
                client.forward(0, *args)
            assert steps_of(lambda: client.forward(0, *args)) <= most
    finally:
        listener.close()


def steps_of(code):
    """Calls of functions, in Python and in C, that `code` makes in this thread."""
    steps = 0

    def count(frame, event, argument):
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        code()
    finally:
        sys.setprofile(None)
    return steps
