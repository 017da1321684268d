"""Calls that the calling thread carries out itself, over sessions in shared memory and on TCP with real engines."""

from __future__ import annotations

import ctypes as C
import itertools
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
from direct_kit import ALL, HIGH, LOW, SPLIT_OR_WHOLE, E, H, inputs, near, needs_libraries, nothing_left
from waiting import until

from expertd.errors import BadShapeError, DeadlineExceededError, ExpertIdOutOfRangeError, UnavailableError
from expertd_client import trace
from expertd_client.cluster import Policy
from expertd_client.cluster import cluster as module
from expertd_client.requests.e4m3 import quantize

pytestmark = [needs_libraries, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("holdings", "kinds"),
    [
        ((ALL,), ("shm",)),
        ((LOW, HIGH), ("shm",)),
        ((LOW, HIGH), ("tcp",)),
        ((LOW, HIGH), ("shm", "tcp")),
        ((LOW, HIGH, LOW, HIGH), ("shm",)),
        (((7, 0), (1, 6), (2, 5), (3, 4)), ("shm",)),
    ],
)
def test_answers_are_right_and_nothing_flies(start, holdings, kinds, monkeypatch):
    cluster = start(*holdings, kinds=kinds, policy=Policy(hedge=0.0))
    monkeypatch.setattr(module, "start", None)
    for seed in range(60):
        (x, ids, w), want = inputs(1 + seed % 11, seed)
        if not (ids >= 0).any():
            continue
        ids = ids.astype(np.int64) if seed % 3 == 0 else ids
        args = tuple(map(torch.from_numpy, (x, ids, w))) if seed % 2 else (x, ids, w)
        out = torch.full((len(x), H), torch.nan) if seed % 4 == 1 else None
        answer = cluster.forward(0, *args, out=out)
        assert near(answer.output, want)
        assert type(answer.output) is type(args[0])
        assert out is None or answer.output is out
        assert answer.routes_computed == np.count_nonzero(ids >= 0) == sum(p.routes for p in answer.parts)
        assert {p.backend for p in answer.parts} == {"sums"}
        assert answer.timing.backend == "sums"
        assert answer.load.token_ns >= 0
        del answer
    nothing_left(cluster)


def test_dtypes(start, monkeypatch):
    cluster = start(LOW, HIGH, f32_sums=False)
    monkeypatch.setattr(module, "start", None)
    for dtype, output in itertools.product((np.float32, np.float16, ml_dtypes.bfloat16), ("f32", "f16", "bf16")):
        args, want = inputs(9, dtype=dtype)
        answer = cluster.forward(0, *args, output_dtype=output)
        assert near(answer.output, want)
        del answer
    (x, ids, w), want = inputs(9)
    answer = cluster.forward(0, quantize(x), ids, w)
    assert np.allclose(np.asarray(answer.output, np.float32), want, rtol=0.1)
    del answer
    nothing_left(cluster)


def test_the_only_answer_is_lent_and_goes_back(start):
    cluster = start(ALL)
    client = cluster._members.by_address["s0"].exchange._link.session_connection._client
    args, want = inputs(4)
    answer = cluster.forward(0, *args)
    assert client.blocks == 1, "it is the server's memory"
    assert near(answer.output, want)
    answer.release()
    assert client.blocks == 0
    cluster.forward(0, *args)
    assert client.blocks == 0
    nothing_left(cluster)


def test_what_is_wrong_with_a_request_is_said_at_once(start):
    cluster = start(LOW, HIGH)
    (x, ids, w), want = inputs(3, absent=0.0)
    with pytest.raises(BadShapeError):
        cluster.forward(0, x[:, : H // 2].copy(), ids, w)
    with pytest.raises(ExpertIdOutOfRangeError):
        cluster.forward(0, x, ids + E, w)
    assert not cluster.forward(0, x, ids * 0 - 1, w).output.any()
    assert near(cluster.forward(0, x, ids, w).output, want)
    nothing_left(cluster)


def test_many_callers(start):
    cluster = start(LOW, HIGH, LOW, HIGH, kinds=("shm", "shm", "tcp", "tcp"), policy=Policy(hedge=0.05))
    wrong, longest = [], []

    def call(first):
        for seed in range(first, first + 150):
            args, want = inputs(1 + seed % 9, seed, absent=0.0)
            begin = time.monotonic()
            answer = cluster.forward(0, *args, timeout_s=20)
            longest.append(time.monotonic() - begin)
            if not near(answer.output, want):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(n * 1000,)) for n in range(6)]
    futures = [cluster.submit(0, *inputs(3, seed, absent=0.0)[0]) for seed in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(50)
    assert not wrong
    assert len(longest) == 900
    for seed, future in enumerate(futures):
        assert near(future.result(10).output, inputs(3, seed, absent=0.0)[1])
    del futures, future
    until(lambda: not cluster._state.flights)
    nothing_left(cluster)


def test_a_call_that_finds_no_room_waits_for_some(start):
    """Answers that are lent fill the session's memory, and the inline way answers nothing."""
    cluster = start(ALL)
    args, want = inputs(60)
    answers = (cluster.forward(0, *args, timeout_s=0.2) for _ in range(100))
    lent = []
    with pytest.raises((DeadlineExceededError, UnavailableError)):
        lent.extend(answers)
    assert len(lent) > 3
    while lent:
        lent.pop().release()
    until(lambda: not any(cluster.servers.values()))
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


@SPLIT_OR_WHOLE
def test_a_trace_knows_when_each_part_went_and_came(start, holdings):
    cluster = start(*holdings)
    args, _ = inputs(5, absent=0.0)
    with trace() as t:
        cluster.forward(0, *args)
    [call] = t.finished
    assert [p.server for p in call.answers] == ["s0", "s1"][: len(holdings)]
    for part in call.answers:
        assert part.transport == "shm"
        assert call.begin_ns < part.begin_ns < part.sent_ns < part.answered_ns <= call.joined_ns < call.end_ns
        assert part.timing.backend == "sums"


def test_memory_of_an_answer_is_given_back_after_it_was_added(start, monkeypatch):
    """Whoever takes it then writes there at once."""
    cluster = start(LOW, HIGH)
    monkeypatch.setattr(module, "start", None)
    released = []
    members = cluster._members.by_address.values()
    kept = [spoils(m.exchange._link.session_connection._client, released) for m in members]
    for seed in range(3):
        args, want = inputs(9, seed, absent=0.0)
        assert near(cluster.forward(0, *args).output, want)
    assert len(released) == 3 * len(kept)
    nothing_left(cluster)


def spoils(client, released):
    """From now on a ticket that C++ gives back takes what is in the arena with it.  Keep what this returns as long."""
    give_back = client._lib.release

    def release(of, ticket):
        C.memset(client.region.arena, 0xFF, client.region.arena_bytes)
        released.append(ticket)
        give_back(of, ticket)

    kept = C.CFUNCTYPE(None, C.c_void_p, C.c_uint64)(release)
    client.session.release = C.cast(kept, C.c_void_p).value
    return kept


def test_a_part_that_finds_no_ticket_leaves_no_block_and_is_sent_again(start):
    cluster = start(LOW, HIGH)
    client = cluster._members.by_address["s1"].exchange._link.session_connection._client
    asked = []
    submit = C.CFUNCTYPE(C.c_uint64, C.c_void_p, C.c_void_p, C.c_int64, C.c_int)(lambda *_: asked.append(1) or 0)
    client.session.submit = C.cast(submit, C.c_void_p).value
    args, want = inputs(9, absent=0.0)
    answer = cluster.forward(0, *args, timeout_s=10)
    assert near(answer.output, want)
    del answer
    assert asked
    nothing_left(cluster)
    assert client.blocks == 0


def test_two_callers_may_want_the_last_desk(start, monkeypatch):
    class Taken(list):
        def __bool__(self):
            return True

    cluster = start(LOW, HIGH)
    monkeypatch.setattr(module, "start", None)
    cluster._state.call_memories = Taken()
    args, want = inputs(9)
    answer = cluster.forward(0, *args)
    assert near(answer.output, want)
    del answer
    nothing_left(cluster)


@pytest.mark.parametrize("holdings", [(ALL,), (LOW, HIGH)])
def test_an_answer_that_is_kept_does_not_keep_the_tensors_of_its_call(start, holdings):
    cluster = start(*holdings)
    (x, ids, w), want = inputs(9)
    answer = cluster.forward(0, x, ids, w)
    given = weakref.ref(x)
    del x
    assert given() is None
    assert near(answer.output, want)
    assert sum(part.tokens for part in answer.parts) >= 9, "who answered what is made when it is asked for"
    del answer
    nothing_left(cluster)
