"""The row `humming`: its input form there and back.  Whole layers: test_glue.py."""

from dataclasses import replace

import pytest
import torch
from glue_cases import BLOCKS, HUMMING_SCHEMES
from vendor import bits, check_packing, refused

from expertd_kernels import NAMED_DEVICES, ActivationQuant, decide, problem_of
from expertd_kernels.backends import humming as backend
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.scheme import ScaleType, Scheme

SM90 = NAMED_DEVICES["sm90"]


def layer(scheme, H=256, I=128, E=3, **kw):
    return random_weights(scheme, E, H, I, bias=kw.pop("bias", True), **kw)


def problem(w):
    return problem_of(w, SM90, top_k=2, packages=dict(assumed_packages(BACKENDS)))


def refusals(w):
    return next(v for v in decide(problem(w)).verdicts if v.backend == "humming").refusals


@pytest.mark.parametrize("scheme", [*HUMMING_SCHEMES, *BLOCKS], ids=str)
def test_unpacking_gives_back_every_bit(scheme):
    w = layer(scheme)
    assert refusals(w) == ()
    check_packing(backend, w, problem(w))


def test_scales_that_bf16_does_not_hold_are_kept():
    w = layer(Scheme.parse("int4_g64_zp", ScaleType.F32))
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.weight_scale"].dtype == torch.bfloat16
    assert bits(backend.unpack(packed)) == bits(w)


REFUSED = {
    "activation order": (lambda: layer("int4_g128", act_order=True), "does not permute columns"),
    "e4m3 channel": (lambda: layer("e4m3_channel"), "group size channel"),
    "nvfp4": (lambda: layer("nvfp4"), "second-level scales are not computed"),
    "bf16": (lambda: layer("bf16"), "does not compute on bf16 weights"),
    "cut group": (lambda: layer("int4_g128", I=192), "I = 192 is no multiple of 128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_or_not_there_is_refused_before_packing(case):
    make, sentence = REFUSED[case]
    w = make()
    assert any(sentence in r for r in refusals(w)), refusals(w)
    assert sentence in refused("humming", w, problem(w))


def test_rounded_activations_and_stale_layouts_are_refused():
    w = layer("int4_g128")
    rounded = replace(problem(w), activation_quant=ActivationQuant.INT8_TOKEN)
    assert "does not round activations to int8_token" in refused("humming", w, rounded)
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 2"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


def test_the_row_says_where_it_was_run():
    assert next(b for b in BACKENDS if b.name == "humming").hardware.startswith("run on SM90 only")
