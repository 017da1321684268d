"""Layers for the tests of the row `cpu`, and calls of them into poisoned buffers."""

from __future__ import annotations

import torch

from expertd_kernels import Activation, Scheme
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import Element, ScaleType

PACKAGES = installed_packages([b for b in BACKENDS if b.name == "cpu"])
MISSING = PACKAGES["expertd-cpu-kernel"].error

if not MISSING:
    from expertd_kernels.backends import cpu
    from expertd_kernels.native import library as native

ODD = {
    "int4_g20_f16": Scheme(Element.INT4, 1, 20, ScaleType.F16),
    "int4_g96_f32_zp": Scheme(Element.INT4, 1, 96, ScaleType.F32, zeros=True),
    "e4m3_block24x40": Scheme(Element.E4M3, 24, 40, ScaleType.F32),
    "int8_g128_f16": Scheme(Element.INT8, 1, 128, ScaleType.F16),
}
SCHEMES = ["int4_g16", "int4_g32", "int4_g64", "int4_g128", "int4_channel", "int4_g32_zp", "int4_g128_zp",
           "int4_channel_zp", "int8_g32_zp", "int8_g128", "int8_channel", "int8_channel_zp", "mxfp4", "nvfp4",
           "e4m3_block128", "e4m3_channel", "e4m3_tensor", "mxfp8", "bf16", "f16", "f32", *ODD]  # fmt: skip


def layer(scheme, E=4, H=72, I=40, k=2, activation="silu_and_mul", compute="bf16", invariant=False, **features):
    """(weights, problem, packed)."""
    weights = random_weights(ODD.get(scheme, scheme), E, H, I, activation=Activation.parse(activation), **features)
    problem = problem_of(
        weights, detect_device("cpu"), top_k=k, compute_dtype=compute, packages=PACKAGES, batch_invariant=invariant
    )
    return weights, problem, cpu.pack(weights, problem)


def run(packed, problem, inputs, threads=1, dtype=None, **options):
    """The answer in a buffer that was full of NaN, at the level that EXPERTD_CPU_ISA names.  dtype: its own; None =
    as the inputs'."""
    x = inputs[0]
    out = torch.full(x.shape, float("nan"), dtype=dtype or x.dtype)
    result = cpu.CpuExperts(packed, problem, native.context(threads=threads))(*inputs, out=out, **options)
    assert result is out
    return out


def inputs_for(problem, tokens, seed=0):
    dtype = torch.float32 if problem.compute_dtype == "f32" else torch.bfloat16
    return random_inputs(tokens, problem.hidden_size, problem.num_experts, problem.top_k, seed=seed, dtype=dtype)


def same_bits(a, b):
    assert dict(a.tensors()).keys() == dict(b.tensors()).keys()
    for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert x.shape == y.shape, name
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name
