"""`expertctl bench overload`: what it counts as in time, late, refused; what it prints.  tests/load has a short one."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import asdict

import pytest
from rich.console import Console

from expertctl.bench.overload import command, cost
from expertctl.bench.overload.cost import Cost
from expertctl.bench.overload.loop import LoopClock
from expertctl.bench.overload.peak import Peak, Trial, largest
from expertctl.bench.overload.run import NotMeasured, normal_p99_s
from expertctl.bench.overload.tally import OverloadMeasurement, OverloadTally
from expertctl.cli import main
from expertctl.common.percentiles import Durations
from expertctl.load.selector import run_precisely
from expertd.errors import DeadlineExceededError, DrainingError, QueueFullError

pytestmark = pytest.mark.timeout(20)

NOBODY = ((0.5, 0.25), None)


def row(tally: OverloadTally, wall_s: float = 2.0) -> OverloadMeasurement:
    return tally.row("streams", 2.0, 0.25, Peak(10.0, False), wall_s, *NOBODY)


def sent(n: int) -> OverloadTally:
    tally = OverloadTally()
    for i in range(n):
        tally.left(float(i), i + 0.001)
    return tally


def test_what_is_in_time_is_goodput_and_what_is_late_is_not():
    tally = sent(40)
    for _ in range(18):
        tally.answered(0.0, 0.25, 0.2, 0.2)
    tally.answered(0.0, 0.25, 0.26, 0.251)  # it came too late
    tally.answered(0.0, 0.25, 0.26, 0.249)  # it may have come in time, and was looked at too late
    for _ in range(20):
        tally.ended(0.0, 0.003, QueueFullError("queue: full"))
    r = row(tally)
    assert (r.offered_per_s, r.wanted_per_s, r.admitted) == (20.0, 20.0, 20)
    assert r.goodput_of_peak == 0.9
    assert (r.late_admitted, r.late_generator) == (0.05, 0.05)
    assert (r.refused, r.refusal_p99_ms, r.not_retryable) == ({"QUEUE_FULL": 20}, 3.0, 0)
    assert (r.answer_p99_ms, r.lateness_p99_ms) == (200.0, 1.0)


def test_no_other_end_than_a_refusal_with_a_reason_to_try_again_is_a_refusal():
    tally = sent(4)
    tally.answered(0.0, math.inf, 9.0, 9.0)
    tally.ended(0.0, 0.3, DeadlineExceededError("request: it was dropped"))
    tally.ended(0.0, 0.3, DrainingError("server: it drains"))
    assert [f.why for f in row(tally).failures] == ["DeadlineExceededError: request: it was dropped"]
    assert tally.open == 1
    r = row(tally)
    assert (r.admitted, r.not_retryable, r.refused) == (3, 1, {"DRAINING": 1})
    assert r.late_admitted == round(2 / 3, 5), "one was dropped, and one has no answer"


def test_nothing_sent():
    r = row(OverloadTally())
    assert (r.goodput_of_peak, r.late_admitted, r.refusal_p99_ms) == (0.0, 0.0, 0.0)


def test_the_clock_says_since_when_an_event_may_have_been_there():
    clock = LoopClock()

    async def measure() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        begin_s = time.monotonic()
        await asyncio.sleep(0.05)  # it waited: what is seen now was not there before
        waited = clock.since_s - begin_s
        assert clock.since_s <= time.monotonic()
        busy_s = time.monotonic()
        time.sleep(0.03)  # what comes meanwhile is heard of in the next turn, and handled in the one after
        loop.call_soon(lambda: None)
        await asyncio.sleep(0)
        after_one = clock.since_s - busy_s
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return waited, after_one, clock.since_s - busy_s

    waited, after_one, after_three = run_precisely(measure(), clock)
    assert waited >= 0.049
    assert after_one <= 0.0
    assert after_three >= 0.03


@pytest.mark.parametrize(("can", "first"), [(1000, 100), (1000, 1000), (1000, 9000), (7, 300)])
async def test_the_peak_is_the_largest_rate_that_is_answered_in_time(can, first):
    async def measure(rate):
        return Trial(rate, 1.0 if rate <= can else can / rate)

    peak = await largest(measure, first)
    assert can / 1.1 <= peak.per_s <= 1.02 * can
    assert not peak.limited


@pytest.mark.parametrize(("begins_s", "ends_s"), [(0, 5), (0, 15), (0, 25), (5, 18), (11, 30)])
async def test_a_disturbance_that_is_over_does_not_bound_the_peak(begins_s, ends_s):
    """A trial takes 2.5 s of a clock of its own; meanwhile a neighbour leaves the server two fifths of its speed."""
    now_s = 0.0

    async def measure(rate):
        nonlocal now_s
        can = 400 if begins_s <= now_s < ends_s else 1000
        now_s += 2.5
        return Trial(rate, 1.0 if rate <= can else can / rate)

    peak = await largest(measure, 800)
    assert 1000 / 1.1 <= peak.per_s <= 1000
    assert not peak.limited
    assert now_s < 80


async def test_a_peak_that_the_generator_cannot_reach_says_so():
    async def measure(rate):
        return Trial(rate, 1.0, behind=rate > 500)

    peak = await largest(measure, 100)
    assert 450 <= peak.per_s <= 530
    assert peak.limited


async def test_no_rate_in_time_is_no_peak():
    async def measure(rate):
        return Trial(rate, 0.5)

    with pytest.raises(ValueError, match="no rate"):
        await largest(measure, 100)


async def test_a_pause_while_the_normal_load_is_measured_does_not_set_the_deadline():
    came = iter([9.0, 0.25, 0.2])

    async def measured() -> OverloadTally:
        tally = sent(1)
        tally.answered(0.0, math.inf, at_s := next(came), at_s)
        return tally

    assert await normal_p99_s(measured) == pytest.approx(0.25, rel=0.01)
    assert next(came, None) is None


def test_the_first_failures_are_shown_with_their_reasons(monkeypatch, capsys):
    tally = sent(9)
    for n in range(9):
        tally.ended(time.monotonic(), 0.3, DeadlineExceededError(f"request {n}: it was dropped"))
    monkeypatch.setattr(command, "measure", lambda plan: [row(tally)])
    assert main(["bench", "overload"]) == 0
    shown = capsys.readouterr().out
    assert "failed 9" in shown
    assert shown.count("DeadlineExceededError: request") == 5
    assert main(["bench", "overload", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert found["failures"][8]["why"] == "DeadlineExceededError: request 8: it was dropped"


def test_a_way_that_is_not_to_be_had_loses_nothing_that_was_measured(monkeypatch, capsys):
    def measure(plan):
        yield sent(1).row("shm", 2.0, 0.25, Peak(10.0, True), 2.0, *NOBODY)
        yield NotMeasured("tcp", "the server has it off")

    monkeypatch.setattr(command, "measure", measure)
    assert main(["bench", "overload"]) == 1
    shown = capsys.readouterr().out
    assert "shm" in shown
    assert ">10" in shown
    assert "tcp: not measured: the server has it off" in shown
    assert main(["bench", "overload", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (len(found["rows"]), found["not_measured"]) == (1, {"tcp": "the server has it off"})


def test_ctrl_c_loses_no_transport_that_was_finished(monkeypatch, capsys):
    def measure(plan):
        yield sent(1).row("shm", 2.0, 0.25, Peak(10.0, True), 2.0, *NOBODY)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", measure)
    assert main(["bench", "overload"]) == 130
    shown = capsys.readouterr().out
    assert ">10" in shown
    assert "interrupted: the table has the transports that were finished" in shown
    assert main(["bench", "overload", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (len(found["rows"]), found["not_measured"], found["interrupted"]) == (1, {}, True)


def test_a_goodput_far_above_the_peak_refutes_it(monkeypatch, capsys):
    tally = sent(60)
    for _ in range(42):
        tally.answered(0.0, 0.25, 0.2, 0.2)
    rows = [tally.row("shm", 2.0, 0.25, Peak(20.0, limited), 2.0, *NOBODY) for limited in (False, True)]
    assert [r.peak_refuted for r in rows] == [False, False], "21 are within the search's step of 20"
    rows = [tally.row("shm", 2.0, 0.25, Peak(10.0, limited), 2.0, *NOBODY) for limited in (False, True)]
    assert [r.peak_refuted for r in rows] == [True, True], "also of a peak that the generator limited"
    monkeypatch.setattr(command, "measure", lambda plan: rows)
    assert main(["bench", "overload"]) == 0
    assert capsys.readouterr().out.count("shm 2x: its goodput shows that the peak is too low") == 2


def test_what_is_not_known_is_no_number(monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda plan: [row(sent(4))])
    monkeypatch.setattr(command, "console", lambda columns: Console(width=400))
    assert main(["bench", "overload", "127.0.0.1:5"]) == 0
    heads, _, cells = (line.split("│" if "│" in line else "┃") for line in capsys.readouterr().out.splitlines()[1:4])
    shown = dict(zip([h.strip() for h in heads], [c.strip() for c in cells], strict=True))
    unknown = {name for name, cell in shown.items() if cell == "-"}
    assert unknown == {"refusal p99 ms", "of a plain server", "answer p99 ms", "server CPU", "server MB"}


def test_it_says_which_server_is_measured(asked, capsys):
    assert main(["bench", "overload", "--transport", "shm"]) == 0
    assert "overload of expertd serve --synthetic qwen1.5-moe-a2.7b:int4_g128" in capsys.readouterr().out
    for words, server in (
        (["[::1]:5"], "[::1]:5"),
        (["--paced"], "expertd-echo --batch-us 4000"),
        (["--server", "--threads 2"], "expertd serve --threads 2"),
    ):
        assert main(["bench", "overload", *words, "--transport", "shm", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["server"].startswith(server)


def test_a_bare_server_speaks_grpc_only(asked, capsys):
    assert main(["bench", "overload", "--bare", "--transport", "shm,tcp"]) == 2
    assert "--bare: got --transport shm,tcp, want one of streams, one-stream, synthetic" in capsys.readouterr().err
    assert not asked


@pytest.fixture
def asked(monkeypatch):
    plans = []

    def measure(plan):
        plans.append(plan)
        tally = sent(20)
        for _ in range(19):
            tally.answered(0.0, 0.25, 0.2, 0.2)
        for way in plan.ways:
            for load in plan.loads:
                yield tally.row(way, load, 0.25, Peak(10.0, False), 2.0, (0.5, 0.9), (100.0, 101.5))

    monkeypatch.setattr(command, "measure", measure)
    return plans


def test_json(asked, capsys):
    words = ["--transport", "shm,unary", "--load", "3", "--callers", "2", "--server", "--threads 1", "--json"]
    assert main(["bench", "overload", "[::1]:5", *words]) == 0
    plan = asked[0]
    assert (plan.address, plan.ways, plan.loads, plan.callers) == ("[::1]:5", ("shm", "unary"), (3.0,), 2)
    assert plan.server == ["--threads", "1"]
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_per_s"], found["not_measured"], found["interrupted"]) == (10.0, {}, False)
    assert [(r["way"], r["load"]) for r in found["rows"]] == [("shm", 3.0), ("unary", 3.0)]
    wanted = {"load", "deadline_ms", "offered_per_s", "goodput_of_peak", "late_admitted", "refusal_p99_ms"}
    assert wanted < set(found["rows"][0])
    assert found["rows"][0]["goodput_of_peak"] == 0.95


def test_table(asked, capsys):
    assert main(["bench", "overload"]) == 0
    shown = capsys.readouterr().out
    assert "95.0%" in shown
    assert "100 > 102" in shown
    assert "one-stream 10x: refused nothing" in shown


def test_beside_a_bare_server_and_on_cores_of_their_own(asked):
    assert main(["bench", "overload", "--paced", "--bare", "--cores", "3,1"]) == 0
    assert (asked[0].bare, asked[0].cores, asked[0].server) == (True, (3, 1), None)
    bare = sent(1)
    bare.ended(0.0, 0.002, QueueFullError("queue: full"))
    assert sent(1).row("streams", 2.0, 0.25, Peak(10.0, False), 2.0, *NOBODY, bare).bare_refusal_p99_ms == 2.0


WRONG = [
    ["--way", "pigeon"],
    ["--load", "2,0"],
    ["--load", "much"],
    ["--tokens", "0"],
    ["--cores", "1"],
    ["--cost", "much"],
]


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "overload", *words])
    assert words[1] in capsys.readouterr().err


def test_every_field_of_a_row_is_json():
    json.dumps(asdict(row(sent(1))))


def test_a_cost_without_answers_asks_for_more_time(monkeypatch):
    class Silent:
        def __init__(self, *_):
            pass

        async def open(self):
            pass

        async def closed_loop(self, *_):
            return 0.0, Durations()

        close = open

    monkeypatch.setattr(cost, "OverloadClients", Silent)
    with pytest.raises(ValueError, match="--seconds: got a piece of 10 ms without an answer, want more"):
        asyncio.run(cost._cost("forecast", [("a", None), ("b", None)], "streams", 1, 0.01, LoopClock()))


def test_cost(monkeypatch, capsys):
    def measure_cost(ways, tokens, seconds, parts, certificates):
        for way in ways:
            yield Cost(parts[0], way, (990.0, 1000.0), (101.0, 100.0), 0.99, 1.01)

    monkeypatch.setattr(command, "measure_cost", measure_cost)
    assert main(["bench", "overload", "--cost", "mtls", "--way", "shm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cost"]
    assert found[0]["part"] == "mtls"
    assert [(c["way"], c["of_throughput"], c["of_p50"]) for c in found] == [("shm", 0.99, 1.01)]
    assert main(["bench", "overload", "--cost"]) == 0
    assert "0.990" in capsys.readouterr().out
