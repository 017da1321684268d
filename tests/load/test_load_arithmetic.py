"""The load generator's numbers: percentiles, schedules, loops.  Time is virtual: a second of it takes no time."""

import asyncio
import math
import selectors
from collections import Counter

import numpy as np
import pytest

from expertctl.common.percentiles import Durations, Summary
from expertctl.common.workload import LayerShape, drawn, layer_shapes, requests, routes, synthetic
from expertctl.load.departures import LoadPlan, departures
from expertctl.load.generator import LoadRun, run_load
from expertd.errors import DeadlineExceededError, QueueFullError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.result import ForwardResult

SHAPE = LayerShape(layer=3, hidden_size=16, num_experts=8, top_k=2)


class _Leaps(selectors.SelectSelector):
    """Instead of waiting for a timeout, moves the clock."""

    def __init__(self):
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the loop waits for something that will never happen"
            self.now_s += timeout
        return ready


def run(work):
    """Runs a coroutine in a loop whose clock moves when everything waits, and a microsecond with each look at it."""
    selector = _Leaps()
    loop = asyncio.SelectorEventLoop(selector)

    def clock():
        selector.now_s += 1e-6
        return selector.now_s

    loop.time = clock
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def result(routes_computed=4, **timing):
    return ForwardResult(None, None, routes_computed, pb.Timing(backend="fake", **timing), pb.Load(), 0)


def endless():
    return requests([SHAPE], 2, 0.0, False, 0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 999, 1000, 2000, 7000, 100_000])
def test_percentiles_are_of_the_nearest_rank(n):
    v = np.random.default_rng(0).random(n)
    d = Durations()
    for value in v.tolist():
        d.add(value)
    got, ascending = d.summary(), np.sort(v)
    for name, per_mille in (("p50_s", 500), ("p90_s", 900), ("p95_s", 950), ("p99_s", 990), ("p999_s", 999)):
        assert getattr(got, name) == ascending[-(-n * per_mille // 1000) - 1], name


def test_a_summary_is_exact():
    d = Durations()
    for v in (0.4, 0.1, 0.3, 0.2):
        d.add(v)
    s = d.summary()
    assert (s.count, s.min_s, s.p50_s, s.p99_s, s.max_s) == (4, 0.1, 0.2, 0.4, 0.4)
    assert math.isclose(s.mean_s, 0.25)
    assert Durations().summary() == Summary()


def test_fixed_departures_do_not_drift():
    times = list(departures(LoadPlan(tokens=1, rate=3.0, poisson=False, requests=3001)))
    assert len(times) == 3001
    assert times[3000] == 1000.0
    assert list(departures(LoadPlan(tokens=1, rate=4.0, poisson=False, duration_s=1.0))) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_departures_have_the_rate_and_the_spread():
    times = np.array(list(departures(LoadPlan(tokens=1, rate=50.0, requests=20_000, seed=3))))
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert abs(gaps.mean() * 50 - 1) < 0.03  # the mean of 20,000 exponentials has a standard error of 0.7 %
    assert abs(gaps.std() * 50 - 1) < 0.05
    assert list(departures(LoadPlan(tokens=1, rate=50.0, requests=20_000, seed=3))) == times.tolist()
    assert list(departures(LoadPlan(tokens=1, rate=50.0, requests=20_000, seed=4))) != times.tolist()


def test_both_bounds_hold():
    assert len(list(departures(LoadPlan(tokens=1, rate=10.0, poisson=False, requests=5, duration_s=9.0)))) == 5
    assert len(list(departures(LoadPlan(tokens=1, rate=10.0, poisson=False, requests=500, duration_s=1.0)))) == 10


@pytest.mark.parametrize(
    "wrong",
    [{}, {"requests": 0}, {"requests": 1, "rate": 0.0}, {"requests": 1, "concurrency": 0}, {"duration_s": -1.0}],
)
def test_a_plan_without_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        LoadPlan(tokens=1, **wrong)


def test_closed_loop_keeps_its_callers_busy_and_no_more():
    under_way = peak = 0

    async def send(_, connection):
        nonlocal under_way, peak
        assert 0 <= connection < 4
        under_way += 1
        peak = max(peak, under_way)
        await asyncio.sleep(0.1)
        under_way -= 1
        return result(queue_ns=10, kernel_ns=30, batch_tokens=8)

    report = run(run_load(LoadPlan(tokens=2, concurrency=4, requests=40), endless(), send))
    assert peak == 4
    assert (report.answered, report.failed, report.tokens, report.routes_computed) == (40, 0, 80, 160)
    assert report.wall_s == pytest.approx(1.0, rel=0.05)
    assert report.requests_per_s == pytest.approx(40.0, rel=0.05)
    assert report.tokens_per_s == pytest.approx(80.0, rel=0.05)
    assert report.latency.p50_s == pytest.approx(0.1, rel=0.05)
    assert (report.server.queue_ns, report.server.kernel_ns, report.server.batch_tokens) == (10, 30, 8)
    assert report.backends == {"fake": 40}
    assert report.lateness == Summary()


def test_closed_loop_ends_with_its_time():
    async def send(_, __):
        await asyncio.sleep(0.1)
        return result()

    report = run(run_load(LoadPlan(tokens=1, concurrency=2, duration_s=1.0), endless(), send))
    assert 18 <= report.answered <= 22


def stalling(stall_s):
    """A server that answers in 1 ms, but stands still for the second second."""

    async def send(_, __):
        loop = asyncio.get_running_loop()
        begin = send.begin = getattr(send, "begin", None) or loop.time()
        at = loop.time() - begin
        await asyncio.sleep(max(0.0, 1.0 + stall_s - at) if 1.0 <= at < 1.0 + stall_s else 0.0)
        await asyncio.sleep(0.001)
        return result()

    return send


def test_an_open_loop_charges_everybody_who_waited_in_a_stall():
    plan = LoadPlan(tokens=1, rate=100.0, poisson=False, requests=400)
    report = run(run_load(plan, endless(), stalling(1.0)))
    assert report.answered == 400
    slow = 100  # those meant to leave during the stalled second wait 0.5 s on average
    assert report.latency.mean_s == pytest.approx(slow * 0.5 / 400, rel=0.1)
    assert report.latency.p90_s > 0.5
    assert report.latency.p50_s < 0.01
    assert report.latency.max_s == pytest.approx(1.0, rel=0.05)
    assert report.lateness.max_s < 0.005
    closed = run(run_load(LoadPlan(tokens=1, requests=400), endless(), stalling(1.0)))
    assert closed.latency.p99_s < 0.01  # one caller waits once: why a closed loop cannot answer this question


def test_an_open_loop_that_is_late_itself_says_so_and_counts_it():
    async def send(_, __):
        await asyncio.sleep(0.001)
        return result()

    slow_inputs = endless()

    def late():
        for x in slow_inputs:
            asyncio.get_running_loop()._selector.now_s += 0.05  # this generator needs 50 ms for each request
            yield x

    report = run(run_load(LoadPlan(tokens=1, rate=100.0, poisson=False, requests=50), late(), send))
    assert report.lateness.max_s > 1.5
    assert report.latency.max_s > report.lateness.max_s


def test_an_open_loop_that_cannot_send_its_rate_stops_soon_after_its_duration_and_says_so():
    async def send(_, __):
        await asyncio.sleep(0.001)
        return result()

    def late():
        for x in endless():
            asyncio.get_running_loop()._selector.now_s += 0.05  # 20 requests a second
            yield x

    report = run(run_load(LoadPlan(tokens=1, rate=100.0, poisson=False, duration_s=4.0), late(), send))
    assert report.wall_s == pytest.approx(5.0, abs=0.1), "a second of grace"
    assert report.answered == pytest.approx(100, abs=2)
    assert report.behind.offered_per_s == pytest.approx(100.0, rel=0.01)
    assert report.behind.sent_per_s == pytest.approx(20.0, rel=0.05)
    on_time = run(run_load(LoadPlan(tokens=1, rate=100.0, poisson=False, duration_s=4.0), endless(), send))
    assert (on_time.answered, on_time.behind) == (400, None)


def test_the_first_failure_is_kept_and_a_warmup_may_be_late():
    calls = 0

    async def send(_, __):
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.5)
        if calls <= 2:
            raise DeadlineExceededError("in the warmup")
        if calls > 4:
            raise QueueFullError(f"full at {calls}")
        return result()

    report = run(run_load(LoadPlan(tokens=1, requests=4, warmup=2), endless(), send))
    assert (report.answered, report.errors) == (2, {"QUEUE_FULL": 2})
    assert report.first_failure.after_s == pytest.approx(1.5, abs=0.05)
    assert report.first_failure.text == "QUEUE_FULL: full at 5"


def test_what_carried_the_requests_is_counted_without_the_warmup():
    carried = Counter()

    async def send(_, __):
        carried["shm"] += 1
        await asyncio.sleep(0.01)
        return result()

    report = run(LoadRun(LoadPlan(tokens=1, requests=5, warmup=3), carried).run(endless(), send))
    assert report.transports == {"shm": 5}


def test_failures_are_counted_by_reason_and_have_no_latency():
    calls = 0

    async def send(_, __):
        nonlocal calls
        calls += 1
        number = calls
        await asyncio.sleep(0.01)
        if number % 4 == 0:
            raise QueueFullError("full")
        return result()

    report = run(run_load(LoadPlan(tokens=1, concurrency=2, requests=40), endless(), send))
    assert (report.answered, report.failed, report.errors) == (30, 10, {"QUEUE_FULL": 10})
    assert report.latency.count == 30


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_fault_of_the_generator_itself_ends_the_run(rate):
    async def send(_, __):
        await asyncio.sleep(0.01)
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(run_load(LoadPlan(tokens=1, rate=rate, requests=1000), endless(), send))


def test_warmup_is_not_counted():
    seen = []

    async def send(x, _):
        seen.append(x)
        await asyncio.sleep(10.0 if len(seen) <= 3 else 0.01)
        return result()

    report = run(run_load(LoadPlan(tokens=1, requests=5, warmup=3), endless(), send))
    assert (len(seen), report.answered) == (8, 5)
    assert report.latency.max_s < 0.1


def test_routes_are_different_experts_with_the_weights_of_zipf():
    rng = np.random.default_rng(1)
    uniform = routes(rng, 20_000, SHAPE, 0.0)
    assert uniform.shape == (20_000, 2)
    assert uniform.dtype == np.int32
    assert (uniform[:, 0] != uniform[:, 1]).all()
    share = np.bincount(uniform[:, 0], minlength=8) / 20_000
    assert np.abs(share - 1 / 8).max() < 0.02
    weight = 1 / np.arange(1, 9) ** 1.2
    first = np.bincount(routes(rng, 20_000, SHAPE, 1.2)[:, 0], minlength=8) / 20_000
    assert np.abs(first - weight / weight.sum()).max() < 0.02


def test_drawn_and_synthetic_requests_ask_the_same_thing():
    x = drawn(np.random.default_rng(0), 5, SHAPE, 0.0)
    y = synthetic(9, 5, SHAPE, 1.1)
    for a, b in ((x.hidden_states, y.hidden_states), (x.topk_ids, y.topk_ids), (x.topk_weights, y.topk_weights)):
        assert a.shape == b.shape
    assert (x.layer, y.layer) == (3, 3)
    assert x.topk_weights.sum(axis=1) == pytest.approx(np.ones(5), rel=1e-5)
    assert (y.topk_ids.zipf_exponent, y.topk_ids.dtype, y.hidden_states.dtype) == (1.1, "i32", "bf16")


@pytest.mark.parametrize("on_the_wire", [True, False])
def test_layers_take_turns(on_the_wire):
    shapes = [LayerShape(n, 16, 8, 2) for n in (4, 6, 9)]
    inputs = requests(shapes, 1, 0.0, on_the_wire, 0)
    assert [next(inputs).layer for _ in range(40)] == [(4, 6, 9)[n % 3] for n in range(40)]


def test_layers_and_top_k_must_be_the_servers():
    described = pb.DescribeResponse(
        model=pb.Model(hidden_size=16), layers=[pb.Layer(layer=n, num_experts=8, top_k=2) for n in (1, 2)]
    )
    assert [s.layer for s in layer_shapes(described, None, None)] == [1, 2]
    assert layer_shapes(described, [2], 5) == [LayerShape(2, 16, 8, 5)]
    with pytest.raises(ValueError, match=r"layers: got \[7\]"):
        layer_shapes(described, [1, 7], None)
    with pytest.raises(ValueError, match="top_k: got 9"):
        layer_shapes(described, None, 9)
    with pytest.raises(ValueError, match="layers: got none"):
        layer_shapes(pb.DescribeResponse(), None, None)
    other = pb.DescribeResponse()
    other.CopyFrom(described)
    del other.layers[:]
    other.layers.add(layer=5, num_experts=4, top_k=1)
    assert [s.layer for s in layer_shapes([described, other], None, None)] == [1, 2, 5]
    assert layer_shapes([described, other], [5], None) == [LayerShape(5, 16, 4, 1)]
    with pytest.raises(ValueError, match="the servers hold"):
        layer_shapes([described, other], [7], None)
