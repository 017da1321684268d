"""Calls that the calling thread carries out itself, over sessions in shared memory and on TCP with real engines, and
what becomes of them when a server does not do its part."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
import torch
from cluster_kit import nothing_under_way
from waiting import until

from expertd.errors import BadShapeError, DeadlineExceededError, ExpertIdOutOfRangeError, UnavailableError
from expertd.shm.library import LibraryMissingError
from expertd.shm.library import library as client_library
from expertd.shm.region import host_id, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertCluster, trace
from expertd_client.cluster import Policy, native
from expertd_client.cluster import cluster as module
from expertd_client.e4m3 import quantize
from expertd_client.shm import ShmChannel
from expertd_client.tcp import TcpChannel
from expertd_server.config.values import Address
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.peers import PeerBounds
from expertd_server.engine.scheduler import Policy as Batching
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.shm import ShmDoor
from expertd_server.transports.tcp import TcpDoor

try:
    library()
    client_library()
    MISSING = supported() or ("" if native.library() else "python -m expertd.cxx")
except (CoreMissingError, LibraryMissingError) as e:
    MISSING = str(e)

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

H, E, K = 48, 8, 3


class Server:
    """out = x * the sum of weights * (expert + 1), over the experts held, from `first` on.  gate: shut = it waits."""

    backend = "sums"

    def __init__(self, name, held, kind):
        self.name, self.held, self.kind = name, tuple(held), kind
        self.gate = threading.Event()
        self.gate.set()
        self.calls, self.entered = 0, threading.Event()
        self.engine = NativeEngine(torch.device("cpu"), compute_dtype="bf16", policy=Batching(max_tokens=64))
        self.engine.hold([ServedLayer(0, E, self.held, K, H, 8, self, "sums")])
        self.engine.start()
        self.engine.open()
        if kind == "shm":
            self.door = ShmDoor(self.engine, arena_bytes=1 << 18)
        else:
            self.door = TcpDoor(self.engine, Address("127.0.0.1", 0), PeerBounds(8 << 20))
        self.door.start()

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        self.calls += 1
        experts = torch.tensor([*self.held, -1])[topk_ids.long()]
        factor = torch.where(topk_ids >= 0, (experts + 1) * topk_weights, 0.0).sum(1, keepdim=True)
        return out.copy_(hidden_states.float() * factor)

    def close(self):
        self.gate.set()
        self.door.close()
        self.engine.stop(10)


class _Transport:
    """Whose inline way answers nothing."""

    def __init__(self, server):
        self.server, self.target = server, server.name
        self.channels = [ShmChannel() if server.kind == "shm" else TcpChannel("127.0.0.1:1")]

    def connect(self, deliver, closed):
        return _Inline(self.server, deliver, closed)

    def describe(self, request, timeout_s, wait_for_ready, waiter):
        s = self.server
        held = [pb.ExpertRange(first=e, count=1) for e in s.held]
        layer = pb.Layer(layer=0, num_experts=E, held=held, top_k=K, intermediate_size=8, backend="sums")
        model = pb.Model(family="sums", hidden_size=H)
        waiter.answer(pb.DescribeResponse(model=model, layers=[layer], limits=pb.Limits(max_tokens=64)))

    def close(self):
        pass


class _Inline:
    def __init__(self, server, deliver, closed):
        self.server, self.deliver, self.closed = server, deliver, closed

    def offer(self, offer):
        token, endpoint, why = self.server.door.offer("me", host_id() if self.server.kind == "shm" else "")
        verdicts = [pb.TransportVerdict(transport=self.server.kind, accepted=not why, reason=why)]
        self.deliver(pb.SessionAnswer(verdicts=verdicts, token=token, endpoint=endpoint))

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        raise UnavailableError("inline")

    def cancel(self, request_id):
        pass

    def close(self):
        self.closed(UnavailableError("closed"))


@pytest.fixture
def start():
    """start(*holdings, kinds, **options): an ExpertCluster of servers s0, s1, ..., as .servers."""
    with ExitStack() as stack:

        def make(*holdings, kinds=("shm",), **options):
            found = [Server(f"s{n}", h, kinds[n % len(kinds)]) for n, h in enumerate(holdings)]
            for server in found:
                stack.callback(server.close)
            by_name = {s.name: s for s in found}
            cluster = ExpertCluster(list(by_name), transport=lambda name: _Transport(by_name[name]), **options)
            stack.callback(cluster.close)
            cluster.found = found
            until(lambda: not any(cluster.servers.values()))
            return cluster

        yield make


def inputs(M, seed=0, dtype=np.float32, absent=0.2):
    g = np.random.default_rng(seed)
    x = g.integers(-8, 8, (M, H)).astype(dtype)
    ids = np.argsort(g.random((M, E)), axis=1)[:, :K].astype(np.int32)
    ids[g.random(ids.shape) < absent] = -1
    w = (g.integers(0, 8, (M, K)) / 8).astype(np.float32)
    factor = np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
    return (x, ids, w), x.astype(np.float32) * factor


def near(output, want):
    """As bf16 has it, in which the servers compute."""
    return np.allclose(np.asarray(output, np.float32), want, rtol=2e-2)


def nothing_left(cluster):
    """No work under way, no memory lent, no session used."""
    nothing_under_way(cluster)
    for m in cluster._members.by_address.values():
        way = m.exchange._link.beside
        if way is not None:
            until(lambda way=way: way._client.taken == 0)
            assert way._users == 1
            assert (way._tickets, way._waiting) == ({}, {})


LOW, HIGH, ALL = range(4), range(4, 8), range(8)


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
    client = cluster._members.by_address["s0"].exchange._link.beside._client
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


SPLIT_OR_WHOLE = pytest.mark.parametrize("holdings", [(LOW, HIGH), (ALL,)])


@SPLIT_OR_WHOLE
def test_a_deadline_ends_a_call_and_the_next_one_goes_on(start, holdings):
    cluster = start(*holdings)
    args, want = inputs(3, absent=0.0)
    cluster.found[-1].gate.clear()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        cluster.forward(0, *args, timeout_s=0.05)
    assert 0.05 <= time.monotonic() - begin < 10
    cluster.found[-1].gate.set()
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_late_call_of_one_server_goes_to_its_replica(start, kind):
    cluster = start(ALL, ALL, kinds=(kind,), policy=Policy(hedge=0.0, stall_s=0.05))
    cluster.found[0].gate.clear()
    asked = set()
    for seed in range(6):
        args, want = inputs(5, seed, absent=0.0)
        answer = cluster.forward(0, *args, timeout_s=10)
        assert near(answer.output, want)
        asked |= {(part.server, part.asked) for part in answer.parts}
        del answer
    assert ("s1", 2) in asked, "the other one was never asked first"
    cluster.found[0].gate.set()
    until(lambda: cluster._members.by_address["s0"].outstanding == 0)
    nothing_left(cluster)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_late_part_goes_to_another_replica_and_the_answered_one_is_kept(start, kind):
    cluster = start(LOW, HIGH, HIGH, kinds=(kind,), policy=Policy(hedge=0.0, stall_s=0.05))
    cluster.found[1].gate.clear()
    before = cluster.found[0].calls
    for seed in range(6):  # one of them asks the replica that hangs first
        args, want = inputs(5, seed, absent=0.0)
        answer = cluster.forward(0, *args, timeout_s=10)
        assert near(answer.output, want)
        del answer
    assert cluster.found[0].calls == before + 6, "a part that was answered is not asked for again"
    cluster.found[1].gate.set()
    until(lambda: cluster._members.by_address["s1"].outstanding == 0)
    nothing_left(cluster)


@pytest.mark.parametrize("holdings", [(LOW, HIGH, HIGH), (ALL, ALL)])
def test_a_session_that_ends_while_it_is_waited_for(start, holdings):
    cluster = start(*holdings, policy=Policy(hedge=0.0, stall_s=5.0))
    one, other = len(holdings) - 2, len(holdings) - 1
    for n in (one, other):
        cluster.found[n].gate.clear()
    args, want = inputs(5, absent=0.0)
    answers = []
    calling = threading.Thread(target=lambda: answers.append(cluster.forward(0, *args, timeout_s=20)))
    calling.start()
    until(lambda: any(cluster.found[n].entered.is_set() for n in (one, other)))
    gone, left = (one, other) if cluster.found[one].entered.is_set() else (other, one)
    cluster.found[left].gate.set()
    cluster.found[gone].door.close()
    calling.join(15)
    assert near(answers[0].output, want)
    assert [p.asked for p in answers[0].parts if p.server == f"s{left}"] == [2]


@pytest.mark.parametrize("holdings", [(LOW, HIGH, HIGH), (ALL, ALL)])
def test_routes_that_do_not_add_up_are_not_added(start, monkeypatch, holdings):
    """A server that says that it holds more than it does."""
    cluster = start(*holdings)
    liar = cluster.found[-1]
    liar.engine.hold([ServedLayer(0, E, (4, 5), K, H, 8, liar, "sums")])
    liar.held = (4, 5)
    monkeypatch.setattr(liar, "held", holdings[-1])  # it goes on saying so
    for seed in range(20):
        args, want = inputs(6, seed, absent=0.0)
        assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


@pytest.fixture
def default_sigint():
    """Whatever a test before has left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@SPLIT_OR_WHOLE
def test_an_interrupt_takes_everything_back(start, holdings, default_sigint):
    cluster = start(*holdings)
    args, want = inputs(5, absent=0.0)
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    held = cluster.found[-1]
    held.entered.clear()
    held.gate.clear()

    def interrupt():
        assert held.entered.wait(20)
        signal.raise_signal(signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.forward(0, *args, timeout_s=40)
    interrupting.join()
    held.gate.set()
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


def test_a_cluster_that_is_closed_meanwhile(start):
    cluster = start(LOW, HIGH)
    cluster.found[1].gate.clear()
    args, _ = inputs(5, absent=0.0)
    said = []

    def call():
        try:
            cluster.forward(0, *args, timeout_s=20)
        except Exception as error:
            said.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    until(lambda: cluster._members.by_address["s1"].outstanding == 1)
    threading.Timer(0.3, cluster.found[1].gate.set).start()
    cluster.close()
    calling.join(10)
    assert [type(e).__name__ for e in said] == ["RequestCancelledError"]


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
    until(lambda: not cluster._around.flights)
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
def test_an_answer_that_cannot_be_given_leaves_nothing_behind(start, monkeypatch, holdings):
    cluster = start(*holdings)
    args, want = inputs(5, absent=0.0)
    out = np.empty(args[0].shape, np.float32)
    for where in ("target", "delivered"):
        with monkeypatch.context() as patched:
            patched.setattr(f"expertd_client.cluster.call.Call.{where}", failing)
            with pytest.raises(MemoryError):
                cluster.forward(0, *args, out=out)
        nothing_left(cluster)
    assert near(cluster.forward(0, *args, out=out).output, want)


def failing(*args):
    raise MemoryError


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
