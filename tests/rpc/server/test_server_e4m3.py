"""Hidden states that come as e4m3 with scales: the same answer as the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
from server_kit import BF16, F16, F32, FailedError, H, batch, check, expected, tensor, values

from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels import relative_error, tolerance

E4M3 = pb.DATA_TYPE_E4M3


def quantized(r: pb.ForwardRequest, typed: bool = False) -> tuple[pb.ForwardRequest, pb.ForwardRequest]:
    """(`r` with e4m3 hidden states, `r` with the bf16 numbers that those stand for)."""
    x = values(r.hidden_states).float()
    blocks = x.view(len(x), -1, 128)
    scales = blocks.abs().amax(2) / 448
    codes = (blocks / scales[..., None]).to(torch.float8_e4m3fn)
    wide = (codes.float() * scales[..., None]).view(len(x), -1)
    e4m3, plain = pb.ForwardRequest(), pb.ForwardRequest()
    e4m3.CopyFrom(r)
    plain.CopyFrom(r)
    plain.hidden_states.CopyFrom(tensor(wide, BF16))
    t = pb.Tensor(dtype=E4M3, shape=list(x.shape), scales=pb.BlockScales(block=128))
    if typed:
        t.floats.values.extend(codes.float().view(-1).tolist())
        t.scales.floats.values.extend(scales.view(-1).tolist())
    else:
        t.raw, t.scales.raw = codes.view(torch.uint8).numpy().tobytes(), scales.numpy().tobytes()
    e4m3.hidden_states.CopyFrom(t)
    return e4m3, plain


@pytest.mark.parametrize("output", [0, BF16, F16, F32])
async def test_e4m3_is_computed_as_the_numbers_that_it_stands_for(served, weights, output):
    r = batch(7, seed=3, layer=1, dtypes=(F32, pb.DATA_TYPE_I32, F32), output_dtype=output)
    exact = expected(weights, r)
    e4m3, plain = quantized(r)
    a, b = await served.call.forward(e4m3), await served.call.forward(plain)
    assert a.output.dtype == (output or BF16)
    assert a.output == b.output
    assert a.routes_computed == b.routes_computed
    check(weights, plain, a)
    assert tolerance("bf16") < relative_error(values(a.output).float(), exact) < 0.05, "rounded once, and visibly"


async def test_typed_numbers_give_the_same_answer(served):
    r = batch(3, seed=5)
    raw, typed = quantized(r)[0], quantized(r, typed=True)[0]
    a, b = await served.call.forward(raw), await served.call.forward(typed)
    assert a.output == b.output
    assert values(a.output).any()


async def test_a_scale_that_is_no_number_spoils_its_own_row(served):
    r, _ = quantized(batch(4, seed=6))
    sound = values((await served.call.forward(r)).output)
    for bad in (float("nan"), float("inf"), -float("inf")):
        scales = torch.frombuffer(bytearray(r.hidden_states.scales.raw), dtype=torch.float32).view(4, -1)
        scales[2, 1] = bad
        spoilt = pb.ForwardRequest()
        spoilt.CopyFrom(r)
        spoilt.hidden_states.scales.raw = scales.numpy().tobytes()
        got = values((await served.call.forward(spoilt)).output)
        assert torch.equal(got[[0, 1, 3]], sound[[0, 1, 3]])
        assert not got[2].isfinite().all()


async def test_describe_names_it(served):
    d = await served.call.describe()
    assert E4M3 in d.input_dtypes
    assert E4M3 in d.output_dtypes


@pytest.mark.parametrize("hidden", [F32, BF16])
async def test_an_output_of_e4m3_is_what_bf16_rounds_to(served, hidden):
    dtypes = (hidden, pb.DATA_TYPE_I32, F32)
    plain = await served.call.forward(batch(7, seed=3, layer=1, dtypes=dtypes, output_dtype=BF16))
    a = await served.call.forward(batch(7, seed=3, layer=1, dtypes=dtypes, output_dtype=E4M3))
    assert (a.output.dtype, list(a.output.shape), a.output.scales.block) == (E4M3, [7, H], 128)
    blocks = values(plain.output).float().view(7, -1, 128)
    scales = blocks.abs().amax(2) / 448
    codes = (blocks * (1 / scales)[..., None]).to(torch.float8_e4m3fn)
    assert a.output.raw == codes.view(torch.uint8).numpy().tobytes()
    assert a.output.scales.raw == scales.numpy().tobytes()


async def test_no_digest_is_made_of_e4m3(served):
    r = batch(2, output_dtype=E4M3)
    r.output_form = pb.OUTPUT_FORM_DIGEST
    with pytest.raises(FailedError, match="DIGEST of E4M3"):
        await served.call.forward(r)


async def test_no_tokens_need_no_scales(served):
    r = batch(0)
    r.hidden_states.dtype = E4M3
    a = await served.call.forward(r)
    assert (list(a.output.shape), a.output.dtype) == ([0, H], BF16)
