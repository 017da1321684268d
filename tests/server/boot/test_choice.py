"""Which backends a layer takes: properties that hold for any problem, any times and any order of failures."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from expertctl.commands.describe import show
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.session import Session
from expertd_kernels import NAMED_DEVICES, Package, Problem, Scheme, decide
from expertd_kernels.measure.autotuning import Result, measure
from expertd_kernels.native.library import kernel_error
from expertd_kernels.oracle.decision import RULES
from expertd_kernels.oracle.probe import assumed_packages, detect_device, installed_packages
from expertd_kernels.oracle.survey import SCHEMES
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot import autotuning as measuring
from expertd_server.boot.assignment import BootError, assign_layers, open_source
from expertd_server.boot.autotuning import Autotuning, affordable_copies
from expertd_server.boot.choice import BackendRejectedError, Choice
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges
from expertd_server.views.describe import describe_layer

PACKAGES = dict(assumed_packages(BACKENDS))
GRID = (1, 8, 64, 512)
ROWS = {b.name: b for b in BACKENDS}


@st.composite
def measured(draw):
    """(decision without a pin, results of an autotuning run on it)."""
    scheme = Scheme.parse(draw(st.sampled_from(SCHEMES)))
    device = draw(st.sampled_from(list(NAMED_DEVICES.values())))
    d = decide(Problem(device, scheme, scheme, 8, 2048, 768, top_k=2, packages=PACKAGES))
    results = []
    for v in d.verdicts:
        if not v.eligible:
            results.append(Result(v.backend, "; ".join(v.refusals)))
        elif draw(st.integers(0, 4)) == 0:
            results.append(Result(v.backend, "relative error 0.5, want <= 0.01", 0.5))
        else:
            counts = GRID[: draw(st.integers(1, len(GRID)))]
            times = {m: draw(st.floats(1, 1e6)) for m in counts}
            results.append(Result(v.backend, "", 1e-3, times))
    return d, results


@given(measured(), st.integers(1, 2), st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_fails_nothing_refused_is_planned_and_no_refusal_is_lost(given_, copies, data):
    d, results = given_
    choice = Choice(3, d, results, copies)
    refused = {r.backend for r in results if r.refusal}
    while True:
        if refused == {r.backend for r in results}:
            with pytest.raises(BootError) as e:
                choice.plan()
            assert all(name in str(e.value) for name in refused)
            return
        plan = choice.plan()
        assert plan[-1][0] is None
        assert 1 <= len(plan) <= copies
        for _, row in plan:
            assert row.name not in refused
            assert [rule(row, d.problem) for rule in RULES] == [None] * len(RULES)
        assert choice.decision.require().name not in refused
        for v in choice.decision.verdicts:
            assert v.eligible == (v.backend not in refused)
        name = data.draw(st.sampled_from([row.name for _, row in plan]))
        choice.refuse(name, BackendRejectedError("packing", "it broke"))
        refused.add(name)
        assert next(v for v in choice.decision.verdicts if v.backend == name).refusals == ("when packing: it broke",)


@given(measured())
@settings(max_examples=150, deadline=None)
def test_the_fastest_of_the_whole_grid_wins(given_):
    d, results = given_
    timed = [r for r in results if not r.refusal]
    assume(timed)
    most = max(len(r.microseconds) for r in timed)
    costs = {r.backend: sum(map(math.log, r.microseconds.values())) for r in timed if len(r.microseconds) == most}
    ((_, row),) = Choice(0, d, results).plan()
    assert costs[row.name] == pytest.approx(min(costs.values()))


@given(measured(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_pin_is_the_tournaments_answer_for_that_backend(given_, data):
    """Pinning b plans what an autotuning run plans in which b alone is left, and b's verdict is that of the rules."""
    d, results = given_
    name = data.draw(st.sampled_from([v.backend for v in d.verdicts]))
    pinned = decide(d.problem, pin=name)
    eligible = next(v for v in d.verdicts if v.backend == name).eligible
    alone = [r if r.backend == name else replace(r, refusal="not asked", microseconds={}) for r in results]
    alone = [replace(r, refusal="", microseconds={1: 1.0}) if r.backend == name and eligible else r for r in alone]
    if not eligible:
        for choice in (Choice(0, pinned), Choice(0, d, alone)):
            with pytest.raises(BootError):
                choice.plan()
        return
    assert Choice(0, pinned).plan() == Choice(0, d, alone).plan() == [(None, ROWS[name])]
    for wrong in (True, False):
        with pytest.raises(BootError, match=name):
            Choice(0, pinned).refuse(name, BackendRejectedError("packing", "it broke", wrong))


CPU_ROWS = [b.name for b in BACKENDS if b.name in ("cpu", "cpu_torch", "reference")]


def boot(tmp_path, **options):
    config = ServeConfig(**({"synthetic": "tiny:int4_g32", "max_tokens": 8, "cache": tmp_path} | options))
    source, device = open_source(config), torch.device("cpu")
    plans = assign_layers(config, source, detect_device("cpu"), installed_packages(BACKENDS))
    return boot_layers(plans, Workshop(source, device), oracle=Autotuning.of(config, device, plans))


@pytest.mark.parametrize("name", CPU_ROWS)
def test_pinned_and_measured_give_the_same_bits(tmp_path, name, monkeypatch):
    if name == "cpu" and (error := kernel_error()):
        pytest.skip(error)
    pinned = boot(tmp_path, backend=name)

    def only(*args, **kwargs):
        return [
            r if r.refusal or r.backend == name else replace(r, refusal="not asked", microseconds={})
            for r in measure(*args, **kwargs)
        ]

    monkeypatch.setattr(measuring, "measure", only)
    free = boot(tmp_path, oracle="measure")
    for a, b in zip(pinned, free, strict=True):
        assert a.served.backend == b.served.backend == name
        assert (a.assignment.chosen_by, b.assignment.chosen_by) == ("pin", "measure")
        assert a.error == b.error
        verdict = {v.backend: v for v in b.assignment.decision.verdicts}[name]
        assert verdict.relative_error == pytest.approx(a.error, rel=0.2)
        for tokens in (1, 7):
            x, ids, w = random_inputs(tokens, 256, 8, 2)
            assert torch.equal(a.served.experts(x, ids, w), b.served.experts(x, ids, w))


def test_a_server_tells_what_a_faster_row_would_need():
    config = ServeConfig(synthetic="tiny:int4_g32", layers=Ranges.parse("0"), max_tokens=8)
    source, kernel = open_source(config), Package("1", "not built", "make it")
    plans = assign_layers(config, source, detect_device("cpu"), {"expertd-cpu-kernel": kernel})
    (b,) = boot_layers(plans, Workshop(source, torch.device("cpu")))
    said = describe_layer(b)
    assert said.backend == "cpu_torch"
    text = "faster backend cpu needs its compiled library: make it"
    assert said.advice == pb.Advice(backend="cpu", needs="its compiled library", command="make it", text=text)
    out = Console(file=StringIO(), width=80)
    show(out, "here", pb.DescribeResponse(layers=[said, said]), Session())
    assert out.file.getvalue().count(f"{text}\n") == 1
    pinned = replace(config, backend="reference")
    (asked,) = boot_layers(
        assign_layers(pinned, source, detect_device("cpu"), {}), Workshop(source, torch.device("cpu"))
    )
    assert not describe_layer(asked).HasField("advice")


def test_two_copies_share_the_work_and_say_so(tmp_path, monkeypatch):
    def crossing(*args, **kwargs):
        times = {"reference": {1: 1.0, 8: 90.0}, "cpu_torch": {1: 50.0, 8: 50.0}}
        return [
            replace(r, microseconds=times[r.backend])
            if r.backend in times
            else replace(r, refusal=r.refusal or "not asked", microseconds={})
            for r in measure(*args, **kwargs)
        ]

    monkeypatch.setattr(measuring, "measure", crossing)
    for b in boot(tmp_path, oracle="measure", copies=2):
        assert b.served.backend == "reference+cpu_torch"
        assert b.served.plan == ((2, "reference"), (None, "cpu_torch"))
        assert [b.served.backend_at(m) for m in (1, 2, 3, 100)] == ["reference"] * 2 + ["cpu_torch"] * 2
        said = describe_layer(b)
        assert [(p.max_tokens, p.backend) for p in said.plan] == [(2, "reference"), (0, "cpu_torch")]
        assert said.chosen_by == "measure"
        timed = {v.backend: [(t.tokens, t.microseconds) for t in v.times] for v in said.verdicts}
        assert timed["reference"] == [(1, 1.0), (8, 90.0)]
        assert all(0 < b.errors[n] < 1e-2 for n in ("reference", "cpu_torch"))
    (one,) = {b.served.backend for b in boot(tmp_path, oracle="measure")}
    assert one == "reference", "a second copy is kept only where that was asked for"


def test_a_second_copy_that_does_not_fit_is_not_kept(monkeypatch, caplog):
    config = ServeConfig(synthetic="qwen3-30b-a3b:int4_g128", oracle="measure", copies=2)
    plans = assign_layers(config, open_source(config), detect_device("cpu"), {})
    need = 2 * sum(p.decision.problem.weight_bytes for p in plans)
    for free, copies in ((need * 2, 2), (need, 1), (0, 1)):
        monkeypatch.setattr(measuring, "free_bytes", lambda device, free=free: free)
        assert affordable_copies(2, plans, torch.device("cpu")) == copies
    assert "keeping one copy of each layer" in caplog.text


def test_one_tournament_a_problem_and_none_for_pins(tmp_path, monkeypatch):
    asked = []

    def counting(weights, decision, *args, **kwargs):
        asked.append(decision.problem)
        return measure(weights, decision, *args, **kwargs)

    monkeypatch.setattr(measuring, "measure", counting)
    layers = boot(tmp_path, oracle="measure")
    assert (len(layers), len(asked)) == (2, 1)
    boot(tmp_path, oracle="measure")
    assert len(asked) == 1, "remembered in the cache's folder"
    for b in boot(tmp_path, oracle="measure", backend="reference", cache=tmp_path / "other"):
        assert b.assignment.chosen_by == "pin"
    assert len(asked) == 1
