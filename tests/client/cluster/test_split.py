"""A batch cut by replica: the C++ twin and numpy give the same parts, and its structures are those of native.py."""

from __future__ import annotations

import ctypes as C

import ml_dtypes
import numpy as np
import pytest

from expertd.errors import ExpertIdOutOfRangeError
from expertd.shm.layout import ConnectionHandle, Tensors
from expertd_client.cluster import native
from expertd_client.cluster import split as module
from expertd_client.cluster.split import meant, meant_numpy, split, split_numpy
from expertd_client.cluster.table import layer_table
from expertd_client.requests.e4m3 import E4m3, quantize
from expertd_client.requests.request import Request

E, K, H = 24, 4, 40
HELD = {
    "halves": {"a": tuple(range(12)), "b": tuple(range(12, 24))},
    "eight": {str(n): tuple(range(n, 24, 8)) for n in range(8)},
    "with orphans": {"a": (0, 1, 2, 9), "b": (3, 4, 5, 6, 7)},
    "one": {"a": tuple(range(24))},
}


def drawn(tokens, ids_dtype, seed, absent, spread=E):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, spread, (tokens, K)).astype(ids_dtype)  # with duplicates in a token
    ids[rng.random(ids.shape) < absent] = -1
    x = rng.standard_normal((tokens, H)).astype(ml_dtypes.bfloat16)
    return x, ids, rng.random((tokens, K)).astype(np.float32)


def bits(array):
    return (array.codes.tobytes(), array.scales.tobytes()) if isinstance(array, E4m3) else array.tobytes()


def facts(part):
    r = part.request
    rows = None if part.rows is None else part.rows.tolist()
    tensors = bits(r.hidden_states), bits(r.topk_ids), bits(r.topk_weights)
    return part.owner, rows, part.routes, r.dtypes, r.tokens, tensors


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_both_twins_give_the_same_parts(held, tokens, ids_dtype):
    table = layer_table(E, HELD[held])
    owners = list(range(len(table.replicas)))
    for seed, absent, quantized in ((0, 0.0, False), (1, 0.3, False), (2, 0.9, True), (3, 1.0, False)):
        x, ids, w = drawn(tokens, ids_dtype, seed, absent)
        request = Request(0, quantize(x) if quantized else x, ids, w)
        parts = split(request, table, owners, len(owners))
        assert [facts(p) for p in parts] == [facts(p) for p in split_numpy(request, table, owners, len(owners))]
        assert sum(p.routes for p in parts) == np.count_nonzero(ids >= 0)
        for p in parts:
            mine = np.isin(ids if p.rows is None else ids[p.rows], np.flatnonzero(table.group_of[:-1] == p.owner))
            where = np.where(mine, ids if p.rows is None else ids[p.rows], -1)
            assert np.array_equal(p.request.topk_ids, where)
            assert (p.request.topk_ids >= 0).any(axis=1).all() or p.rows is None
        assert meant(ids, table, 0) == meant_numpy(ids, table, 0)


def test_arrays_that_do_not_lie_in_order():
    x, ids, w = drawn(50, np.int32, 5, 0.2)
    table = layer_table(E, HELD["eight"])
    plain = Request(0, x[::2].copy(), ids[::2].copy(), w[::2].copy())
    strided = Request(0, x[::2], ids[::2], w[::2])
    assert [facts(p) for p in split(strided, table, range(8), 8)] == [
        facts(p) for p in split(plain, table, range(8), 8)
    ]
    assert meant(ids[::2], table, 0) == meant_numpy(ids[::2], table, 0)


def test_more_groups_than_a_number_has_bits():
    held = {str(n): (n,) for n in range(100)}
    table = layer_table(200, held)
    ids = np.array([[0, 62, 63, 99], [64, -1, 99, 5]])
    assert meant(ids, table, 0) == (7, (0, 5, 62, 63, 64, 99), False)
    assert meant(np.array([[150, 1]]), table, 0) == (2, (1,), True)


@pytest.mark.parametrize("odd", [-2, E, 2**31 - 1])
def test_ids_of_no_expert(odd):
    ids = np.zeros((3, K), np.int32)
    ids[1, 2] = odd
    for function in (meant, meant_numpy):
        with pytest.raises(ExpertIdOutOfRangeError, match=f"got {odd}"):
            function(ids, layer_table(E, HELD["halves"]), 0)


def test_the_twin_is_built_and_used(monkeypatch):
    monkeypatch.setattr(module, "split_numpy", None)
    monkeypatch.setattr(module, "meant_numpy", None)
    assert native.library() is not None, "python -m expertd.cxx"
    x, ids, w = drawn(5, np.int32, 0, 0.0)
    table = layer_table(E, HELD["halves"])
    assert len(split(Request(0, x, ids, w), table, [0, 1], 2)) == 2
    assert meant(ids, table, 0).routes == 5 * K


def test_structures():
    sizes = (C.c_uint64 * 12)()
    native.library().sizes(sizes)
    form = native.BATCH.size + native.OWNERS.size + native.CALL.size
    assert list(sizes) == [
        native.BATCH.size,
        native.OWNERS.size,
        native.BATCH.size + native.OWNERS.size,
        form,
        form + native.FORM.size,
        native.TOLD_AT,
        native.SUBMISSION_AT,
        native.ANSWER_AT,
        native.SHARE_BYTES,
        C.sizeof(ConnectionHandle),
        C.sizeof(Tensors),
        C.sizeof(native.Room),
    ]
