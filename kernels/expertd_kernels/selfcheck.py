"""The proof before serving: packed experts against the float32 reference, on a small batch that hits every expert.

The batch has one row for each local expert, in which that expert's route dominates (weight 1 against 0.1 to 0.2), so
that a single wrong expert of hundreds makes a row wrong, not just the sum a little worse.  The same reference rows
judge a call with all rows and calls with few: a backend may take different kernels for them.

The reference costs what dequantizing costs.  With `reference_experts` only that many experts, spread over the layer,
are compared; all the others are still run, and a row that is not finite or not of the compared rows' size is compared
after all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertd_kernels.backends.protocol import Experts
from expertd_kernels.canonical import Weights
from expertd_kernels.float32 import reference
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.problem import Problem

__all__ = ["SelfCheck", "boot_reference_experts", "self_check"]

ROW_SLACK = 4.0
"""A single row may be this much worse than the tolerance, which is meant for whole batches."""
SIZE_SLACK = 30.0
"""Rows of experts that are not compared may be this much larger or smaller than the mean of the compared ones."""
SMALL_BATCHES = (1, 4)
BOOT_WEIGHTS = 64 << 20
"""Weights of a layer that the check at boot compares: about a quarter of a second on one core of a CPU."""


@dataclass(frozen=True)
class SelfCheck:
    """relative_error: of the worst call; worst_row_error: of the worst row, in which the route to worst_expert (a slot)
    dominates; experts_compared of num_experts; fault: why it is not ok, "" if it is."""

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


@dataclass(frozen=True)
class _Batch:
    """x [M, H]; ids [M, k] slots; weights [M, k]; dominant [M]: the slot whose weight is 1, -1 where no route is."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dominant: Tensor

    def rows(self, select: slice | Tensor) -> _Batch:
        return _Batch(self.x[select], self.ids[select], self.weights[select], self.dominant[select])


def self_check(
    experts: Experts,
    weights: Weights,
    problem: Problem,
    *,
    reference_experts: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> SelfCheck:
    """Run `experts`, packed from canonical `weights`, and compare.

    reference_experts: how many experts are compared; None = all.  device: where `experts` computes; default: the first
    of problem.device's kind.  The reference is computed there, too, one expert at a time.
    """
    start = time.perf_counter()
    kind = "cuda" if problem.device.kind == "rocm" else problem.device.kind
    where = torch.device(kind if device is None else device)
    E = weights.num_experts
    compared = _spread(E, reference_experts)
    batch = _batch(weights, problem, compared, where, seed)
    judged = batch.rows(slice(0, len(compared) + 1))
    ref = _reference(weights, judged, problem.router_weight_on_input)
    out = _call(experts, batch, problem)
    calls = [relative_error(out[: len(ref)], ref)]
    for few in (min(f, len(ref)) for f in SMALL_BATCHES):
        calls.append(relative_error(_call(experts, batch.rows(slice(0, few)), problem), ref[:few]))
    rows = _row_errors(out[: len(ref)], ref)
    worst = int(rows.argmax())
    found = SelfCheck(
        max(calls),
        float(rows[worst]),
        int(judged.dominant[worst]),
        tolerance(problem.compute_dtype, problem.activation_quant),
        len(compared),
        E,
        time.perf_counter() - start,
    )
    fault = _fault(found) or _fault_of_others(out, batch, weights, problem, len(ref), found.tolerance)
    return replace(found, seconds=time.perf_counter() - start, fault=fault)


def boot_reference_experts(weights: Weights) -> int:
    """Experts of a layer to compare where a full check would hold up the boot: at least two."""
    each = weights.w13.shape[1] * weights.w13.shape[2] + weights.w2.shape[1] * weights.w2.shape[2]
    return min(weights.num_experts, max(2, BOOT_WEIGHTS // each))


def _spread(E: int, wanted: int | None) -> list[int]:
    """The slots to compare: all, or `wanted` of them from the first to the last."""
    if wanted is None or wanted >= E:
        return list(range(E))
    if wanted < 1:
        raise ValueError(f"self-check: {wanted} reference experts, want at least 1")
    return [round(i * (E - 1) / max(1, wanted - 1)) for i in range(wanted)]


def _batch(weights: Weights, problem: Problem, compared: Sequence[int], where: torch.device, seed: int) -> _Batch:
    """A row for each compared expert, a row without a route, then a row for each of the others.

    The routes of a row go to experts of its own kind only: rows that are compared never depend on others.
    """
    g = torch.Generator().manual_seed(seed)
    others = sorted(set(range(weights.num_experts)) - set(compared))
    rows = len(compared) + 1 + len(others)
    ids = torch.full((rows, problem.top_k), -1, dtype=torch.int32)
    for first, group in ((0, list(compared)), (len(compared) + 1, others)):
        if not group:
            continue
        order = torch.tensor(group, dtype=torch.int32)
        for j in range(min(problem.top_k, len(group))):
            ids[first : first + len(group), j] = order.roll(-j)
    w = 0.1 + 0.1 * torch.rand(rows, problem.top_k, generator=g)
    w[:, 0] = 1.0
    dominant = ids[:, 0].clone()
    place = torch.argsort(torch.rand(rows, problem.top_k, generator=g), dim=1)  # the dominant route stands anywhere
    dtype = torch.bfloat16 if problem.compute_dtype == "bf16" else torch.float32
    x = torch.randn(rows, weights.hidden_size, generator=g).to(dtype)
    return _Batch(
        x.to(where), ids.gather(1, place).to(where), w.gather(1, place).contiguous().to(where), dominant.to(where)
    )


def _reference(weights: Weights, batch: _Batch, router_weight_on_input: bool) -> Tensor:
    """[M, H] f32, on the batch's device, whatever device the weights are on; one expert there at a time."""
    out = torch.zeros(batch.x.shape, device=batch.x.device)
    for e in torch.unique(batch.ids).tolist():
        if e < 0:
            continue
        token, j = (batch.ids == e).nonzero(as_tuple=True)
        one = weights.experts(slice(e, e + 1)).to(batch.x.device)
        part = reference(
            one,
            batch.x[token],
            torch.zeros(len(token), 1, dtype=torch.int32, device=batch.x.device),
            batch.weights[token, j][:, None],
            router_weight_on_input=router_weight_on_input,
        )
        out.index_add_(0, token, part)
    return out


def _call(experts: Experts, batch: _Batch, problem: Problem) -> Tensor:
    """[M, H] f32 of one call, into a poisoned buffer."""
    out = torch.full_like(batch.x, float("nan"))
    got = experts(batch.x, batch.ids, batch.weights, router_weight_on_input=problem.router_weight_on_input, out=out)
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


def _fault_of_others(
    out: Tensor, batch: _Batch, weights: Weights, problem: Problem, compared_rows: int, limit: float
) -> str:
    """Why a row from `compared_rows` on fails; the first few of a strange size are compared with their reference."""
    norms = out.double().norm(dim=1)
    size = norms[: compared_rows - 1].mean()  # without the row that has no routes
    strange = ~((norms <= SIZE_SLACK * size) & (norms * SIZE_SLACK >= size))
    strange[:compared_rows] = False
    for i in strange.nonzero().flatten().tolist()[:4]:
        row = batch.rows(slice(i, i + 1))
        error = float(_row_errors(out[i : i + 1], _reference(weights, row, problem.router_weight_on_input))[0])
        if not error <= ROW_SLACK * limit:
            return _row_fault(error, int(row.dominant[0]), limit)
    return ""
