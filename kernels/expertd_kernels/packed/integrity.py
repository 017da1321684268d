"""The integrity record of packed weights: the batch that experts are proven on, and the answer it must have.

One row for each local expert, in which that expert's route dominates (weight 1 against 0.1 to 0.2), so that a single
wrong expert of hundreds makes a row wrong, not just the sum a little worse; and one row without a route.

The reference costs what dequantizing costs.  With `reference_experts` only the rows of that many experts, spread over
the layer, have a float32 reference.

A proof is a handful of tensors, so it is kept beside packed weights: whoever maps them can check them without having
the canonical weights.  What is kept is condensed: the rows with a reference, and one row for each top_k other experts;
all of them are compared with `accepted`, too: what the packed layer gave when it had passed the whole check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import COMPUTE_DTYPE

# Why it is so: decision 34 in DECISIONS.md.
__all__ = ["IntegrityRecord", "boot_reference_experts", "prove", "reference_rows"]

BOOT_WEIGHTS = 64 << 20
"""Weights of a layer that the check at boot compares: about half a second on one core of a CPU."""
LATER_WEIGHTS = 12 << 20
"""The same of a layer like one that was compared before, by the same code: or checking would hold up reading."""


@dataclass(frozen=True, eq=False)
class IntegrityRecord:
    """x [M, H] in the compute dtype; ids [M, k] int32 slots; weights [M, k] f32.

    dominant  [M] int32: the slot whose weight is 1 (of a condensed row the first one), -1 where no route is
    expected  [C, H] f32: the float32 reference of the first C rows; the routes of a row go to experts of its own kind
              only, so those rows never depend on the others
    accepted  [M, H] in the compute dtype: the answer of a backend that passed; None before one did
    digests   [E] int64: of the canonical weights (weights.digest), for whoever has the packed ones alone
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    dominant: Tensor
    expected: Tensor
    accepted: Tensor | None = None
    digests: Tensor | None = None

    NEEDED: ClassVar = frozenset({"x", "ids", "weights", "dominant", "expected"})
    OPTIONAL: ClassVar = frozenset({"accepted", "digests"})
    """Fields by name."""

    @property
    def experts_compared(self) -> int:
        return len(self.expected) - 1

    @property
    def num_experts(self) -> int:
        return int(self.ids.max()) + 1

    def tensors(self) -> dict[str, Tensor]:
        """By field name."""
        return {name: t for name, t in vars(self).items() if t is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> IntegrityRecord:
        """The inverse of tensors()."""
        return cls(**tensors)

    def to(self, device: torch.device) -> IntegrityRecord:
        return IntegrityRecord.of({name: t.to(device) for name, t in self.tensors().items()})

    def accept(self, output: Tensor) -> IntegrityRecord:
        """The proof with `output` [M, H] as what its rows are compared with from now on."""
        return replace(self, accepted=output.to(self.x.dtype))

    def condense(self) -> IntegrityRecord:
        """The rows with a reference, then rows whose routes hit every other expert once, each with weight 1: a wrong
        one among top_k is a third of its row and more."""
        first, top_k = len(self.expected), self.ids.shape[1]
        others = self.dominant[first:]
        rows = -(-len(others) // top_k)
        ids = torch.full((rows * top_k,), -1, dtype=torch.int32, device=self.ids.device)
        ids[: len(others)] = others
        ids = ids.view(rows, top_k)
        return IntegrityRecord(
            self.x[: first + rows],
            torch.cat([self.ids[:first], ids]),
            torch.cat([self.weights[:first], torch.ones_like(ids, dtype=torch.float32)]),
            torch.cat([self.dominant[:first], ids[:, 0]]),
            self.expected,
            digests=self.digests,
        )


def boot_reference_experts(weights: Weights, later: bool = False) -> int:
    """Experts of a layer to compare where a full check would hold up the boot: at least two.  later: a layer like it
    was compared before."""
    each = weights.w13.shape[1] * weights.w13.shape[2] + weights.w2.shape[1] * weights.w2.shape[2]
    return min(weights.num_experts, max(2, (LATER_WEIGHTS if later else BOOT_WEIGHTS) // each))


def prove(
    weights: Weights,
    problem: Problem,
    *,
    reference_experts: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> IntegrityRecord:
    """The batch for canonical `weights`, with its float32 reference.

    reference_experts: how many experts are compared; None = all.  device: where the experts to be proven compute;
    default: the first of problem.device's kind.  The reference is computed there, too, one expert at a time.
    """
    kind = "cuda" if problem.device.kind == "rocm" else problem.device.kind
    where = torch.device(kind if device is None else device)
    compared = _spread(weights.num_experts, reference_experts)
    x, ids, w, dominant = (t.to(where) for t in _batch(weights, problem, compared, seed))
    rows = slice(0, len(compared) + 1)
    expected = reference_rows(weights, x[rows], ids[rows], w[rows], problem.router_weight_on_input)
    return IntegrityRecord(x, ids, w, dominant, expected)


def _spread(E: int, wanted: int | None) -> list[int]:
    """The slots to compare: all, or `wanted` of them from the first to the last."""
    if wanted is None or wanted >= E:
        return list(range(E))
    if wanted < 1:
        raise ValueError(f"self-check: {wanted} reference experts, want at least 1")
    return [round(i * (E - 1) / max(1, wanted - 1)) for i in range(wanted)]


def _batch(
    weights: Weights, problem: Problem, compared: Sequence[int], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, ids, weights, dominant): a row for each compared expert, one without a route, one for each other expert."""
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
    x = torch.randn(rows, weights.hidden_size, generator=g).to(COMPUTE_DTYPE[problem.compute_dtype])
    return x, ids.gather(1, place), w.gather(1, place).contiguous(), dominant


def reference_rows(weights: Weights, x: Tensor, ids: Tensor, w: Tensor, router_weight_on_input: bool) -> Tensor:
    """[M, H] f32, on x's device, whatever device the weights are on; one expert there at a time."""
    out = torch.zeros(x.shape, device=x.device)
    for e in torch.unique(ids).tolist():
        if e < 0:
            continue
        token, j = (ids == e).nonzero(as_tuple=True)
        one = weights.experts(slice(e, e + 1)).to(x.device)
        part = reference(
            one,
            x[token],
            torch.zeros(len(token), 1, dtype=torch.int32, device=x.device),
            w[token, j][:, None],
            router_weight_on_input=router_weight_on_input,
        )
        out.index_add_(0, token, part)
    return out
