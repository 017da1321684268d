"""The self-check: passes what is right, and sees each way of being wrong that it is there for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expertd_kernels import ActivationQuant, Problem, Weights, build, decide, detect_device, problem_of
from expertd_kernels.backends.reference import ReferenceExperts
from expertd_kernels.common.protocol import Experts
from expertd_kernels.packed.integrity import prove
from expertd_kernels.packed.selfcheck import accept, boot_reference_experts, check, self_check
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.activation import Activation, ActivationKind


def right(weights: Weights, **problem: object) -> tuple[Experts, Problem]:
    p = problem_of(weights, detect_device("cpu"), **problem)  # type: ignore[arg-type]
    return build(decide(p, pin="reference"), weights), p


@pytest.mark.parametrize(
    ("scheme", "experts", "top_k", "compute_dtype"),
    [
        ("int4_g32_zp", 8, 2, "f32"),
        ("mxfp4", 5, 3, "bf16"),
        ("bf16", 1, 1, "bf16"),
        ("e4m3_block128", 3, 8, "bf16"),  # more routes a token than experts here
    ],
)
def test_right_experts_pass(scheme: str, experts: int, top_k: int, compute_dtype: str) -> None:
    w = random_weights(scheme, experts, 96, 64)
    e, p = right(w, top_k=top_k, compute_dtype=compute_dtype)
    found = self_check(e, w, p)
    assert found.ok, found
    assert found.experts_compared == found.num_experts == experts
    assert 0 <= found.relative_error <= found.tolerance
    assert found.tolerance == (2e-3 if compute_dtype == "f32" else 1e-2)


def test_router_weight_on_input_and_bias_pass() -> None:
    w = random_weights("int8_channel", 4, 64, 32, bias=True, activation=Activation(ActivationKind.SWIGLUOAI, limit=7.0))
    e, p = right(w, top_k=1, router_weight_on_input=True)
    assert self_check(e, w, p).ok


def test_a_promise_of_the_same_bits_in_any_batch_is_kept_or_seen() -> None:
    w = random_weights("int8_channel", 8, 256, 128)
    p = problem_of(w, detect_device("cpu"), top_k=2, compute_dtype="f32", batch_invariant=True)
    assert self_check(build(decide(p, pin="reference"), w), w, p).ok

    class Wavers(ReferenceExperts):
        def __call__(self, x, *more, **named):  # type: ignore[no-untyped-def]
            return super().__call__(x, *more, **named).mul_(1 + 1e-6 * len(x))

    class WaversAlone(ReferenceExperts):
        def __call__(self, x, *more, **named):  # type: ignore[no-untyped-def]
            return super().__call__(x, *more, **named).mul_(1 + 1e-6 * (len(x) == 1))

    assert not self_check(WaversAlone(w, True), w, p).ok
    found = self_check(Wavers(w, True), w, p)
    assert found.fault == "a token's bits depend on the batch that it is computed in"
    assert self_check(Wavers(w), w, problem_of(w, detect_device("cpu"), top_k=2, compute_dtype="f32")).ok


class Broken:
    """Reference experts with a fault."""

    backend = "broken"

    def __init__(self, weights: Weights, fault: str, slot: int) -> None:
        self.inner = ReferenceExperts(weights)
        self.fault, self.slot = fault, slot

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):  # type: ignore[no-untyped-def]
        hit = ids == self.slot
        if self.fault == "expert dropped":
            ids = torch.where(hit, torch.full_like(ids, -1), ids)
        elif self.fault == "expert swapped":
            ids = torch.where(hit, (ids + 1) % self.inner.weights.num_experts, ids)
        elif self.fault == "weight ignored":
            weights = torch.ones_like(weights)
        elif self.fault == "absent route computed":
            ids = ids.clamp_min(0)
        y = self.inner(x, ids, weights, router_weight_on_input=router_weight_on_input)
        if self.fault == "rows not written" and out is not None:
            return out
        if self.fault == f"one row off at M = {len(x)}":
            y = y * 1.1
        if self.fault == "too large":
            y[hit.any(dim=1)] *= 100
        if self.fault == "nan for an expert":
            y[hit.any(dim=1)] = float("nan")
        return y if out is None else out.copy_(y)


FAULTS = (
    "expert dropped",
    "expert swapped",
    "weight ignored",
    "absent route computed",
    "rows not written",
    "one row off at M = 1",
    "one row off at M = 4",
    "nan for an expert",
)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("slot", [0, 17, 63])
def test_every_fault_is_seen(fault: str, slot: int) -> None:
    w = random_weights("int4_g32", 64, 64, 32)
    p = problem_of(w, detect_device("cpu"), top_k=4)
    found = self_check(Broken(w, fault, slot), w, p)
    assert not found.ok
    assert "want <=" in found.fault


def test_one_wrong_expert_of_many_is_seen_even_where_activations_are_rounded_coarsely() -> None:
    """The tolerance of nvfp4 activations, 0.2, is more than one expert of 64 changes in the sum: the row shows it."""
    w = random_weights("int4_g32", 64, 64, 32)
    p = replace(problem_of(w, detect_device("cpu"), top_k=4), activation_quant=ActivationQuant.NVFP4)
    found = self_check(Broken(w, "expert swapped", 40), w, p)
    assert not found.ok
    assert self_check(ReferenceExperts(w), w, p).ok


@pytest.mark.parametrize("fault", ["expert dropped", "nan for an expert"])
def test_bounded_check_sees_experts_that_are_not_compared(fault: str) -> None:
    w = random_weights("int4_g32", 32, 64, 32)
    p = problem_of(w, detect_device("cpu"), top_k=1)
    assert self_check(ReferenceExperts(w), w, p, reference_experts=4).experts_compared == 4
    found = self_check(Broken(w, fault, 13), w, p, reference_experts=4)
    assert not found.ok
    assert "13" in found.fault


WITH_ROUTES = [(k, fault) for k in (1, 4, 5) for fault in FAULTS if (k, fault) != (1, "weight ignored")]
"""With one route a token every weight of the batch is 1."""


@pytest.mark.parametrize(("top_k", "fault"), WITH_ROUTES)
@pytest.mark.parametrize("slot", [0, 13, 31])
def test_a_kept_proof_sees_every_fault_of_every_expert_without_canonical_weights(
    top_k: int, fault: str, slot: int
) -> None:
    w = random_weights("int4_g32", 32, 64, 32)
    p = problem_of(w, detect_device("cpu"), top_k=top_k)
    kept = accept(ReferenceExperts(w), prove(w, p, reference_experts=4), p)
    assert len(kept.x) == 5 + -(-28 // top_k)
    assert sorted(set(kept.ids.flatten().tolist()) - {-1}) == list(range(32))
    assert check(ReferenceExperts(w), kept, p).ok
    assert not check(Broken(w, fault, slot), kept, p).ok


def test_bounded_check_compares_a_strange_row_before_it_complains() -> None:
    """An expert whose weights are all zero gives a zero row, rightly."""
    w = random_weights("int8_channel", 16, 64, 32)
    assert w.w2.scales is not None
    w.w2.scales[9] = 0
    p = problem_of(w, detect_device("cpu"), top_k=1)
    assert self_check(ReferenceExperts(w), w, p, reference_experts=2).ok


def test_rows_that_need_no_look_take_no_place_of_those_that_do() -> None:
    """Four strange rows are compared; the compared ones, the one without a route among them, are none of these."""
    w = random_weights("int8_channel", 16, 64, 32)
    assert w.w2.scales is not None
    w.w2.scales[[3, 5, 7]] = 0
    p = problem_of(w, detect_device("cpu"), top_k=1)
    assert self_check(ReferenceExperts(w), w, p, reference_experts=2).ok
    found = self_check(Broken(w, "expert dropped", 9), w, p, reference_experts=2)
    assert "expert slot 9" in found.fault


def test_a_row_that_is_too_large_is_seen_where_all_are_small() -> None:
    w = random_weights("int8_channel", 16, 64, 32)
    assert w.w2.scales is not None
    w.w2.scales.mul_(1e-4)
    p = problem_of(w, detect_device("cpu"), top_k=1, compute_dtype="f32")
    assert self_check(ReferenceExperts(w), w, p, reference_experts=2).ok
    found = self_check(Broken(w, "too large", 9), w, p, reference_experts=2)
    assert "expert slot 9" in found.fault


def test_what_has_nothing_to_be_compared_with_is_not_checked_by_half() -> None:
    w = random_weights("int8_channel", 16, 64, 32)
    p = problem_of(w, detect_device("cpu"))
    with pytest.raises(ValueError, match="neither canonical weights nor an accepted answer"):
        check(ReferenceExperts(w), prove(w, p, reference_experts=2), p)


def test_bounds() -> None:
    w = random_weights("int8_channel", 16, 64, 32)
    p = problem_of(w, detect_device("cpu"))
    with pytest.raises(ValueError, match="want at least 1"):
        self_check(ReferenceExperts(w), w, p, reference_experts=0)
    assert boot_reference_experts(w) == 16


def test_only_calls_of_the_experts_are_run_where_nothing_else_may() -> None:
    w = random_weights("int8_channel", 4, 64, 32)
    e, p = right(w, top_k=2)
    inside, calls = [False], []

    class Watched:
        backend = e.backend

        def __call__(self, *args: object, **more: object) -> torch.Tensor:
            assert inside[0]
            calls.append(1)
            return e(*args, **more)  # type: ignore[arg-type]

    def run(work):  # type: ignore[no-untyped-def]
        inside[0] = True
        out = work()
        inside[0] = False
        return out

    assert check(Watched(), prove(w, p), p, w, run).ok  # type: ignore[arg-type]
    assert len(calls) == 3
