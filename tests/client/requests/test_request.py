"""Requests: what is checked when one is made, what it is on the wire, and how it is cut into parts that add up."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.codec import encode_stream_request
from expertd.errors import BadDtypeError, BadShapeError, LayerNotHeldError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import Grouped, RemoteExperts, Request, Synthetic

X, IDS, WEIGHTS = np.ones((3, 8), np.float32), np.ones((3, 2), np.int32), np.ones((3, 2), np.float32)


def request(x=X, ids=IDS, weights=WEIGHTS, layer=4, **options):
    return Request(layer, x, ids, weights, **options)


@pytest.mark.parametrize(
    ("name", "want"),
    [("timeout", "want timeout_s"), ("version", "want weights_version"), ("colour", "want one of timeout_s, ")],
)
def test_an_argument_that_does_not_exist_is_answered_with_the_one_that_does(name, want):
    with pytest.raises(TypeError) as found:
        request(**{name: 1})
    said = str(found.value)
    assert said.startswith(f"forward(), submit() and Request: got the argument {name!r}, which they do not have; ")
    assert want in said


def numbered(tokens=6, top_k=3, of=np.asarray):
    """Every element its own: row n of hidden states is n, n, ...; ids and weights count on."""
    x = np.repeat(np.arange(tokens, dtype=np.float32), 4).reshape(tokens, 4)
    ids = np.arange(tokens * top_k).reshape(tokens, top_k)
    return Request(2, of(x), of(ids), of(ids.astype(np.float32)), output_dtype="bf16", traceparent="00-a-b-01")


# ---- what is checked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": None},
        {"weights": None},
        {"ids": None, "weights": None},
        {"grouped": Grouped([5], [3])},
        {"grouped": Grouped([5], [3]), "weights": None},
    ],
)
def test_half_a_routing_is_refused(wrong):
    with pytest.raises(BadShapeError, match="want topk_ids and topk_weights, or grouped alone"):
        request(**wrong)


def test_inputs_that_require_gradients_are_refused_as_by_remote_experts():
    x, ids, weights = (torch.from_numpy(t.copy()) for t in (X, IDS, WEIGHTS))
    for inputs in ((x.clone().requires_grad_(), ids, weights), (x, ids, weights.clone().requires_grad_())):
        refusals = []
        for call in (lambda *t: Request(4, *t), RemoteExperts(None, 4).eval()):
            with pytest.raises(UnsupportedCombinationError, match=r"require gradients.*inference_mode") as refused:
                call(*inputs)
            refusals.append(str(refused.value))
        assert refusals[0] == refusals[1]
        with torch.no_grad():
            assert Request(4, *inputs).tokens == 3
    with pytest.raises(UnsupportedCombinationError, match="require gradients"):
        Request(4, x.clone().requires_grad_(), grouped=Grouped([5], [3]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"x": np.ones(3, np.float32)}, r"hidden_states: got \[3\], want \[M, H\]"),
        ({"ids": np.ones((2, 2), np.int32)}, r"topk_ids: got \[2, 2\], want \[3, top_k\]"),
        ({"ids": np.ones(3, np.int32)}, r"topk_ids: got \[3\]"),
        ({"weights": np.ones((3, 1), np.float32)}, r"topk_weights: got \[3, 1\], want the shape of topk_ids, \[3, 2\]"),
        ({"ids": None, "weights": None, "grouped": Grouped([1, 2], [3])}, "got 2 expert_ids and 1 row_counts"),
        ({"ids": None, "weights": None, "grouped": Grouped([1, 2], [3, 1])}, "got 4 rows, want the 3"),
    ],
)
def test_shapes_fit_each_other(wrong, says):
    with pytest.raises(BadShapeError, match=says):
        request(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"x": X.astype(int)}, {"ids": IDS.astype(float)}, {"weights": IDS}, {"output_dtype": "fp8"}, {"x": None}]
)
def test_dtypes_fit_their_place(wrong):
    with pytest.raises(BadDtypeError):
        request(**wrong)


@pytest.mark.parametrize("layer", [None, "0", 1.0, -1, 1 << 32])
def test_a_layer_is_a_number(layer):
    with pytest.raises(LayerNotHeldError, match=r"layer: got .*, want a whole number from 0 to 2\^32 - 1"):
        request(layer=layer)
    assert request(layer=np.int64(3)).layer == 3


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        request().layer = 5


# ---- what it is on the wire ------------------------------------------------------------------------------------------


def test_the_message_says_what_was_asked():
    r = request(output_dtype="bf16", digest=True, router_weight_on_input=True, traceparent="00-a-b-01").view(9, 700)
    assert (r.request_id, r.timeout_us, r.layer) == (9, 700, 4)
    assert (r.output_dtype, r.output_form) == (pb.DATA_TYPE_BF16, pb.OUTPUT_FORM_DIGEST)
    assert (r.router_weight_on_input, r.traceparent, r.grouped) == (True, "00-a-b-01", None)
    assert (r.hidden_states.shape, r.hidden_states.dtype) == ((3, 8), pb.DATA_TYPE_F32)
    assert (r.topk_ids.dtype, r.topk_weights.dtype) == (pb.DATA_TYPE_I32, pb.DATA_TYPE_F32)


def test_the_output_dtype_is_that_of_the_input_unless_named():
    assert request().view(1, 0).output_dtype == pb.DATA_TYPE_F32
    assert request(x=X.astype(ml_dtypes.bfloat16)).view(1, 0).output_dtype == pb.DATA_TYPE_BF16
    assert request(output_dtype=np.float16).view(1, 0).output_dtype == pb.DATA_TYPE_F16


def test_grouped_rows_stand_in_place_of_routes():
    r = request(ids=None, weights=None, grouped=Grouped([5, 7], [1, 2])).view(1, 0)
    assert (r.topk_ids, r.topk_weights) == (None, None)
    assert r.grouped == pb.GroupedRows(expert_ids=[5, 7], row_counts=[1, 2])


def test_an_array_of_experts_says_how_many_rows_each_has():
    r = request(ids=None, weights=None, grouped=Grouped([5], [2], 3))
    assert r.view(1, 0).grouped == pb.GroupedRows(expert_ids=[5], row_counts=[2], rows_per_expert=3)
    for wrong, says in (
        (Grouped([5, 6], [1, 1], 3), "3 rows for each of 2 experts"),
        (Grouped([5], [4], 3), "got 4 rows"),
    ):
        with pytest.raises(BadShapeError, match=says):
            request(ids=None, weights=None, grouped=wrong)


def test_rows_grouped_by_expert_as_rows_with_a_route():
    plain = request()
    assert plain.ungrouped() is plain
    for grouped, ids in ((Grouped([5, 7], [1, 2]), [5, 7, 7]), (Grouped([5], [2], 3), [5, 5, -1])):
        r = request(ids=None, weights=None, grouped=grouped)
        routed = r.ungrouped()
        assert routed.grouped is None
        assert routed.topk_ids[:, 0].tolist() == ids
        assert routed.topk_weights.tolist() == [[1.0]] * 3
        assert routed.dtypes == (*r.dtypes, pb.DATA_TYPE_I64, pb.DATA_TYPE_F32)
    part = request(ids=None, weights=None, grouped=Grouped([5], [2], 3)).rows(slice(1, 3))
    assert part.topk_ids[:, 0].tolist() == [5, -1]


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_rows_keep_their_routes_and_all_else(of):
    whole = numbered(of=of)
    part = whole.rows(of(np.array([4, 1])))
    assert (part.tokens, type(part.hidden_states)) == (2, type(whole.hidden_states))
    assert part.hidden_states[:, 0].tolist() == [4, 1]
    assert part.topk_ids.tolist() == [[12, 13, 14], [3, 4, 5]]
    assert part.topk_weights.tolist() == [[12, 13, 14], [3, 4, 5]]
    a, b = whole.view(7, 8), part.view(7, 8)
    for field in ("layer", "output_dtype", "output_form", "traceparent", "router_weight_on_input", "grouped"):
        assert getattr(a, field) == getattr(b, field)
    assert whole.tokens == 6, "the whole stays"


def test_a_slice_copies_nothing():
    whole = numbered()
    part = whole.rows(slice(2, 5))
    assert part.hidden_states[:, 0].tolist() == [2, 3, 4]
    assert np.shares_memory(part.hidden_states, whole.hidden_states)


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_routes_that_are_not_kept_are_nobodys(of):
    whole = numbered(tokens=2, of=of)
    part = whole.routes(of(np.array([[True, False, True], [False, False, False]])))
    assert part.topk_ids.tolist() == [[0, -1, 2], [-1, -1, -1]]
    assert part.topk_ids.dtype == whole.topk_ids.dtype
    assert part.tokens == 2
    assert whole.topk_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(BadShapeError, match=r"keep: got \[2, 1\], want \[2, 3\]"):
        whole.routes(of(np.ones((2, 1), bool)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_by_holder_and_by_size_add_up_to_the_whole(data):
    """Each route goes to exactly one part, each token once to a replica, none of more than max_tokens."""
    tokens, top_k, experts = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 3)), 7
    replicas, most = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    of = data.draw(st.sampled_from([np.asarray, torch.as_tensor]))
    x = rng.standard_normal((tokens, 4)).astype(np.float32)
    ids, weights = rng.integers(0, experts, (tokens, top_k)), rng.random((tokens, top_k)).astype(np.float32)
    owner = rng.integers(0, replicas, experts)
    whole = Request(0, of(x), of(ids), of(weights))
    table = rng.standard_normal((experts, 4)).astype(np.float32)

    def answer(r):
        """An expert multiplies with its row of the table."""
        i, w = np.asarray(r.topk_ids), np.asarray(r.topk_weights)
        picked = np.where(i[..., None] >= 0, table[i], 0) * w[..., None]
        return np.asarray(r.hidden_states) * picked.sum(1)

    total, routes = np.zeros_like(x), 0
    for replica in range(replicas):
        mine = owner[ids] == replica
        rows = np.flatnonzero(mine.any(axis=1))
        part = whole.routes(of(mine)).rows(of(rows))
        sums = [np.zeros((0, 4), np.float32)]
        for piece in part.cut(most):
            assert piece.tokens <= most
            sums.append(answer(piece))
            routes += int((np.asarray(piece.topk_ids) >= 0).sum())
        total[rows] += np.concatenate(sums)
    assert routes == tokens * top_k
    np.testing.assert_allclose(total, answer(whole), rtol=1e-5, atol=1e-6)


def test_grouped_rows_stay_grouped():
    x = np.arange(6, dtype=np.float32).reshape(6, 1)
    whole = Request(0, x, grouped=Grouped([4, 9, 2], [3, 1, 2]))
    part = whole.rows(np.array([1, 2, 5]))
    assert part.hidden_states[:, 0].tolist() == [1, 2, 5]
    assert part.grouped == Grouped([4, 2], [2, 1])
    assert [p.grouped for p in whole.cut(4)] == [Grouped([4, 9], [3, 1]), Grouped([2], [2])]
    assert part.view(1, 0).grouped == pb.GroupedRows(expert_ids=[4, 2], row_counts=[2, 1])
    with pytest.raises(BadShapeError, match="ascending"):
        whole.rows(np.array([5, 0]))
    with pytest.raises(UnsupportedCombinationError, match="grouped rows"):
        whole.routes(np.ones((6, 1), bool))


def test_what_fits_is_not_cut():
    whole = numbered()
    assert whole.cut(6) == [whole]
    assert [p.tokens for p in whole.cut(4)] == [4, 2]
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        whole.cut(0)


def test_nobody_here_knows_the_rows_that_the_server_draws():
    drawn = Request(0, Synthetic((6, 8), 1), Synthetic((6, 2), 1, "i32"), Synthetic((6, 2), 1, "f32"))
    assert drawn.cut(6) == [drawn]
    for cut in (lambda: drawn.rows(slice(2)), lambda: drawn.routes(np.ones((6, 2), bool)), lambda: drawn.cut(3)):
        with pytest.raises(UnsupportedCombinationError, match=r"layer 0, \[6, 8\], top_k 2.*Synthetic"):
            cut()


# ---- the message in few steps ----------------------------------------------------------------------------------------


def batch(tokens=3, hidden=8):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return x, rng.integers(0, 9, (tokens, 2)).astype(np.int32), rng.random((tokens, 2), np.float32) + 0.5


@pytest.mark.parametrize("tokens", [0, 1, 3, 700])  # 700: padded, and more than is copied at once
@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids, w: (x, ids, w),
        lambda x, ids, w: (x.astype(ml_dtypes.bfloat16), ids.astype(np.int64), w.astype(np.float16)),
        lambda x, ids, w: (x.astype(">f4"), ids.astype(">i4"), w.astype(">f4")),
        lambda x, ids, w: (np.repeat(x, 2, 1)[:, ::2], ids[::-1], np.asfortranarray(w)),
        lambda x, ids, w: tuple(map(torch.from_numpy, (x, ids, w))),
        lambda x, ids, w: (torch.from_numpy(x).bfloat16().repeat(1, 2)[:, ::2], torch.from_numpy(ids), w),
    ],
)
@pytest.mark.parametrize("options", [{}, {"output_dtype": "f16"}, {"digest": True}, {"traceparent": "00-a-b-01"}])
def test_a_message_is_that_of_the_view(tokens, change, options):
    r = Request(4, *change(*batch(tokens)), **options)
    assert r.message(9, 700, 1 << 40) == encode_stream_request(r.view(9, 700, 1 << 40))
    part = r.rows(slice(0, 2))
    assert part.message(10, 0) == encode_stream_request(part.view(10, 0))


def test_a_message_of_what_is_not_raw_is_that_of_the_view():
    x, ids, w = batch(3, 128)
    for r in (
        Request(0, x, ids, w).quantized(),
        Request(0, Synthetic((3, 8), 1), ids, w),
        Request(0, x, Synthetic((3, 2), 1, "i32"), w),
        Request(0, x, grouped=Grouped([5, 7], [1, 2])),
        Request(0, x[:, :1], ids[:, :1], w[:, :1], router_weight_on_input=True),
    ):
        assert r.message(9, 700, 5) == encode_stream_request(r.view(9, 700, 5))


def test_a_check_is_remembered_for_the_same_kinds_only():
    class Lookalike:
        dtype, shape = IDS.dtype, IDS.shape

    request()
    with pytest.raises(BadDtypeError, match="topk_ids: got Lookalike"):
        request(ids=Lookalike())
    with pytest.raises(BadDtypeError, match="dtype: got"):
        request(output_dtype=["f32"])
    assert request(output_dtype="f16").dtypes[0] == pb.DATA_TYPE_F16
    assert request().dtypes[0] == pb.DATA_TYPE_F32
