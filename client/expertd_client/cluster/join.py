"""Partial sums of servers -> the answer: added in float32, in the order in which they are given.

Who calls gives them in an order that depends on the batch and the placement alone, so the bits depend neither on when
answers came nor on which replica made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertd_client.cluster.native import at, library

__all__ = ["Sum", "adds_up", "join", "join_numpy", "renormalized"]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_NATIVE = (np.dtype(np.float32), _BF16)


class Sum(NamedTuple):
    """rows: [m] i64, ascending, the tokens in the batch; None = all.  values: [m, H] f32, f16 or bf16."""

    rows: NDArray[np.int64] | None
    values: NDArray[Any]


def join(sums: Sequence[Sum], out: NDArray[Any], scale: NDArray[np.float32] | None = None) -> None:
    """Writes the sum of `sums` over each token into `out` [M, H] f32, f16 or bf16: zeros where it is in none.

    scale: [M] f32, what each token's sum is multiplied with."""
    native = library()
    if native is None or not sums or not _takes(sums, out):
        join_numpy(sums, out, scale)
        return
    parts = np.array([(0 if s.rows is None else at(s.rows), len(s.values), at(s.values), 0, 0) for s in sums])
    native.join(
        at(parts),
        len(sums),
        sums[0].values.dtype == _BF16,
        out.shape[0],
        out.shape[1],
        None if scale is None else at(scale),
        at(out),
        out.dtype == _BF16,
        out.strides[0],
    )


def adds_up(sums: np.dtype[Any], out: NDArray[Any]) -> bool:
    """Whether the C++ twin adds sums of that dtype up into such an array."""
    return sums in _NATIVE and out.dtype in _NATIVE and out.strides[1] == out.itemsize


def _takes(sums: Sequence[Sum], out: NDArray[Any]) -> bool:
    """Whether the C++ twin reads and writes such arrays."""
    dtype = sums[0].values.dtype
    return adds_up(dtype, out) and all(
        s.values.dtype == dtype and s.values.flags.c_contiguous and (s.rows is None or s.rows.flags.c_contiguous)
        for s in sums
    )


def join_numpy(sums: Sequence[Sum], out: NDArray[Any], scale: NDArray[np.float32] | None = None) -> None:
    """join() without its C++ twin: the same bits, several times slower."""
    total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    fresh = np.ones(len(out), bool)  # tokens that have no sum yet: those are written, not added to
    for given, values in sums:
        rows = np.arange(len(out)) if given is None else given
        first = fresh[rows]
        total[rows[first]] = values[first]
        total[rows[~first]] += values[~first]
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
