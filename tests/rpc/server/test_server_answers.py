"""What the server answers: every dtype and spelling, joined batches, Describe."""

from __future__ import annotations

import asyncio
import zlib

import pytest
import torch
from server_kit import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    IN_FLIGHT,
    MAX_TOKENS,
    NUM_EXPERTS,
    H,
    K,
    batch,
    check,
    drawn,
    expected,
    tensor,
    values,
    wait_for,
)

from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels import relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs


@pytest.mark.parametrize("dtypes", [(BF16, I32, F32), (F32, I64, BF16), (F16, I64, F32)])
@pytest.mark.parametrize("output", [0, BF16, F16, F32])
async def test_forward_is_right_in_every_dtype(served, weights, dtypes, output):
    r = batch(7, seed=3, layer=1, dtypes=dtypes, output_dtype=output)
    a = await served.call.forward(r)
    check(weights, r, a)
    assert a.output.dtype == (output or dtypes[0])
    assert list(a.output.shape) == [7, H]
    t = a.timing
    assert (t.batch_tokens, t.batch_requests, t.backend) == (7, 1, "reference")
    assert min(t.decode_ns, t.kernel_ns, t.copy_in_ns) > 0
    assert (a.load.queued_tokens, a.load.queued_requests, a.load.draining) == (0, 0, False)
    assert a.load.token_ns > 0


async def test_a_stream_answers_each_request_with_its_own_id(served, weights):
    requests = {n: batch(n, seed=n, layer=n % 2, request_id=100 + n) for n in range(1, 8)}
    async with served.call.stream() as s:
        for r in requests.values():
            await s.send(forward=r)
        await s.half_close()
        answers = [await s.receive() for _ in requests]
        assert await s.receive() is None, "the stream ends well after the last answer"
    assert sorted(a.forward.request_id for a in answers) == [100 + n for n in requests]
    for a in answers:
        check(weights, requests[a.forward.request_id - 100], a.forward)


async def test_raw_typed_and_digest_give_the_same_answer(served):
    raw = batch(3, seed=5, dtypes=(BF16, I32, F32))
    typed = pb.ForwardRequest(
        layer=0,
        hidden_states=pb.Tensor(
            dtype=BF16,
            shape=[3, H],
            floats=pb.FloatValues(values=values(raw.hidden_states).float().reshape(-1).tolist()),
        ),
        topk_ids=pb.Tensor(
            dtype=I32, shape=[3, K], ints=pb.IntValues(values=values(raw.topk_ids).reshape(-1).tolist())
        ),
        topk_weights=pb.Tensor(
            dtype=F32, shape=[3, K], floats=pb.FloatValues(values=values(raw.topk_weights).reshape(-1).tolist())
        ),
    )
    a, b = await served.call.forward(raw), await served.call.forward(typed)
    assert a.output == b.output
    typed.output_form = pb.OUTPUT_FORM_DIGEST
    d = await served.call.forward(typed)
    assert not d.HasField("output")
    assert d.digest.crc32 == zlib.crc32(a.output.raw)
    out = values(a.output).double()
    assert d.digest.sum == pytest.approx(out.sum().item(), rel=1e-12)
    assert d.digest.sum_of_squares == pytest.approx(out.square().sum().item(), rel=1e-12)
    assert d.routes_computed == a.routes_computed


async def test_synthetic_tensors_depend_on_their_seed_alone(served):
    def request(seed, zipf=0.0):
        return pb.ForwardRequest(
            layer=0,
            hidden_states=drawn([64, H], BF16, seed),
            topk_ids=drawn([64, K], I32, seed, zipf_exponent=zipf),
            topk_weights=drawn([64, K], F32, seed),
        )

    a, again, other = [await served.call.forward(request(seed)) for seed in (1, 1, 2)]
    assert a.output == again.output
    assert a.output != other.output
    assert 0.25 < values(a.output).float().std() < 4.0
    skewed = await served.call.forward(request(1, zipf=3.0))
    assert skewed.routes_computed < a.routes_computed, "Zipf prefers expert 0, which is not held here"


async def test_no_tokens_give_an_empty_tensor(served):
    a = await served.call.forward(batch(0, output_dtype=F16))
    assert (list(a.output.shape), a.output.dtype, a.output.raw, a.routes_computed) == ([0, H], F16, b"", 0)
    a = await served.call.forward(batch(0, output_form=pb.OUTPUT_FORM_DIGEST))
    assert a.digest == pb.Digest()
    async with served.call.stream() as s:
        await s.send(forward=batch(0, request_id=5))
        assert (await s.receive()).forward.request_id == 5
    assert served.kernels == []


async def test_rows_grouped_by_expert_are_answered_row_by_row(served, weights):
    x = random_inputs(6, H, NUM_EXPERTS, 1, seed=9)[0]
    grouped = pb.GroupedRows(expert_ids=[2, 0, 6], row_counts=[3, 1, 2])
    r = pb.ForwardRequest(layer=0, hidden_states=tensor(x, BF16), grouped=grouped)
    a = await served.call.forward(r)
    ids = torch.tensor([[2], [2], [2], [0], [6], [6]])
    want = expected(weights, r, ids, torch.ones(6, 1))
    assert relative_error(values(a.output), want) <= tolerance("bf16")
    assert a.routes_computed == 5, "expert 0 lives elsewhere"
    assert not values(a.output)[3].any()


async def test_rows_of_an_array_of_experts_are_answered_where_they_are_valid(served, weights):
    """[E, T, H] as DeepEP's low-latency dispatch leaves it: what stands behind the valid rows is anything."""
    x = random_inputs(12, H, NUM_EXPERTS, 1, seed=9)[0].view(3, 4, H)
    for e, valid in enumerate((2, 4, 0)):
        x[e, valid:] = float("nan")
    x = x.flatten(0, 1)
    grouped = pb.GroupedRows(expert_ids=[2, 6, 3], row_counts=[2, 4, 0], rows_per_expert=4)
    a = await served.call.forward(pb.ForwardRequest(layer=0, hidden_states=tensor(x, BF16), grouped=grouped))
    got = values(a.output)
    assert list(a.output.shape) == [12, H]
    assert a.routes_computed == 6
    assert not got[[2, 3, 8, 9, 10, 11]].any()
    rows = torch.tensor([0, 1, 4, 5, 6, 7])
    alone = pb.ForwardRequest(layer=0, hidden_states=tensor(x[rows], BF16))
    want = expected(weights, alone, torch.tensor([[2], [2], [6], [6], [6], [6]]), torch.ones(6, 1))
    assert relative_error(got[rows], want) <= tolerance("bf16")


async def test_router_weight_on_input(served, weights):
    x, ids, w = random_inputs(5, H, NUM_EXPERTS, 1, seed=4)
    w = w * 0.5
    r = pb.ForwardRequest(
        layer=0,
        hidden_states=tensor(x, BF16),
        topk_ids=tensor(ids, I32),
        topk_weights=tensor(w, F32),
        router_weight_on_input=True,
    )
    on_input = await served.call.forward(r)
    assert relative_error(values(on_input.output), expected(weights, r)) <= tolerance("bf16")
    r.router_weight_on_input = False
    assert relative_error(values(on_input.output), expected(weights, r)) > 0.05, "the test can tell them apart"


async def test_concurrent_calls_for_one_layer_become_one_batch(served, weights):
    requests = [batch(4, seed=s) for s in range(8)]
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1, seed=99)))
        await asyncio.to_thread(served.entered.wait, 20)
        calls = [asyncio.create_task(served.call.forward(r)) for r in requests]
        await wait_for(lambda: served.engine.load().queued_requests == 9)
    answers = await asyncio.gather(*calls)
    await first
    assert served.kernels == [1, 32]
    for r, a in zip(requests, answers, strict=True):
        check(weights, r, a)
        assert (a.timing.batch_tokens, a.timing.batch_requests) == (32, 8)


async def test_describe(served):
    brief = await served.call.describe()
    full = await served.call.describe(include_decisions=True)
    layer = full.layers[1]
    assert [(r.first, r.count) for r in layer.held] == [(1, 6)]
    assert (layer.layer, layer.num_experts, layer.top_k, layer.intermediate_size) == (1, 8, 2, 128)
    assert (layer.weight_scheme, layer.activation, layer.backend) == ("int4_g128", "silu_and_mul", "reference")
    assert (layer.activation_scheme, layer.checkpoint_activation_scheme) == ("none", "none")
    verdict = next(v for v in layer.verdicts if v.backend == "reference")
    assert verdict.eligible
    assert 0 < verdict.relative_error <= tolerance("bf16")
    assert all(v.refusals for v in layer.verdicts if not v.eligible)
    assert not brief.layers[1].verdicts
    assert (full.model.family, full.model.hidden_size) == ("qwen3_moe", H)
    assert (full.limits.max_tokens, full.limits.max_requests_in_flight) == (MAX_TOKENS, IN_FLIGHT)
    assert not full.transports, "inline alone"
    assert full.memory.weights_bytes > 2 * 6 * (3 * H * 128) // 2, "two layers of six experts in int4"
    assert full.memory.scratch_bytes > 0
    assert full.memory.pinned_bytes == full.memory.graphs_bytes == 0, "a CPU"
