"""The proof before serving: packed experts against the float32 reference, on a small batch that hits every expert.

    proof = prove(weights, problem)                      the batch and its reference, from canonical weights
    found = check(experts, proof, problem, weights)      before anything is served
    kept  = accept(experts, proof, problem)              of experts that passed: a smaller proof, to be kept with them
    found = check(experts, kept, problem)                packed weights that were mapped: no canonical ones needed

The same reference rows judge a call with all rows and calls with few: a backend may take different kernels for them.
Rows without a reference: with `weights`, one that is not finite or not of the compared rows' size is compared after
all; without, every row is compared with the accepted answer that the proof carries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Experts
from expertd_kernels.packed.integrity import IntegrityRecord, boot_reference_experts, prove, reference_rows
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.numerics import relative_error, tolerance

# Why it is so: decision 44 in DECISIONS.md.
__all__ = ["SMALL_BATCHES", "SelfCheck", "accept", "boot_reference_experts", "check", "self_check"]

Run = Callable[[Callable[[], Tensor]], Tensor]
"""The result of work()."""

ROW_SLACK = 4.0
"""A single row may be this much worse than the tolerance, which is meant for whole batches."""
SIZE_SLACK = 30.0
"""Rows of experts that are not compared may be this much larger or smaller than the mean of the compared ones."""
SMALL_BATCHES = (1, 4)


@dataclass(frozen=True)
class SelfCheck:
    """relative_error: of the worst call; worst_row_error: of the worst row, in which the route to worst_expert (a slot)
    dominates; experts_compared of num_experts with a float32 reference; fault: why it is not ok, "" if it is."""

    relative_error: float
    worst_row_error: float
    worst_expert: int
    tolerance: float
    experts_compared: int
    num_experts: int
    seconds: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault


def self_check(
    experts: Experts,
    weights: Weights,
    problem: Problem,
    *,
    reference_experts: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> SelfCheck:
    """prove() and check() in one: run `experts`, packed from canonical `weights`, and compare."""
    start = time.perf_counter()
    proof = prove(weights, problem, reference_experts=reference_experts, device=device, seed=seed)
    found = check(experts, proof, problem, weights)
    return replace(found, seconds=time.perf_counter() - start)


def check(
    experts: Experts,
    proof: IntegrityRecord,
    problem: Problem,
    weights: Weights | None = None,
    run: Run = lambda work: work(),
) -> SelfCheck:
    """Run `experts` on the proof's batch and compare.  run: does so for each call of the experts, and for nothing else.
    ValueError without `weights` where the proof has no accepted answer: some rows would not be judged."""
    start = time.perf_counter()
    if weights is None and proof.accepted is None:
        raise ValueError("self-check: neither canonical weights nor an accepted answer to compare with")
    ref = proof.expected
    out = run(lambda: _call(experts, proof, len(proof.x), problem))
    calls = [relative_error(out[: len(ref)], ref)]
    same = True
    for few in (min(f, len(ref)) for f in SMALL_BATCHES):
        small = run(partial(_call, experts, proof, few, problem))
        calls.append(relative_error(small, ref[:few]))
        same = same and torch.equal(small, out[:few])
    rows = _row_errors(out[: len(ref)], ref)
    worst = int(rows.argmax())
    found = SelfCheck(
        max(calls),
        float(rows[worst]),
        int(proof.dominant[worst]),
        tolerance(problem.compute_dtype, problem.activation_quant),
        proof.experts_compared,
        proof.num_experts,
        0.0,
    )
    promised = (
        "" if same or not problem.batch_invariant else "a token's bits depend on the batch that it is computed in"
    )
    others = _fault_of_strange(out, proof, weights, problem, found.tolerance) if weights is not None else ""
    return replace(
        found,
        fault=_fault(found) or promised or others or _fault_of_accepted(out, proof, found.tolerance),
        seconds=time.perf_counter() - start,
    )


def accept(experts: Experts, proof: IntegrityRecord, problem: Problem) -> IntegrityRecord:
    """The condensed proof, with what `experts`, which have passed check(), give for it."""
    small = proof.condense()
    return small.accept(_call(experts, small, len(small.x), problem))


def _call(experts: Experts, proof: IntegrityRecord, rows: int, problem: Problem) -> Tensor:
    """[rows, H] f32 of one call with the first rows, into a poisoned buffer."""
    x = proof.x[:rows]
    out = torch.full_like(x, float("nan"))
    with torch.inference_mode():
        got = experts(
            x,
            proof.ids[:rows],
            proof.weights[:rows],
            router_weight_on_input=problem.router_weight_on_input,
            out=out,
        )
    return got.float()


def _row_errors(out: Tensor, ref: Tensor) -> Tensor:
    """[M] relative error of each row; a row whose reference is zero must be zero (0 or inf)."""
    error, size = (out - ref).double().norm(dim=1), ref.double().norm(dim=1)
    exact = torch.where(error == 0, torch.zeros_like(error), torch.full_like(error, float("inf")))
    return torch.where(size > 0, error / size.clamp_min(1e-300), exact).nan_to_num(
        nan=float("inf"), posinf=float("inf")
    )


def _fault(found: SelfCheck) -> str:
    """Why the compared rows fail the check; "" if they do not."""
    if not found.relative_error <= found.tolerance:
        return f"relative error {found.relative_error:.3g}, want <= {found.tolerance:g}"
    if not found.worst_row_error <= ROW_SLACK * found.tolerance:
        return _row_fault(found.worst_row_error, found.worst_expert, found.tolerance)
    return ""


def _row_fault(error: float, slot: int, limit: float) -> str:
    return f"relative error {error:.3g} in the row of expert slot {slot}, want <= {ROW_SLACK * limit:g}"


def _fault_of_strange(out: Tensor, proof: IntegrityRecord, weights: Weights, problem: Problem, limit: float) -> str:
    """Why a row without a reference fails; the first few of a strange size are compared with their reference."""
    first = len(proof.expected)
    norms = out.double().norm(dim=1)
    size = norms[: first - 1].mean()  # without the row that has no routes
    strange = ~((norms <= SIZE_SLACK * size) & (norms * SIZE_SLACK >= size))
    strange[:first] = False
    for i in strange.nonzero().flatten().tolist()[:4]:
        row = slice(i, i + 1)
        ref = reference_rows(weights, proof.x[row], proof.ids[row], proof.weights[row], problem.router_weight_on_input)
        error = float(_row_errors(out[row], ref)[0])
        if not error <= ROW_SLACK * limit:
            return _row_fault(error, int(proof.dominant[i]), limit)
    return ""


def _fault_of_accepted(out: Tensor, proof: IntegrityRecord, limit: float) -> str:
    """Why a row differs from the accepted answer; "" where there is none or no row does."""
    if proof.accepted is None:
        return ""
    rows = _row_errors(out, proof.accepted.float())
    worst = int(rows.argmax())
    if float(rows[worst]) <= ROW_SLACK * limit:
        return ""
    return f"{_row_fault(float(rows[worst]), int(proof.dominant[worst]), limit)}, against the answer accepted before"
