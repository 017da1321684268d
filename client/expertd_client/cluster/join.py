"""Partial sums of servers -> the answer: added in float32, in the order in which they are given.

Who calls gives them in an order that depends on the batch and the placement alone, so the bits depend neither on when
answers came nor on which replica made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sum", "join", "renormalized"]


class Sum(NamedTuple):
    """rows: [m] i64, ascending, the tokens in the batch; None = all.  values: [m, H] f32, f16 or bf16."""

    rows: NDArray[np.int64] | None
    values: NDArray[Any]


def join(sums: Sequence[Sum], out: NDArray[Any], scale: NDArray[np.float32] | None = None) -> None:
    """Writes the sum of `sums` over each token into `out` [M, H] f32, f16 or bf16: zeros where it is in none.

    scale: [M] f32, what each token's sum is multiplied with."""
    total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    fresh = np.ones(len(out), bool)  # tokens that have no sum yet: those are written, not added to
    for rows, values in sums:
        if rows is None and fresh.all():
            total[...] = values
            fresh[:] = False
        elif rows is None:
            rows = np.arange(len(out))
        if rows is not None:
            first = fresh[rows]
            if first.all():
                total[rows] = values
            elif first.any():
                total[rows[first]] = values[first]
                total[rows[~first]] += values[~first]
            else:
                total[rows] += values
            fresh[rows] = False
    total[fresh] = 0
    if scale is not None:
        total *= scale[:, None]
    if total is not out:
        out[...] = total


def renormalized(ids: NDArray[Any], weights: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[M] f32: what the sum of each token is multiplied with so that the weights of the routes that were computed add
    up to those that were asked for; 1 where none is missing or none is left.

    ids, weights: [M, top_k]; missing: [M, top_k], the routes that were not computed"""
    wanted = np.where(ids >= 0, weights, 0).astype(np.float32)
    whole, left = wanted.sum(axis=1), np.where(missing, 0, wanted).sum(axis=1)
    touched = missing.any(axis=1) & (left != 0)
    scale = np.ones(len(ids), np.float32)
    np.divide(whole, left, out=scale, where=touched)
    return scale
