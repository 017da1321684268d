"""Backend `cpu_torch`: the fall-back without the compiled kernel."""

import pytest
import torch

from expertd_kernels import Activation, reference, relative_error, tolerance
from expertd_kernels.backends import cpu_torch
from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights

SCHEMES = ["int4_g32", "int4_g128", "int4_g32_zp", "int4_channel", "int8_g64", "mxfp4", "e4m3_block128", "bf16"]


@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("on_input", [False, True])
def test_error_and_round_trip(scheme, compute, on_input):
    k = 1 if on_input else 2
    weights = random_weights(scheme, 4, 256, 128, activation=Activation.parse("swigluoai"), bias=True)
    problem = problem_of(weights, detect_device("cpu"), top_k=k, compute_dtype=compute)
    packed = cpu_torch.pack(weights, problem)
    int4 = compute == "bf16" and scheme in ("int4_g32", "int4_g128")
    assert packed.meta["w13"]["int4"] is int4
    back = cpu_torch.unpack(packed)
    for a, b in ((weights.w13, back.w13), (weights.w2, back.w2)):
        for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
    dtype = torch.float32 if compute == "f32" else torch.bfloat16
    x, ids, w = random_inputs(9, 256, 4, k, dtype=dtype)
    ids[4] = -1
    w = w * 0.5
    out = torch.full_like(x, float("nan"))
    cpu_torch.experts(packed, problem)(x, ids, w, out=out, router_weight_on_input=on_input)
    ref = reference(weights, x, ids, w, router_weight_on_input=on_input)
    assert relative_error(out, ref) <= tolerance(compute)
    assert torch.equal(out[4], torch.zeros_like(out[4]))


def test_no_route_at_all():
    weights = random_weights("int4_g32", 2, 64, 32)
    problem = problem_of(weights, detect_device("cpu"))
    x, ids, w = random_inputs(3, 64, 2, 1)
    ids[:] = -1
    assert (cpu_torch.experts(cpu_torch.pack(weights, problem), problem)(x, ids, w) == 0).all()
