"""What the server refuses: each with its own reason, and nobody else harmed."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from server_kit import (
    BF16,
    F32,
    I32,
    IN_FLIGHT,
    MAX_BYTES,
    MAX_TOKENS,
    FailedError,
    K,
    batch,
    check,
    drawn,
    tensor,
    values,
    wait_for,
)

from expertd.v1 import expert_service_pb2 as pb


def spoilt(change) -> pb.ForwardRequest:
    r = batch(4, seed=1)
    change(r)
    return r


def _nan(r):
    w = values(r.topk_weights)
    w[2, 1] = float("nan")
    r.topk_weights.CopyFrom(tensor(w, F32))


def _set_ids(value):
    def change(r):
        ids = values(r.topk_ids)
        ids[3, 0] = value
        r.topk_ids.CopyFrom(tensor(ids, I32))

    return change


def _scaled(name):
    def change(r):
        getattr(r, name).scales.block = 128

    return change


def _e4m3(block=128, scales=8, codes=1024, **more):
    """4 rows of 256 columns want 1024 codes and 8 scales."""

    def change(r):
        of = pb.BlockScales(block=block, raw=bytes(4 * scales)) if scales is not None else None
        if scales is not None and more.get("typed"):
            of.floats.values.extend([1.0] * more["typed"])
        r.hidden_states.CopyFrom(pb.Tensor(dtype=pb.DATA_TYPE_E4M3, shape=[4, 256], raw=bytes(codes), scales=of))

    return change


def _e4m3_drawn(r):
    r.hidden_states.CopyFrom(drawn([4, 256], pb.DATA_TYPE_E4M3))


def _typed_with_wrong_kind(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], floats=pb.FloatValues(values=[1.0] * 8)))


def _typed_with_wrong_count(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], ints=pb.IntValues(values=[1] * 7)))


def _typed_too_wide(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], ints=pb.IntValues(values=[1 << 40] * 8)))


def _grouped_beside(field):
    """Rows grouped by expert, and one of what says otherwise."""

    def change(r):
        kept = {"topk_ids": values(r.topk_ids), "topk_weights": values(r.topk_weights)}
        _grouped([1], [4])(r)
        if field == "router_weight_on_input":
            r.router_weight_on_input = True
        else:
            getattr(r, field).CopyFrom(tensor(kept[field], I32 if field == "topk_ids" else F32))

    return change


def _grouped(ids, counts):
    def change(r):
        r.ClearField("topk_ids")
        r.ClearField("topk_weights")
        r.grouped.CopyFrom(pb.GroupedRows(expert_ids=ids, row_counts=counts))

    return change


def _wide(tokens, top_k):
    """Few bytes, and more routes than any batch of the model has."""

    def change(r):
        r.hidden_states.CopyFrom(drawn([tokens, 256], BF16))
        r.topk_ids.CopyFrom(drawn([tokens, top_k], I32))
        r.topk_weights.CopyFrom(drawn([tokens, top_k], F32))

    return change


def _long_shape(r):
    r.hidden_states.CopyFrom(drawn([1 << 31] * 9, BF16))


BAD = {
    "routes": (_wide(64, 8), "TOO_MANY_TOKENS", "topk_ids: got 512 routes, 8 for each of 64 tokens, want at most 128"),
    "a route too many": (_wide(43, 3), "TOO_MANY_TOKENS", "topk_ids: got 129 routes, 3 for each of 43 tokens"),
    "a long shape": (_long_shape, "BAD_SHAPE", "Tensor.shape: got 9 extents, want at most 8"),
    "no hidden states": (lambda r: r.ClearField("hidden_states"), "MALFORMED_MESSAGE", "hidden_states: absent"),
    "no ids": (lambda r: r.ClearField("topk_ids"), "MALFORMED_MESSAGE", "topk_ids: absent"),
    "no weights": (lambda r: r.ClearField("topk_weights"), "MALFORMED_MESSAGE", "topk_weights: absent"),
    "hidden dtype": (lambda r: setattr(r.hidden_states, "dtype", I32), "BAD_DTYPE", "got I32, want F32 or F16 or BF16"),
    "hidden dtype unset": (lambda r: setattr(r.hidden_states, "dtype", 0), "BAD_DTYPE", "got UNSPECIFIED"),
    "hidden dtype unknown": (lambda r: setattr(r.hidden_states, "dtype", 77), "BAD_DTYPE", "got 77"),
    "id dtype": (lambda r: setattr(r.topk_ids, "dtype", F32), "BAD_DTYPE", "topk_ids.dtype: got F32, want I32 or I64"),
    "weight dtype": (lambda r: setattr(r.topk_weights, "dtype", I32), "BAD_DTYPE", "topk_weights.dtype: got I32"),
    "e4m3 without scales": (_e4m3(scales=None), "BAD_TENSOR_SPELLING", "E4M3: got no scales, want 8 of them"),
    "e4m3 by 64": (_e4m3(block=64), "BAD_SHAPE", "hidden_states.scales.block: got 64, want 128"),
    "e4m3 with a scale too few": (_e4m3(scales=7), "BAD_BYTE_COUNT", "got 28 bytes, want 32: f32 [4, 2]"),
    "e4m3 with a scale for each column": (_e4m3(scales=1024), "BAD_BYTE_COUNT", "got 4096 bytes, want 32"),
    "e4m3 with typed scales beside": (_e4m3(typed=8), "BAD_TENSOR_SPELLING", "got raw and floats, want one of them"),
    "e4m3 with too many typed scales": (_e4m3(scales=0, typed=9), "BAD_BYTE_COUNT", "got 36 bytes, want 32"),
    "e4m3 with a code too few": (_e4m3(codes=1023), "BAD_BYTE_COUNT", "got 1023 bytes, want 1024 for [4, 256] e4m3"),
    "e4m3 drawn": (_e4m3_drawn, "BAD_TENSOR_SPELLING", "E4M3: got synthetic"),
    "e4m3 weights": (
        lambda r: setattr(r.topk_weights, "dtype", pb.DATA_TYPE_E4M3),
        "SCALES_UNSUPPORTED",
        "hidden_states alone",
    ),
    "scales of bf16": (_scaled("hidden_states"), "SCALES_UNSUPPORTED", "block scales with BF16 elements"),
    "scales of weights": (_scaled("topk_weights"), "SCALES_UNSUPPORTED", "block scales with F32 elements"),
    "hidden rank": (lambda r: r.hidden_states.shape.append(1), "BAD_SHAPE", "got [4, 256, 1], want [M, 256]"),
    "hidden width": (lambda r: r.hidden_states.shape.__setitem__(1, 255), "BAD_SHAPE", "got [4, 255], want [M, 256]"),
    "id rows": (lambda r: r.topk_ids.shape.__setitem__(0, 3), "BAD_SHAPE", "topk_ids: got [3, 2], want [4, top_k]"),
    "no top_k": (lambda r: r.topk_ids.shape.__setitem__(1, 0), "BAD_SHAPE", "top_k from 1 to 8"),
    "weight shape": (lambda r: r.topk_weights.shape.__setitem__(1, 1), "BAD_SHAPE", "topk_weights: got [4, 1]"),
    "hidden bytes": (
        lambda r: setattr(r.hidden_states, "raw", r.hidden_states.raw[:-1]),
        "BAD_BYTE_COUNT",
        "hidden_states.raw: got 2047 bytes, want 2048 for [4, 256] bf16",
    ),
    "id bytes": (lambda r: setattr(r.topk_ids, "raw", b""), "BAD_BYTE_COUNT", "topk_ids.raw: got 0 bytes, want 32"),
    "no data": (lambda r: r.topk_ids.ClearField("raw"), "BAD_TENSOR_SPELLING", "topk_ids: has no data"),
    "floats for ids": (_typed_with_wrong_kind, "BAD_TENSOR_SPELLING", "got floats, want ints"),
    "count of values": (_typed_with_wrong_count, "BAD_BYTE_COUNT", "topk_ids: typed values: got 7, want 8"),
    "typed id too wide": (_typed_too_wide, "EXPERT_ID_OUT_OF_RANGE", "got 1099511627776"),
    "zipf": (
        lambda r: r.topk_ids.CopyFrom(drawn([4, K], I32, zipf_exponent=float("nan"))),
        "BAD_TENSOR_SPELLING",
        "zipf_exponent",
    ),
    "layer": (lambda r: setattr(r, "layer", 9), "LAYER_NOT_HELD", "layer: got 9, want one of those held here: 0-1"),
    "id too large": (_set_ids(8), "EXPERT_ID_OUT_OF_RANGE", "topk_ids[3, 0] of layer 0: got 8, want 0 to 7"),
    "id too small": (_set_ids(-2), "EXPERT_ID_OUT_OF_RANGE", "got -2"),
    "nan weight": (_nan, "NON_FINITE_WEIGHTS", "topk_weights[2, 1]: got nan"),
    "output dtype": (
        lambda r: setattr(r, "output_dtype", I32),
        "OUTPUT_DTYPE_UNSUPPORTED",
        "want F32, F16, BF16, E4M3 or 0",
    ),
    "output form": (lambda r: setattr(r, "output_form", 9), "OUTPUT_FORM_UNKNOWN", "got 9"),
    "input weights with top_k 2": (
        lambda r: setattr(r, "router_weight_on_input", True),
        "UNSUPPORTED_COMBINATION",
        "got top_k 2, want top_k 1",
    ),
    "grouped and routed": (
        lambda r: r.grouped.CopyFrom(pb.GroupedRows(expert_ids=[1], row_counts=[4])),
        "UNSUPPORTED_COMBINATION",
        "grouped: given together",
    ),
    "grouped and ids": (_grouped_beside("topk_ids"), "UNSUPPORTED_COMBINATION", "grouped: given together"),
    "grouped and weights": (_grouped_beside("topk_weights"), "UNSUPPORTED_COMBINATION", "grouped: given together"),
    "grouped and weighed before": (
        _grouped_beside("router_weight_on_input"),
        "UNSUPPORTED_COMBINATION",
        "grouped: given together",
    ),
    "grouped rows": (_grouped([1, 2], [2, 3]), "BAD_SHAPE", "grouped.row_counts: got 5 rows, want the 4"),
    "grouped lengths": (_grouped([1, 2], [4]), "BAD_SHAPE", "2 expert_ids and 1 row_counts"),
    "grouped id": (_grouped([8], [4]), "EXPERT_ID_OUT_OF_RANGE", "got 8"),
    "too many tokens": (
        lambda r: r.CopyFrom(batch(MAX_TOKENS + 1)),
        "TOO_MANY_TOKENS",
        "got 65 tokens, want at most 64; split the batch",
    ),
    "message too large": (
        lambda r: setattr(r.hidden_states, "raw", b"\1" * (MAX_BYTES + 1)),
        "MESSAGE_TOO_LARGE",
        "want at most 131072",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_has_its_own_reason_and_harms_nobody(served, weights, name):
    change, reason, says = BAD[name]
    bad, good = spoilt(change), batch(4, seed=2, request_id=2)
    with pytest.raises(FailedError) as e:
        await served.call.forward(bad)
    assert e.value.reason == reason
    assert says in e.value.text
    assert not e.value.retryable
    bad.request_id = 1
    async with served.call.stream() as s:
        await s.send(forward=bad)
        await s.send(forward=good)
        both = [await s.receive(), await s.receive()]
    error, answer = sorted(both, key=lambda m: m.WhichOneof("kind") == "forward")
    assert (error.error.request_id, error.error.reason) == (1, reason)
    assert says in error.error.message
    assert error.error.code == grpc.StatusCode[e.value.code].value[0]
    check(weights, good, answer.forward)


async def test_bytes_that_are_no_message_fail_alone_on_a_stream(served, weights):
    good = batch(2, request_id=3)
    data = pb.StreamForwardRequest(forward=batch(2, request_id=77)).SerializeToString()
    async with served.call.stream() as s:
        await s.send_bytes(data[:-5])
        error = (await s.receive()).error
        assert (error.reason, error.request_id) == ("MALFORMED_MESSAGE", 77)
        await s.send_bytes(b"")
        assert (await s.receive()).error.reason == "MALFORMED_MESSAGE"
        await s.send(forward=good)
        check(weights, good, (await s.receive()).forward)


async def test_ids_of_requests_on_a_stream(served):
    with served.busy():
        async with served.call.stream() as s:
            await s.send(forward=batch(1))
            assert (await s.receive()).error.reason == "MISSING_REQUEST_ID"
            await s.send(forward=batch(1, request_id=1))
            await s.send(forward=batch(1, request_id=1))
            error = (await s.receive()).error
            assert (error.reason, error.request_id) == ("DUPLICATE_REQUEST_ID", 1)
            served.gate.set()
            assert (await s.receive()).forward.request_id == 1
            await s.send(forward=batch(1, request_id=1))
            assert (await s.receive()).forward.request_id == 1, "free again after its answer"


async def test_more_requests_than_a_stream_may_have_are_refused(served):
    with served.busy():
        async with served.call.stream() as s:
            for n in range(IN_FLIGHT + 1):
                await s.send(forward=batch(1, request_id=n + 1))
            error = (await s.receive()).error
            assert (error.reason, error.request_id, error.retryable) == (
                "TOO_MANY_REQUESTS_IN_FLIGHT",
                IN_FLIGHT + 1,
                True,
            )
            served.gate.set()
            done = {(await s.receive()).forward.request_id for _ in range(IN_FLIGHT)}
            assert done == set(range(1, IN_FLIGHT + 1))


async def test_unary_calls_are_bounded_and_who_is_refused_is_told_why_and_counted(served):
    served.server.servicer.max_unary = 4
    with served.busy():
        calls = [asyncio.create_task(served.call.forward(batch(1))) for _ in range(7)]
        await wait_for(lambda: sum(t.done() for t in calls) == 3)
        refused = [e for t in calls if t.done() and (e := t.exception()) is not None]
        assert len(refused) == 3
        for e in refused:
            assert (e.code, e.reason, e.retryable) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS_IN_FLIGHT", True)
            assert "at most 4 of one caller" in str(e)
    answers = [t for t in calls if t.exception() is None] if await asyncio.wait(calls) else []
    assert len(answers) == 4
    labels = {"code": "RESOURCE_EXHAUSTED", "reason": "TOO_MANY_REQUESTS_IN_FLIGHT"}
    assert served.metrics.registry.get_sample_value("expertd_requests_total", labels) == 3
    await served.call.forward(batch(1))


async def test_a_full_queue_refuses_with_advice(served):
    with served.busy():
        calls = [asyncio.create_task(served.call.forward(batch(1)))]
        await asyncio.to_thread(served.entered.wait, 20)
        calls += [asyncio.create_task(served.call.forward(batch(1))) for _ in range(32)]
        await wait_for(lambda: served.engine.load().queued_requests == 33)
        with pytest.raises(FailedError, match="32 requests waiting") as e:
            await served.call.forward(batch(1))
        assert (e.value.code, e.value.reason, e.value.retryable) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", True)
    await asyncio.gather(*calls)
