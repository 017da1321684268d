"""The autotuning: broken backends are refused with their figure, the plan is a pure function of the times."""

from dataclasses import replace

import pytest
import torch

from expertd_kernels import Device, decide, problem_of, reference
from expertd_kernels.backends.reference import ReferenceExperts
from expertd_kernels.common.protocol import takes_e4m3
from expertd_kernels.measure import autotuning
from expertd_kernels.measure.autotuning import (
    BucketedExperts,
    MeasuringStoppedError,
    Remembered,
    Result,
    choose,
    measure,
    with_results,
)
from expertd_kernels.oracle.decision import Backend, DeviceRange, SchemeSupport
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import Element

CPU = Device("cpu", "x86_64")


def row(name):
    return Backend(
        name, "nowhere", (DeviceRange("cpu"),), (SchemeSupport(Element.INT4, None, None, zeros=True),), summary=""
    )


ROWS = (row("wrong"), row("raises"), row("unwritten"), row("right"), row("elsewhere"))
WEIGHTS = random_weights("int4_g32", 4, 64, 32)


class Wrong(ReferenceExperts):
    def __call__(self, *args, out=None, **kwargs):
        return super().__call__(*args, out=out, **kwargs).mul_(1.05)


class Unwritten(ReferenceExperts):
    def __call__(self, hidden_states, *args, out=None, **kwargs):
        y = super().__call__(hidden_states, *args, **kwargs)
        out[:, :-1] = y[:, :-1]  # the last column stays as it was: poisoned
        return out


def build(backend, weights, problem):
    if backend.name == "raises":
        raise ImportError("libfast.so: cannot open")
    return {"wrong": Wrong, "unwritten": Unwritten, "right": ReferenceExperts}[backend.name](weights)


def test_what_is_broken_is_refused_and_the_next_one_wins():
    rows = (*ROWS[:4], Backend("elsewhere", "nowhere", (DeviceRange("cuda"),), ROWS[0].schemes, summary=""))
    decision = decide(problem_of(WEIGHTS, CPU, top_k=2), rows, order={})
    assert decision.chosen.name == "wrong"  # by order alone the broken one would be taken
    results = measure(WEIGHTS, decision, rows, grid=(1, 4), build=build)
    said = {r.backend: r.refusal for r in results}
    assert said["right"] == ""
    assert said["wrong"].startswith("self-check against the float32 reference: relative error 0.0")
    assert "want <= 0.01" in said["wrong"]
    assert said["unwritten"] == "self-check against the float32 reference: relative error inf, want <= 0.01"
    assert said["raises"] == "failed when measured: ImportError: libfast.so: cannot open"
    assert "runs on cuda" in said["elsewhere"]
    measured = with_results(decision, results, rows)
    assert measured.chosen.name == "right"
    right = next(v for v in measured.verdicts if v.backend == "right")
    assert right.microseconds > 0
    assert right.relative_error < 1e-2
    assert [m for m, _ in right.times] == [1, 4]
    assert min(us for _, us in right.times) <= right.microseconds <= max(us for _, us in right.times)
    assert [v.backend for v in measured.verdicts if v.eligible] == ["right"]


def test_measuring_ends_between_two_calls_once_it_is_asked_to():
    calls = []

    class Counted(ReferenceExperts):
        def __call__(self, *args, **kwargs):
            calls.append(1)
            return super().__call__(*args, **kwargs)

    rows = (ROWS[3], replace(ROWS[3], name="after"))
    decision = decide(problem_of(WEIGHTS, CPU, top_k=2), rows, order={})
    build = lambda backend, weights, problem: Counted(weights)  # noqa: E731
    with pytest.raises(MeasuringStoppedError):
        measure(WEIGHTS, decision, rows, grid=(1, 4), build=build, stopped=lambda: len(calls) >= 4)
    assert len(calls) == 4
    with pytest.raises(MeasuringStoppedError):
        measure(WEIGHTS, decision, rows, build=lambda *_: pytest.fail("made"), stopped=lambda: True)


def result(name, *us):
    return Result(name, "", 1e-3, dict(zip((1, 8, 64, 512), us, strict=True)))


def test_the_plan_is_the_least_geometric_mean():
    assert choose([result("a", 10, 10, 10, 10), result("b", 5, 5, 5, 70)]) == [(None, "b")]
    assert choose([]) == []
    assert choose([Result("a", "refused")]) == []


def test_a_second_copy_must_be_worth_it():
    small, large = result("small", 5, 6, 100, 1000), result("large", 9, 10, 50, 300)
    assert choose([small, large], copies=2) == [(22, "small"), (None, "large")]
    nearly = [result("small", 8.9, 10, 100, 1000), result("large", 9, 10, 50, 300)]
    assert choose(nearly, copies=2) == [(None, "large")]


def test_one_that_was_given_up_is_taken_only_where_nothing_else_is_left():
    slow, fast = Result("slow", "", 1e-3, {1: 1.0}), result("fast", 10, 10, 10, 10)
    assert choose([slow, fast]) == [(None, "fast")]
    assert choose([slow, replace(fast, refusal="broke later")]) == [(None, "slow")]


def test_a_backend_much_slower_than_the_others_is_given_up(monkeypatch):
    took = []

    class Fast(ReferenceExperts):
        microseconds = 10.0

        def __call__(self, *args, **kwargs):
            took.append(self.microseconds)
            return super().__call__(*args, **kwargs)

    class Slow(Fast):
        microseconds = 50.0

    monkeypatch.setattr(autotuning, "time_calls", lambda call, *_: (call(0), took[-1])[1])
    rows = (row("right"), row("slow"))
    decision = decide(problem_of(WEIGHTS, CPU, top_k=2), rows, order={})
    kinds = {"right": Fast, "slow": Slow}
    results = measure(WEIGHTS, decision, rows, grid=(1, 2), build=lambda b, w, p: kinds[b.name](w), give_up=3.0)
    assert [list(r.microseconds) for r in results] == [[1, 2], [1]]
    assert [r.refusal for r in results] == ["", ""]
    assert choose(results) == [(None, "right")]


def test_pinning_a_backend_is_the_same_experts():
    decision = decide(problem_of(WEIGHTS, CPU, top_k=2), ROWS, pin="right", order={})
    assert decision.chosen.name == "right"
    results = measure(WEIGHTS, decision, ROWS, grid=(1,), build=build)
    assert choose(results) == [(None, "right")]


def test_buckets_dispatch_by_tokens():
    used = []

    class Noting(ReferenceExperts):
        def __init__(self, name):
            super().__init__(WEIGHTS)
            self.backend = name

        def __call__(self, *args, **kwargs):
            used.append(self.backend)
            return super().__call__(*args, **kwargs)

    experts = BucketedExperts([(4, Noting("small")), (None, Noting("large"))])
    assert experts.backend == "small+large"
    for m in (1, 4, 5, 100):
        x, ids, w = random_inputs(m, 64, 4, 2, dtype=torch.float32)
        assert torch.allclose(experts(x, ids, w), reference(WEIGHTS, x, ids, w), atol=1e-6)
    assert used == ["small", "small", "large", "large"]


def test_a_layer_takes_e4m3_where_every_backend_of_its_plan_does():
    class Taking:
        takes_e4m3 = True

        def __init__(self, name):
            self.backend = name

        def of_e4m3(self, codes, scales, ids, w, *, router_weight_on_input=False, out):
            return self.backend, codes, scales, ids, w, router_weight_on_input, out

    experts = BucketedExperts([(4, Taking("small")), (None, Taking("large"))])
    assert takes_e4m3(experts)
    for m, name in ((4, "small"), (5, "large")):
        given = torch.zeros(m, 128), 1, 2, 3
        assert experts.of_e4m3(*given, router_weight_on_input=True, out=4) == (name, *given, True, 4)
    assert not takes_e4m3(BucketedExperts([(4, Taking("small")), (None, ReferenceExperts(WEIGHTS))]))


def test_results_are_remembered_by_device_versions_and_shapes(tmp_path):
    p = problem_of(WEIGHTS, CPU, top_k=2)
    memory = Remembered(tmp_path)
    path = memory.path(p, "cpu x", "1")
    assert memory.find(path) is None
    results = [result("a", 1, 2, 3, 4), Result("b", "failed when measured: x")]
    memory.store(path, results)
    assert memory.find(path) == results
    others = [
        memory.path(p, "cpu y", "1"),
        memory.path(p, "cpu x", "2"),
        memory.path(problem_of(WEIGHTS, CPU, top_k=3), "cpu x", "1"),
        memory.path(p, "cpu x", "1", ROWS),
        memory.path(p, "cpu x", "1", grid=(1,)),
    ]
    assert len({path, *others}) == 6
    path.write_text("{")
    assert memory.find(path) is None


@pytest.mark.parametrize("bad", [[], [(4, None)]])
def test_a_plan_without_an_end_is_refused(bad):
    with pytest.raises(AssertionError, match="plan"):
        BucketedExperts(bad)
