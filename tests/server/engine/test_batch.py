"""A batch is filled side by side: what is wrong with one request is no other's, and is not computed."""

import ml_dtypes
import numpy as np
import pytest

from expertd.errors import ExpertIdOutOfRangeError, NonFiniteWeightsError
from expertd_server.engine.batch import Batch, fill
from expertd_server.engine.lane import Inputs
from expertd_server.engine.request import Operand, Request
from expertd_server.engine.served import ServedLayer

H, E = 4, 8
HELD = (2, 3, 7)


def request(ids, weights=None) -> Request:
    ids = np.array(ids, np.int32)
    tokens, k = ids.shape
    weights = np.full(ids.shape, 0.5) if weights is None else np.array(weights)
    return Request(
        0, tokens, k,
        Operand("f32", np.ones(tokens * H, np.float32)),
        Operand("i32", ids.reshape(-1)),
        Operand("f32", weights.astype(np.float32).reshape(-1)),
        lambda r, outcome: None,
        arrival_ns=0,
    )  # fmt: skip


def filled(*requests: Request) -> tuple[Batch, Inputs]:
    layer = ServedLayer(0, E, HELD, 2, H, 8, None, "none")
    rows = [0, *np.cumsum([r.tokens for r in requests]).tolist()]
    k = max(r.top_k for r in requests)
    b = Batch(layer, requests, rows, rows[-1], 0)
    bits = np.full(rows[-1] * H, np.nan, ml_dtypes.bfloat16).view(np.uint16)
    into = Inputs(bits, np.full(rows[-1] * k, 99, np.int32), np.full(rows[-1] * k, np.nan, np.float32))
    fill(b, into, k, "bf16", np.full(rows[-1] * k, 99, np.int64))
    return b, into


def test_global_ids_become_slots_and_are_counted():
    b, into = filled(request([[2, 7], [0, -1]]), request([[3, 3]]))
    assert into.slots.tolist() == [0, 2, -1, -1, 1, 1]
    assert (b.routes, b.expert_tokens.tolist(), b.errors) == ([2, 2], [1, 2, 1], {})


@pytest.mark.parametrize("wrong", [-2, E, 1 << 30, -(1 << 31)])
def test_an_id_out_of_range_is_its_own_requests_alone(wrong):
    b, into = filled(request([[-1, 7]]), request([[2, 3], [3, wrong]]), request([[E - 1, -1]]))
    assert set(b.errors) == {1}, "-1 and the last expert are right"
    assert isinstance(b.errors[1], ExpertIdOutOfRangeError)
    assert f"topk_ids[1, 1] of layer 0: got {wrong}" in b.errors[1].message
    assert into.slots.tolist() == [-1, 2, -1, -1, -1, -1, 2, -1]
    assert (b.routes, b.expert_tokens.tolist()) == ([1, 0, 1], [0, 0, 2])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_its_own_requests_alone_and_nothing_of_it_is_computed(wrong):
    b, into = filled(request([[2, 7]]), request([[2, 3], [3, 7]], [[1, 2], [3, wrong]]))
    assert set(b.errors) == {1}
    assert isinstance(b.errors[1], NonFiniteWeightsError)
    assert "topk_weights[1, 1]" in b.errors[1].message
    assert "1 of 4 weights" in b.errors[1].message
    assert into.slots.tolist() == [0, 2, -1, -1, -1, -1]
    assert into.weights.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert (b.routes, b.expert_tokens.tolist()) == ([2, 0], [1, 0, 1])


def test_rows_with_fewer_routes_are_padded():
    b, into = filled(request([[3], [7]]), request([[2, 7]]))
    assert into.slots.tolist() == [1, -1, 2, -1, 0, 2]
    assert into.weights.tolist() == [0.5, 0, 0.5, 0, 0.5, 0.5]
    assert b.routes == [2, 2]
