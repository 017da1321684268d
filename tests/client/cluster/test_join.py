"""Sums of parts: the C++ twin and numpy give the same bits, and those of adding in the given order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from expertd_client.cluster import join as module
from expertd_client.cluster.join import Sum, join, join_numpy, renormalized

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(1)


def sums_of(tokens, hidden, parts, dtype, whole=False):
    found = []
    for n in range(parts):
        rows = np.sort(RNG.permutation(tokens)[: RNG.integers(0, tokens + 1)]).astype(np.int64)
        count = tokens if whole and n == 1 else len(rows)
        values = (RNG.standard_normal((count, hidden)) * 10.0 ** RNG.integers(-3, 4)).astype(np.float32).astype(dtype)
        found.append(Sum(None if whole and n == 1 else rows, values))
    return found


def slowly(sums, tokens, hidden, scale):
    total = np.zeros((tokens, hidden), np.float32)
    seen = set()
    for rows, values in sums:
        for n, t in enumerate(range(tokens) if rows is None else rows.tolist()):
            value = values[n].astype(np.float32)
            total[t] = total[t] + value if t in seen else value
            seen.add(t)
    return total if scale is None else total * scale[:, None]


@pytest.mark.parametrize("out_dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize(("tokens", "hidden", "parts"), [(1, 1, 1), (5, 33, 3), (17, 1025, 8), (3, 2048, 2), (0, 8, 2)])
@pytest.mark.parametrize("scaled", [False, True])
def test_bits(tokens, hidden, parts, dtype, out_dtype, scaled):
    scale = RNG.uniform(0.5, 2.0, tokens).astype(np.float32) if scaled else None
    for whole in (False, True):
        sums = sums_of(tokens, hidden, parts, dtype, whole)
        want = slowly(sums, tokens, hidden, scale).astype(out_dtype)
        for function in (join, join_numpy):
            out = np.full((tokens, hidden + 3), 7, out_dtype)[:, :hidden]  # rows that do not follow one another
            function(sums, out, scale)
            assert out.tobytes() == want.tobytes(), function.__name__


def test_the_twin_is_built_and_used(monkeypatch):
    def never(*args):
        raise AssertionError("numpy was used")

    assert module.library() is not None, "python -m expertd.cxx"
    monkeypatch.setattr(module, "join_numpy", never)
    out = np.empty((4, 8), BF16)
    join(sums_of(4, 8, 3, BF16), out)


def test_infinite_and_not_a_number():
    values = np.array([[np.inf, -np.inf, np.nan, 3.4e38, 1.0]], np.float32)
    for dtype in (np.float32, BF16):
        sums = [Sum(None, values.astype(dtype)), Sum(None, values.astype(dtype))]
        for out_dtype in (np.float32, BF16):
            got, want = np.empty((1, 5), out_dtype), np.empty((1, 5), out_dtype)
            join(sums, got)
            with np.errstate(over="ignore"):
                join_numpy(sums, want)
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_renormalized():
    ids = np.array([[0, 1], [2, -1], [3, 4]])
    w = np.array([[0.5, 1.5], [0.25, 9.0], [1.0, 1.0]])
    missing = np.array([[True, False], [True, False], [False, False]])
    np.testing.assert_allclose(renormalized(ids, w, missing), [2.0 / 1.5, 1.0, 1.0])
