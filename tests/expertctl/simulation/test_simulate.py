"""A simulated cluster: the same code as a real one, on a clock that stands while it runs."""

import gc
import json
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from expertctl.cli import main
from expertctl.simulation import service as services
from expertctl.simulation.outcome import SimulationTally
from expertctl.simulation.real import run_real
from expertctl.simulation.service import H200_INT4, Service
from expertctl.simulation.simulate import simulate
from expertctl.simulation.trace import Outage, busiest_s, placed, shape_of, traced
from expertctl.simulation.world import SimulatedExchange, SimulatedServer, World
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.policy import Policy
from expertd_client.requests.deadline import Deadline

SHAPE = shape_of(8, 2)
SLEEPY = Service(((1, 4e-3), (32, 12e-3)), (1e-3,), 32)


def trace_of(outages=(), calls=400, rate=100.0, servers=3):
    return replace(traced(calls, rate, 1, SHAPE, 0.8, servers, 0.0, 1.0, 0.0), outages=tuple(outages))


def placement_of(servers=3):
    return placed(servers, SHAPE, 0.8, 2, 6)


def test_a_batch_takes_what_was_measured_and_in_between():
    assert [SLEEPY.batch_s(n) for n in (1, 32)] == [4e-3, 12e-3]
    assert SLEEPY.batch_s(16) == pytest.approx(4e-3 + 8e-3 * 15 / 31)
    assert SLEEPY.batch_s(63) == pytest.approx(20e-3)
    assert Service(((4, 1e-3),), ()).batch_s(2) == 1e-3
    assert H200_INT4.batch_s(1) < H200_INT4.batch_s(5) < H200_INT4.batch_s(9000)


def test_things_happen_in_the_order_of_their_times():
    world, seen = World(), []
    world.at(2.0, lambda: seen.append(("late", world.now_s)))
    world.at(1.0, lambda: world.at(1.5, lambda: seen.append(("between", world.now_s))))
    world.at(float("inf"), lambda: seen.append("never"))
    world.run(lambda: False)
    assert seen == [("between", 1.5), ("late", 2.0)]


def test_calls_take_what_servers_and_ways_take():
    outcome, tally = simulate(placement_of(), SLEEPY, trace_of(rate=5.0, calls=100), 1.0, Policy())
    took_s = tally.ended_s - tally.begun_s
    assert np.median(took_s) == pytest.approx(5e-3)
    assert (outcome.calls, outcome.failed) == (100, 0)
    again, _ = simulate(placement_of(), SLEEPY, trace_of(rate=5.0, calls=100), 1.0, Policy())
    assert replace(again, seconds=0.0) == replace(outcome, seconds=0.0), "the same seed, the same world"


def test_a_queue_is_taken_as_one_batch():
    """At twice what single calls allow, servers join what waits, and latency stays bounded."""
    outcome, _ = simulate(placement_of(), SLEEPY, trace_of(rate=1000.0, calls=2000), 1.0, Policy(hedge=0.0))
    assert outcome.failed == 0
    assert 10.0 < outcome.p99_ms < 60.0


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_a_server_that_fails_costs_no_call_where_there_is_another(hangs):
    outages = [Outage(1.0, 0, 1.0, hangs), Outage(3.0, 1, 0.5, hangs)]
    outcome, tally = simulate(placement_of(), SLEEPY, trace_of(outages), 1.0, Policy())
    assert outcome.failed == 0
    assert tally.why == {}
    longest_s = float((tally.ended_s - tally.begun_s).max())
    assert longest_s < 0.5
    assert (longest_s > 0.15) == hangs, "a hung server is waited for until its silence tells"


def test_a_deadline_to_come_keeps_nothing_of_a_part_that_was_answered():
    class Waiter:
        sub = SimpleNamespace(part=SimpleNamespace(routes=2))

        def answer(self, result):
            answers.append(result.routes_computed)

    world, answers, waiter = World(), [], Waiter()
    server = SimulatedServer(world, SLEEPY, pb.DescribeResponse(), random.Random(0))
    SimulatedExchange(world, server).submit(SimpleNamespace(tokens=1), Deadline(1.0, 1.0), waiter)
    there = weakref.ref(waiter)
    del waiter
    world.run(lambda: bool(answers))
    assert answers == [2]
    assert world.now_s < 0.1
    assert there() is None


def test_calls_that_ended_go_without_the_collector(monkeypatch):
    """It stands while the clock runs, and nothing piles up: failed, hedged and repeated calls, too."""
    ended, alive = SimulationTally.ended, []

    def flights_there():
        return sum(type(o) is Flight for o in gc.get_objects())

    def look(tally, number, now_s, error):
        ended(tally, number, now_s, error)
        if number == 1999:
            alive.append((gc.isenabled(), flights_there()))

    monkeypatch.setattr(SimulationTally, "ended", look)
    outages = [Outage(float(n), n % 3, 0.7, n % 2 == 0) for n in range(1, 20)]
    gc.collect()
    before = flights_there()  # of other tests
    outcome, _ = simulate(placement_of(), SLEEPY, trace_of(outages, calls=2000), 0.2, Policy())
    assert gc.isenabled()
    assert outcome.failed > 5
    ((enabled, flights),) = alive
    assert not enabled
    assert flights - before < 100


def test_where_nobody_is_left_calls_fail_in_time():
    outages = [Outage(1.0, server, 5.0, False) for server in range(3)]
    outcome, tally = simulate(placement_of(), SLEEPY, trace_of(outages), 0.5, Policy())
    during = (tally.begun_s > 1.1) & (tally.begun_s < 3.5)
    assert tally.failed[during].all()
    assert not tally.failed[tally.begun_s < 0.9].any()
    assert sum(tally.why.values()) == outcome.failed > 100
    assert float((tally.ended_s - tally.begun_s)[during].max()) <= 0.5 + 1e-6


def test_hot_experts_have_more_copies_and_no_server_much_more_work():
    shape = shape_of(64, 4)
    spread = placed(16, shape, 1.0, 2, 12)
    copies = np.bincount([e for s in spread.servers for e in s.layers[0]], minlength=64)
    assert copies.min() == 2
    assert copies[:4].min() > 4
    even_s = 4 / 16 * H200_INT4.batch_s(1)
    assert busiest_s(spread, 1, shape, 1.0, H200_INT4) < 2.0 * even_s


OUTAGES = (Outage(0.5, 0, 0.3, False), Outage(1.2, 1, 0.3, True))


def test_the_same_on_real_time():
    """Threads, locks and clocks of a real cluster: no call fails, and what the threads took is handed back."""
    trace = trace_of(OUTAGES, calls=200)
    real, tally, given = run_real(placement_of(), SLEEPY, trace, 60.0, Policy())
    assert (real.calls, real.failed, tally.why) == (200, 0, {})
    assert len(given.late_s) > 1, "one of each batch, not the one that SLEEPY has"
    assert min(given.late_s) >= 0
    assert min(given.ways_s) > 0
    simulated, _ = simulate(placement_of(), given, trace, 60.0, Policy())
    assert simulated.failed == 0


@pytest.mark.soak
@pytest.mark.alone
def test_latency_on_real_time_is_as_simulated():
    """A short form: `expertctl simulate --check` compares percentiles."""
    trace = trace_of(OUTAGES, calls=200)
    real, _, given = run_real(placement_of(), SLEEPY, trace, 2.0, Policy())
    simulated, _ = simulate(placement_of(), given, trace, 2.0, Policy())
    assert 0.5 < simulated.p50_ms / real.p50_ms < 2.0


def test_the_command(capsys, monkeypatch):
    asked = ["simulate", "--servers", "8", "--experts", "16", "--top-k", "2", "--calls", "300", "--rate", "1000"]
    assert main([*asked, "--failures", "20", "--down", "0.1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["servers"], shown["simulated"]["calls"], shown["apart"]) == (8, 300, 0.0)
    assert shown["outages"] > 1
    assert main(asked) == 0
    assert "goodput" in capsys.readouterr().out
    from expertctl.commands import simulate as command

    monkeypatch.setattr(command, "measured", lambda address: pytest.fail(address))
    with pytest.raises(pytest.fail.Exception, match=r"h:1"):
        main([*asked, "--service", "h:1"])


@pytest.mark.parametrize("worse", [{"p99_ms": 1000.0}, {"failed": 30}])
def test_check_says_how_far_apart(capsys, monkeypatch, worse):
    from expertctl.commands import simulate as command

    real = command.run_real

    def slower(*args):
        outcome, tally, given = real(*args)
        return replace(outcome, **worse), tally, given

    monkeypatch.setattr(command, "run_real", slower)
    assert main(["simulate", "--check", "--calls", "60", "--failures", "0", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["apart"] > 0.5
    assert shown["real"]["calls"] == shown["simulated"]["calls"] == 60


class Answering:
    """A client whose server has experts 2 and 3 of 8 and takes 1 ms and 10 us a token."""

    def __init__(self, address, timeout_s):
        self.address = address

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def describe(self):
        layer = pb.Layer(layer=0, num_experts=8, top_k=2, held=[pb.ExpertRange(first=2, count=2)])
        return pb.DescribeResponse(model=pb.Model(hidden_size=16), layers=[layer], limits=pb.Limits(max_tokens=8))

    def forward_request(self, request):
        from expertd_client.requests.result import ForwardResult

        ids = request.topk_ids
        assert np.isin(ids, (-1, 2, 3)).all(), "a route to another server's expert"
        assert (ids >= 0).any(axis=1).all(), "a token that a cluster would not send"
        return ForwardResult(None, None, 0, pb.Timing(kernel_ns=1_000_000 + 10_000 * request.tokens), pb.Load())


def test_a_server_is_measured(monkeypatch):
    monkeypatch.setattr(services, "ExpertClient", Answering)
    found = services.measured("h:1", rounds=3)
    assert found.batches == [(n, pytest.approx(1e-3 + 1e-5 * n)) for n in (1, 2, 4, 8)]
    assert found.max_tokens == 8
    assert len(found.ways_s) == 12
