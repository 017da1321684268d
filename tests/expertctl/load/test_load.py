"""What is around the load generator's loop: routing, the search for the largest rate, slices, histograms, the page."""

import argparse
import asyncio
import io
import math
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from expertctl.commands import clients
from expertctl.common.percentiles import LEAST_FOR_P999, Durations, Summary
from expertctl.common.workload import LayerShape, routes
from expertctl.load import page as page_module
from expertctl.load.by_server import ByServer, of_all
from expertctl.load.departures import LoadPlan, departures
from expertctl.load.generator import Behind, FirstFailure, LoadReport, Now, Raw, ServerSide
from expertctl.load.live import line
from expertctl.load.page import page
from expertctl.load.routing import parse_routing
from expertctl.load.selector import run_precisely
from expertctl.load.series import hdr_encoded, hdr_text, quantile_curve, slices
from expertctl.load.show import Outcome, Run, as_json, show, transport_text
from expertctl.load.slo import Trial, parse_slo, search, upper_share
from expertd_client.cluster import Answered

SHAPE = LayerShape(layer=3, hidden_size=16, num_experts=64, top_k=4)


# ---- routing ---------------------------------------------------------------------------------------------------------


def counted(text, seed=0, tokens=20_000):
    weights = parse_routing(text).log_weights
    ids = routes(np.random.default_rng(1), tokens, SHAPE, lambda shape: weights(shape, seed))
    assert all(len(set(row)) == SHAPE.top_k for row in ids[:200].tolist())
    return np.bincount(ids.ravel(), minlength=64) / ids.size


def test_uniform_and_zipf():
    even = counted("uniform")
    assert abs(even * 64 - 1).max() < 0.1
    skewed = counted("zipf:1.2")
    assert skewed[0] > 5 * skewed[20] > 0
    assert parse_routing("zipf:1.2").zipf == 1.2
    assert parse_routing("uniform").zipf == 0.0


def test_hot_experts_have_their_share_and_the_seed_draws_them():
    share = counted("hot:16:0.8")
    hot = np.sort(np.argsort(share)[-16:])
    assert share[hot].sum() == pytest.approx(0.8, abs=0.04)  # a little less: no expert stands twice in a token
    assert np.delete(share, hot).min() > 0
    assert counted("hot:16:0.8")[hot].sum() == share[hot].sum()
    other = np.sort(np.argsort(counted("hot:16:0.8", seed=1))[-16:])
    assert other.tolist() != hot.tolist()
    assert counted("hot:16")[hot].sum() > share[hot].sum()  # 0.9 where it is not said


def test_incast_is_one_set_of_experts_for_everybody():
    share = counted("incast")
    assert np.count_nonzero(share) == SHAPE.top_k
    assert share.max() == 0.25
    assert np.count_nonzero(counted("hot:2:1")) > 2  # top-4 of two: the others come from everywhere


@pytest.mark.parametrize("text", ["", "zipf", "zipf:-1", "zipf:nan", "hot", "hot:0", "hot:4:0", "hot:4:2", "incast:3",
                                  "recorded:", "uniform:1", "even"])  # fmt: skip
def test_a_routing_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="want uniform, zipf:S, hot"):
        parse_routing(text)


def test_more_hot_experts_than_there_are():
    with pytest.raises(ValueError, match="--routing hot:65: got 65 experts, want 1 to 64"):
        counted("hot:65")


# ---- departures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize(("first", "last"), [(100.0, 900.0), (900.0, 100.0)])
def test_a_ramp_has_its_two_rates(first, last, poisson):
    plan = LoadPlan(tokens=1, rate=first, rate_to=last, duration_s=20.0, poisson=poisson)
    at = np.array(list(departures(plan)))
    assert (np.diff(at) >= 0).all()
    assert at[-1] < 20.0
    per_second = np.histogram(at, np.arange(21.0))[0]
    want = first + (last - first) * (np.arange(20) + 0.5) / 20
    assert np.abs(per_second - want).max() < (4 * math.sqrt(900) if poisson else 2)
    assert len(at) == pytest.approx(10_000, rel=0.05)


def test_a_schedule_is_kept():
    plan = LoadPlan(tokens=0, schedule=[0.0, 0.5, 0.5, 2.0], requests=3)
    assert list(departures(plan)) == [0.0, 0.5, 0.5]
    assert plan.open
    for wrong in ({"rate": 1.0, "schedule": [0.0]}, {"rate": 1.0, "rate_to": 2.0, "requests": 3}):
        with pytest.raises(ValueError, match="want"):
            LoadPlan(tokens=0, **wrong)


# ---- the search ------------------------------------------------------------------------------------------------------


class Server:
    """Waits of an M/M/1 line: with `capacity` requests a second, the share e^(-(capacity - rate) t) takes longer
    than t."""

    def __init__(self, capacity, slo, seed=0):
        self.capacity, self.slo, self.rng = capacity, slo, np.random.default_rng(seed)
        self.asked = []

    def share(self, rate):
        return math.exp(-(self.capacity - rate) * self.slo.bound_s) if rate < self.capacity else 1.0

    async def __call__(self, rate):
        self.asked.append(rate)
        n = self.slo.requests(rate, 3.0)
        late = int(self.rng.binomial(n, self.share(rate)))
        return Trial(rate, n, late, self.slo.bound_s * (2 if late > n / 100 else 0.5))


async def test_the_search_finds_the_rate_of_a_line():
    slo = parse_slo("p99<20ms")
    true = 1000 - math.log(100) / 0.02  # 769.7: where just 1 % take longer
    found = []
    for seed in range(20):
        server = Server(1000.0, slo, seed)
        found.append(await search(slo, 990.0, server))
        assert len(server.asked) < 45
    rates = [f.rate for f in found]
    assert all(0.88 * true < rate for rate in rates), rates
    wrong = sum(rate > true for rate in rates)
    assert wrong <= 3, rates  # with 95 % confidence one in twenty
    assert all(f.at_most <= 0.01 and f.share < f.at_most and len(f.repeats) == 3 for f in found)
    assert not any(f.limited for f in found)
    assert re.search(r"p99 < 20 ms is met up to 7\d\d\.\d requests/s: .*95 % confidence", found[0].sentence())


async def test_the_search_goes_beyond_the_rate_of_the_closed_loop():
    """A machine that was slow for the seconds of the closed loop says nothing of the rate that it can take."""
    slo = parse_slo("p99<20ms")
    true = 1000 - math.log(100) / 0.02
    found = await search(slo, 100.0, Server(1000.0, slo))
    assert 0.88 * true < found.rate <= 1.03 * true
    assert not found.limited


async def test_a_server_that_keeps_any_rate_ends_the_search():
    asked = []

    async def always(rate):
        asked.append(rate)
        return Trial(rate, 1000, 0, 0.001)

    found = await search(parse_slo("p99<20ms"), 100.0, always)
    assert asked == [100.0, 200.0, 400.0, 800.0, 1600.0, 1600.0, 1600.0, 1600.0]
    assert (found.rate, found.limited) == (1600.0, True)
    assert "is met at 1,600.0 requests/s at least, and no more was tried" in found.sentence()


async def test_a_rate_that_passed_once_is_repeated_when_those_above_it_fail():
    """The interval between the passed rate and a failed one is bisected, whose trials pass by luck; then they fail."""
    seen = Counter()

    async def measure(rate):
        seen[rate] += 1
        return Trial(rate, 1000, 0 if rate <= 100 or (rate < 390 and seen[rate] == 1) else 500, 0.001)

    found = await search(parse_slo("p99<20ms"), 100.0, measure)
    assert (found.rate, found.confirmed) == (100.0, True)
    assert "p99 < 20 ms is met up to 100.0 requests/s" in found.sentence()


async def test_where_a_trial_passed_it_is_never_said_that_no_rate_does():
    passes = iter([True])

    async def once(rate):
        return Trial(rate, 1000, 0 if next(passes, False) else 500, 0.001)

    found = await search(parse_slo("p99<20ms"), 100.0, once)
    assert (found.rate, found.confirmed) == (100.0, False)
    assert "p99 < 20 ms was met at 100.0 requests/s in one trial, and no rate met it in all" in found.sentence()


async def test_where_no_rate_keeps_it():
    slo = parse_slo("p99.9<1us")
    found = await search(slo, 500.0, Server(1000.0, slo))
    assert found.rate is None
    assert "no rate meets p99.9 < 1 us" in found.sentence()
    assert (found.confirmed, found.limited, found.share) == (False, False, None)
    told = as_json(Outcome("host", [0], {}, [], found))["slo"]
    assert {t["generator_late"] for t in told["trials"]} == {None}


async def test_what_the_generator_could_not_offer_is_no_answer():
    async def behind(rate):
        return Trial(rate, 1000, 0, 0.001, behind="rate" if rate > 100 else "")

    found = await search(parse_slo("p99<20ms"), 1000.0, behind)
    assert 90 < found.rate <= 100
    assert found.limited
    assert re.search(r"is met at \d+\.\d requests/s at least, and the load generator is the limit", found.sentence())


async def test_a_busy_generator_ends_the_search_soon():
    """A trial of p99 has 500 requests at least, however low its rate: at 1 a second they take minutes."""
    took_s = 0.0
    slo = parse_slo("p99<5ms")

    async def behind(rate):
        nonlocal took_s
        took_s += slo.requests(rate, 0.3) / rate
        return Trial(rate, 500, 500, 1.0, behind="lateness")

    found = await search(slo, 700.0, behind)
    assert found.rate is None
    assert (found.confirmed, found.limited) == (False, True)
    told = as_json(Outcome("host", [0], {}, [], found))["slo"]
    assert (told["late_share"], told["late_share_at_most"], told["confirmed"]) == (None, None, False)
    assert told["generator_limited"]
    assert {t["generator_late"] for t in told["trials"]} == {"lateness"}
    assert "the load generator sent too late even at 43.8 requests/s" in found.sentence()
    assert took_s < 30


async def test_a_rate_that_cannot_keep_the_slo_any_more_is_not_repeated():
    asked = []

    async def measure(rate):
        asked.append(rate)
        return Trial(rate, 1000, 0 if len(asked) in (2, 3) else 31, 0.001)

    found = await search(parse_slo("p99<20ms"), 200.0, measure)
    assert not found.confirmed
    assert asked[:2] == [200.0, 100.0]
    repeated = asked[asked.index(max(asked[2:])) + 1 :]
    assert len(repeated) > 8
    assert max(Counter(asked).values()) <= 2, "a rate that failed once in its repetitions is not repeated"


def test_wilsons_bound():
    assert upper_share(0, 268) > 0.0099 > upper_share(0, 300)
    assert upper_share(10, 1000) == pytest.approx(0.0166, abs=1e-4)
    assert upper_share(0, 0) == 1.0
    assert upper_share(5, 5) == 1.0


@pytest.mark.parametrize("text", ["p99", "p99<20", "p0<1s", "p100<1s", "p99>20ms", "99<20ms", "p99<0ms"])
def test_a_promise_that_is_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="want an objective, for example p99<20ms"):
        parse_slo(text)


def test_promises_are_read():
    p = parse_slo("p99.9<500us")
    assert (p.quantile, p.bound_s, p.text) == (0.999, 0.0005, "p99.9 < 500 us")
    assert p.requests(10, 1) == 5000
    assert p.requests(1e6, 1) == 1_000_000


# ---- reports ---------------------------------------------------------------------------------------------------------


def report(latencies, failures=()):
    d = Durations()
    for v in latencies:
        d.add(v)
    ends = np.cumsum(latencies).tolist()
    return LoadReport(ends[-1], len(latencies), {"UNAVAILABLE": len(failures)} if failures else {}, 8, 16, d.summary(),
                      Summary(), ServerSide(kernel_ns=1e6), {"cpu": 1}, Raw(ends, latencies, failures))  # fmt: skip


def test_slices_hold_every_answer_once():
    rng = np.random.default_rng(0)
    ends, took = np.sort(rng.uniform(0, 7.3, 5000)), rng.exponential(0.01, 5000)
    found = slices(ends.tolist(), took.tolist(), [0.05, 7.2])
    assert (sum(s.answered for s in found), sum(s.failed for s in found)) == (5000, 2)
    assert len(found) <= 120
    assert found[0].begin_s == 0
    assert found[-1].end_s == pytest.approx(ends.max())
    assert all(a.end_s == pytest.approx(b.begin_s) for a, b in pairwise(found))
    first = took[(ends >= 0) & (ends < found[0].end_s)]
    assert found[0].p50_us == pytest.approx(np.quantile(first, 0.5, method="inverted_cdf") * 1e6)
    assert found[3].rate == pytest.approx(5000 / 7.3, rel=0.5)
    assert slices([], [], []) == []


def test_the_histogram_is_hdrhistograms_own():
    from hdrh.histogram import HdrHistogram

    took = np.random.default_rng(0).exponential(0.01, 3000).tolist()
    again = HdrHistogram.decode(hdr_encoded(took))
    assert again.get_total_count() == 3000
    assert again.get_value_at_percentile(99) == pytest.approx(np.quantile(took, 0.99) * 1e6, rel=2e-3)
    text = hdr_text(took)
    assert "Percentile" in text
    summary = {name: float(value) for name, value in re.findall(r"(\w+) += +([\d.]+)", text)}
    assert summary["Max"] == pytest.approx(1e3 * max(took), rel=2e-3)
    assert summary["Mean"] == pytest.approx(1e3 * np.mean(took), rel=2e-3)
    assert summary["StdDeviation"] == pytest.approx(1e3 * np.std(took), rel=5e-3), "in the unit of the others"
    assert hdr_text([]).count("StdDeviation") == 1
    x, y = quantile_curve(np.asarray(took))
    assert x[0] == 1
    assert y == sorted(y)
    assert y[-1] == pytest.approx(max(took) * 1e6)


def two_runs(address="host"):
    rng = np.random.default_rng(0)
    runs = [Run(LoadPlan(1, concurrency=c, requests=9), report(rng.exponential(0.01, 99).tolist())) for c in (1, 8)]
    return Outcome(address, [0], {"routing": "uniform", "echo": False}, runs, interrupted=True)


def test_the_page_stands_alone():
    html = page(two_runs("<b>&host"))
    assert "<p>routing: uniform</p>" in html
    assert "&lt;b&gt;&amp;host" in html
    assert "<b>&host" not in html
    assert "Interrupted" in html
    assert html.count("Plotly.newPlot(") == 4
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)
    one = page(Outcome("host", [0], {}, two_runs().runs[:1]))
    assert one.count("Plotly.newPlot(") == 3


def test_what_each_server_of_a_cluster_answered():
    counted = ByServer()
    counted.add([Answered("b:1", 3, 5, 1, 0.010, "cpu"), Answered("a:1", 4, 7, 2, 0.030, "triton")])
    counted.add([Answered("a:1", 1, 1, 1, 0.020, "cpu")])
    a, gone, b = of_all(counted.report(), ["a:1", "gone:1", "b:1"])
    assert (a.server, a.parts, a.tokens, a.routes, a.helped, a.backends) == ("a:1", 2, 5, 8, 1, {"triton": 1, "cpu": 1})
    assert (a.latency.count, a.latency.p50_s, a.latency.max_s) == (2, 0.020, 0.030)
    assert (gone.server, gone.parts, gone.routes, gone.latency.count, gone.backends) == ("gone:1", 0, 0, 0, {})
    assert (b.server, b.parts, b.tokens, b.routes, b.helped, b.backends) == ("b:1", 1, 3, 5, 0, {"cpu": 1})
    run = Run(LoadPlan(1, concurrency=2, requests=9), replace(report([0.01] * 9), by_server=[a, gone, b]))
    out = Console(width=80, force_terminal=True, no_color=True, file=io.StringIO())
    settings = {"servers": "a cluster of 3 servers", "transport": dict.fromkeys(("a:1", "b:1"), "tcp")}
    show(out, Outcome("a:1 gone:1 b:1", [0], settings, [run]))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.file.getvalue())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    assert "a cluster of 3 servers, TCP" in " ".join(text.split())
    assert re.search(r"^a:1 +│ triton, cpu │ +2 │ +8 │ +1 │ 20.0 ms │ 30.0 ms", text, re.M), text
    assert re.search(r"^gone:1 │ +none │ +0 │ +0 │ +0 │", text, re.M), text
    told = as_json(Outcome("a:1 gone:1 b:1", [0], {}, [run]))["runs"][0]["by_server"]
    assert [(one["server"], one["parts"], one["latency_us"]["max"]) for one in told] == [
        ("a:1", 2, 30_000), ("gone:1", 0, 0), ("b:1", 1, 10_000)]  # fmt: skip


def test_stages_are_bars_by_load_and_no_figure_has_two_scales():
    stages = page_module._stages(two_runs()).to_dict()
    assert stages["layout"]["yaxis"]["type"] == "category"
    assert [bar["y"] for bar in stages["data"]] == [["1 client", "8 clients"]] * 6
    times = page_module._times(two_runs()).to_dict()
    assert {axis for axis in times["layout"] if axis.startswith("yaxis")} == {"yaxis", "yaxis2"}
    assert "overlaying" not in times["layout"]["yaxis2"]
    colours = {}
    for curve in times["data"]:
        colours.setdefault(curve["name"].split(":")[0], set()).add(curve["line"]["color"])
    assert all(len(found) == 1 for found in colours.values()), "a load has one colour"
    assert len(set.union(*colours.values())) == 2


def test_a_transport_is_named_once_or_by_server():
    assert transport_text("shm") == "shared memory"
    assert transport_text({"a": "inline", "b": "inline"}) == "gRPC"
    assert transport_text({"a": "shm", "b": "tcp"}) == "a: shared memory, b: TCP"


@pytest.mark.parametrize(("count", "known"), [(LEAST_FOR_P999 - 1, False), (LEAST_FOR_P999, True)])
def test_p999_is_said_from_enough_answers_on(count, known):
    run = Run(LoadPlan(1, concurrency=2, requests=count), report([0.01] * count))
    outcome = Outcome("host", [0], {"transport": "shm"}, [run])
    found = as_json(outcome)
    assert (found["runs"][0]["latency_us"]["p999"], found["transport"]) == (10_000.0 if known else None, "shm")
    out = Console(width=120, no_color=True, file=io.StringIO())
    show(out, outcome)
    (latency,) = (line for line in out.file.getvalue().splitlines() if line.startswith("latency"))
    assert (latency.split("│")[6].strip() != "-") is known, latency
    assert ("<td>-</td>" in page(outcome)) is not known


def test_json_of_one_run_has_the_shape_of_several():
    run = Run(LoadPlan(1, concurrency=2, requests=9), report([0.01] * 9, [0.05]))
    one = as_json(Outcome("host", [0], {"routing": "uniform"}, [run]))
    assert (one["interrupted"], one["routing"], one["slo"]) == (False, "uniform", None)
    (found,) = one["runs"]
    assert (found["answered"], found["failed"]) == (9, 1)
    assert found["series"][0]["failed"] == 1
    assert found["hdr"].startswith("HIST")
    several = as_json(Outcome("host", [0], {}, [run, run]))
    assert [r["answered"] for r in several["runs"]] == [9, 9]


@pytest.mark.parametrize(
    ("plan", "arrivals", "concurrency"),
    [
        (LoadPlan(1, concurrency=2, requests=9), None, 2),
        (LoadPlan(1, rate=3.0, requests=9), "poisson", None),
        (LoadPlan(1, rate=3.0, poisson=False, requests=9), "fixed", None),
        (LoadPlan(0, schedule=[0.0, 1.0], requests=2), "recorded", None),
    ],
)
def test_a_plan_in_json_has_what_its_loop_has(plan, arrivals, concurrency):
    told = as_json(Outcome("host", [0], {}, [Run(plan, report([0.01] * 9))]))["runs"][0]["plan"]
    assert (told["arrivals"], told["concurrency"]) == (arrivals, concurrency)
    assert told["loop"] == ("closed" if arrivals is None else "open")
    assert "poisson" not in told


def test_a_replay_says_how_fast_and_over_how_many_connections():
    run = Run(LoadPlan(0, schedule=[0.0, 1.0], requests=2), report([0.01] * 2))
    said = shown(Outcome("host", [0], {"messages": "2 connections", "speed": 2.0}, [run]))
    assert "open loop, as recorded; layer 0, 2 connections, 2 times as fast" in said


async def test_a_trial_says_why_its_generator_was_late():
    slo = parse_slo("p99<20ms")
    of_rate = replace(report([0.01] * 9), behind=Behind(30.0, 20.0))
    delayed = replace(report([0.03] * 9), lateness=Summary(count=9, p99_s=0.006))
    found = [clients._judged(30.0, r, slo).behind for r in (of_rate, delayed, report([0.01] * 9))]
    assert found == ["rate", "lateness", ""]


def shown(outcome):
    out = Console(width=200, no_color=True, file=io.StringIO())
    show(out, outcome)
    return out.file.getvalue()


def test_requests_are_counted_by_what_carried_them():
    carried = {"shm": 99_762, "inline": 238}
    run = Run(LoadPlan(1, concurrency=2, requests=9), replace(report([0.01] * 9), transports=carried))
    outcome = Outcome("host", [0], {"transport": "shm"}, [run])
    assert "layer 0, shared memory 99,762, gRPC 238 (requests)" in shown(outcome)
    assert as_json(outcome)["runs"][0]["transports"] == carried
    assert "transport: shared memory 99,762, gRPC 238 (requests)" in page(outcome)
    all_over_grpc = Run(run.plan, replace(run.report, transports={"inline": 9}))
    said = shown(Outcome("host", [0], {"transport": "shm"}, [all_over_grpc]))
    assert "layer 0, gRPC" in said
    assert "shared memory" not in said


def test_a_generator_that_could_not_send_its_load_is_named():
    late = replace(report([0.01] * 9), behind=Behind(30_000.0, 2_433.0))
    outcome = Outcome("host", [0], {}, [Run(LoadPlan(1, rate=30_000.0, duration_s=4.0), late)])
    want = "generator late: offered 30,000 requests/s, sent 2,433"
    assert want in shown(outcome)
    assert want in page(outcome)
    assert as_json(outcome)["runs"][0]["generator_late"] == {"offered_per_s": 30_000.0, "sent_per_s": 2_433.0}


def test_the_first_failure_is_shown():
    failed = replace(report([0.01] * 9, [2.5]), first_failure=FirstFailure(2.5, "UNAVAILABLE: host: the server ended"))
    outcome = Outcome("host", [0], {}, [Run(LoadPlan(1, rate=3.0, duration_s=4.0), failed)])
    assert "after 2.50 s: UNAVAILABLE: host: the server ended" in shown(outcome)
    assert as_json(outcome)["runs"][0]["first_failure"]["after_s"] == 2.5


def test_what_is_left_in_a_loop_is_cancelled_before_it_ends():
    ended, tasks = [], []

    async def left():
        try:
            await asyncio.to_thread(time.sleep, 0.2)
        finally:
            ended.append("task")

    async def work():
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(0.01)
        return 7

    assert run_precisely(work()) == 7
    assert ended == ["task"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]


def test_the_line_of_progress_fits_a_terminal():
    before = Now(123.0, 1_000_000, 5, 64)
    now = Now(123.25, 1_123_456, 99_999, 1024, Summary(count=9, p50_s=0.1234, p99_s=1.234))
    text = line("50 to 500 requests/s", before, now, 600.0)
    assert "123/600 s" in text
    assert "493,824/s" in text
    assert len(line("1024 callers", before, now, 600.0)) <= 100
