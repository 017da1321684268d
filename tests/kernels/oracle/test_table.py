"""Facts that belong to one line of a row: scale types, functions, block and size constraints with certain weights."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from expertd_kernels import (
    NAMED_DEVICES,
    Activation,
    ActivationKind,
    Backend,
    Element,
    Problem,
    ScaleType,
    Scheme,
    decide,
)
from expertd_kernels.oracle.decision import DeviceRange, SchemeSupport
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.weights.scheme import WHOLE

SILU = frozenset({ActivationKind.SILU_AND_MUL})
ROW = Backend(
    name="row",
    target="nowhere",
    devices=(DeviceRange("cuda"),),
    schemes=(
        SchemeSupport(Element.INT4, groups=frozenset({64, WHOLE}), whole_blocks=True, intermediate_multiple=32),
        SchemeSupport(Element.E2M1, groups=frozenset({32}), scales=frozenset({ScaleType.E8M0}), hidden_multiple=256),
        SchemeSupport(Element.E4M3, blocks=frozenset({(128, 128)}), functions=SILU, whole_blocks=True),
        SchemeSupport(Element.BF16),
        SchemeSupport(Element.F16, devices=(DeviceRange("cuda", (10, 0), (10, 9)),)),
    ),
    summary="",
    swigluoai=(1.702, 1.0, 7.0),
    unclamped=frozenset({ActivationKind.GELU_AND_MUL}),
    hidden_multiple=8,
)


def refusals(scheme, hidden=2048, intermediate=768, w2=None, **more):
    s13 = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    s2 = Scheme.parse(w2) if w2 else s13
    p = Problem(NAMED_DEVICES["sm90"], s13, s2, 8, hidden, intermediate, 2, **more)
    return decide(p, (ROW,), order={}).verdicts[0].refusals


def test_a_layer_that_keeps_to_every_line_is_served():
    for scheme in ("int4_g64", "int4_channel", "mxfp4", "e4m3_block128", "bf16"):
        assert refusals(scheme) == ()


@pytest.mark.parametrize(
    ("scheme", "hidden", "intermediate", "sentence"),
    [
        ("int4_g64", 2048 + 32, 768, "H = 2080 is no multiple of 64"),
        ("int4_g64", 2048, 768 + 32, "I = 800 is no multiple of 64"),
        ("int4_channel", 2048, 768 + 16, "I = 784 is no multiple of 32"),
        ("mxfp4", 2048 + 128, 768, "H = 2176 is no multiple of 256"),
        ("e4m3_block128", 2048, 768 + 64, "I = 832 is no multiple of 128"),
        ("e4m3_block128", 2048 + 64, 768, "H = 2112 is no multiple of 128"),
        ("bf16", 2044, 768, "H = 2044 is no multiple of 8"),
    ],
)
def test_sizes_follow_the_weights(scheme, hidden, intermediate, sentence):
    (found,) = refusals(scheme, hidden, intermediate)
    assert found.startswith(sentence)


def test_each_matrix_brings_its_own_multiples():
    assert refusals("bf16", 2048 + 8, 832, w2="int4_g64") == ()  # I divided by 64; H of w2 is rows, not groups
    (found,) = refusals("int4_g64", 2048 + 8, 832, w2="bf16")
    assert found.startswith("H = 2056 is no multiple of 64")


def test_the_type_of_scale_is_part_of_the_scheme():
    (found,) = refusals(Scheme(Element.E2M1, 1, 32, ScaleType.BF16))
    assert "scales of type bf16 (has: e8m0)" in found


def test_functions_can_depend_on_the_weights():
    gelu = Activation(ActivationKind.GELU_AND_MUL)
    assert refusals("int4_g64", activation=gelu) == ()
    assert refusals("e4m3_block128", activation=gelu) == ("does not compute gelu_and_mul with e4m3_block128 weights",)


def test_fixed_swigluoai_constants_are_compared():
    gpt_oss = Activation.parse("swigluoai")
    assert refusals("mxfp4", activation=gpt_oss) == ()
    for other in (replace(gpt_oss, limit=10.0), replace(gpt_oss, alpha=1.5), replace(gpt_oss, beta=0.0)):
        (found,) = refusals("mxfp4", activation=other)
        assert found.startswith("computes swigluoai with alpha 1.702, beta 1.0, limit 7.0 only")


def test_weights_can_need_another_device_than_the_row():
    assert refusals("f16") == ("f16: needs compute capability 10.0 to 10.9, this is cuda:sm90",)
    s = Scheme.parse("f16")
    blackwell = Problem(NAMED_DEVICES["sm100"], s, s, 8, 2048, 768, 2)
    assert decide(blackwell, (ROW,), order={}).verdicts[0].eligible
    elsewhere = Problem(NAMED_DEVICES["cpu-avx2"], s, s, 8, 2048, 768, 2)
    assert decide(elsewhere, (ROW,), order={}).verdicts[0].refusals == ("runs on cuda, this is cpu:x86_64",)


def test_clamping_can_depend_on_the_function():
    assert refusals("bf16", activation=Activation(limit=5.0)) == ()
    clamped = Activation(ActivationKind.GELU_AND_MUL, limit=5.0)
    assert refusals("bf16", activation=clamped) == ("does not clamp before gelu_and_mul",)
    assert refusals("bf16", activation=replace(clamped, limit=None)) == ()


def test_a_backend_that_ran_names_its_measurements_and_they_name_it():
    root = Path(__file__).parents[3]
    for b in BACKENDS:
        assert bool(b.ran) == bool(b.measured), f"{b.name}: `ran` and `measured` (a page of results) go together"
        for paper in b.measured:
            assert re.search(rf"\b{b.name}\b", (root / paper).read_text()), f"{paper} says nothing of {b.name}"


def test_what_is_said_of_lines_that_did_not_run():
    by_name = {b.name: b for b in BACKENDS}
    assert by_name["marlin"].hardware == "int4, int8, e2m1 run on SM90. All else not run on hardware"
    said = by_name["flashinfer_cutlass"].hardware
    assert said.startswith("e2m1, e4m3, bf16 run on SM90 (not e2m1 on mxfp8, e4m3 on mxfp8, e2m1 on nvfp4")
    assert said.endswith("). All else not run on hardware")
