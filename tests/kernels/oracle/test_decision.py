"""What the oracle decides for every pair of weights and activations that serving engines have a selector for, on every
platform that they have it for: the row, or that nothing computes it, with each row's reason."""

import pytest

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, Problem, Scheme, decide
from expertd_kernels.oracle.decision import Grade
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS

PACKAGES = dict(assumed_packages(BACKENDS))
GPT_OSS = {"activation": Activation.parse("swigluoai"), "bias": True, "hidden_size": 2880, "intermediate_size": 2880}
RELU2 = {"activation": Activation.parse("relu2")}
NONE = ActivationQuant.NONE
TOKEN, GROUP128, TENSOR = ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_GROUP128, ActivationQuant.E4M3_TENSOR
MXFP8, MXFP4, NVFP4 = ActivationQuant.MXFP8, ActivationQuant.MXFP4, ActivationQuant.NVFP4
INT8, INT8_GROUP = ActivationQuant.INT8_TOKEN, ActivationQuant.INT8_GROUP

# device, weights, activations, features, expected row (None: nothing)
EXPECTED = [
    # int4 and int8, weight-only
    ("cpu-avx512", "int4_g128", NONE, {}, "cpu"),
    ("cpu-arm", "int4_g128", NONE, {"act_order": True}, "cpu"),
    ("sm80", "int4_g128", NONE, {}, "triton"),
    ("sm80", "int4_g128_zp", NONE, {"bias": True}, "triton"),
    ("sm90", "int4_g128", NONE, {}, "gluon_sm90"),
    ("sm90", "int4_g128_zp", NONE, {}, "gluon_sm90"),
    ("sm90", "int4_channel", NONE, {"bias": True}, "gluon_sm90"),
    ("sm90", "int4_g128", NONE, {"act_order": True}, "triton"),
    ("sm90", "int8_channel", NONE, {}, "gluon_sm90"),
    ("sm90", "int8_channel_zp", NONE, {}, "gluon_sm90"),
    ("sm100", "int4_g32", NONE, {}, "triton"),
    ("sm100", "int4_g32", NONE, {"bias": True}, "triton"),
    ("sm100", "int4_g32_zp", NONE, {}, "triton"),
    ("sm100", "int4_g128", NONE, {}, "triton"),
    ("sm100", "int8_channel", NONE, {}, "triton"),
    ("gfx942", "int4_g128", NONE, {}, "triton"),
    ("gfx1100", "int4_g128_zp", NONE, {"bias": True}, "triton"),
    ("xpu-xe2", "int4_g128", NONE, {}, "xpu"),
    ("xpu-xe2", "int4_g32", NONE, {"bias": True}, "xpu"),
    ("xpu-xe2", "int4_g128_zp", NONE, {}, "triton"),
    ("xpu-xe2", "int8_channel", NONE, {}, "triton"),
    ("xpu-xe2", "int4_g128", NONE, {"act_order": True}, "triton"),
    # e4m3
    ("sm80", "e4m3_block128", NONE, {}, "triton"),
    ("sm90", "e4m3_block128", NONE, {}, "gluon_sm90"),
    ("sm90", "e4m3_block128", GROUP128, {}, "gluon_w8a8"),
    ("sm90", "e4m3_channel", TOKEN, {}, "gluon_w8a8"),
    ("sm90", "e4m3_tensor", TOKEN, {}, "gluon_w8a8"),
    ("sm90", "e4m3_tensor", TENSOR, {}, "gluon_w8a8"),
    ("sm90", "e4m3_tensor", TENSOR, {"bias": True}, "gluon_w8a8"),
    ("sm90", "e4m3_tensor", TENSOR, RELU2, "triton_w8a8"),
    ("sm80", "e4m3_block128", GROUP128, {}, None),
    ("sm100", "e4m3_block128", GROUP128, {}, "triton_w8a8"),
    ("sm100", "e4m3_block128", GROUP128, {"bias": True}, "triton_w8a8"),
    ("sm100", "e4m3_tensor", TENSOR, {}, "triton_w8a8"),
    ("sm120", "e4m3_tensor", TENSOR, {}, "triton_w8a8"),
    ("gfx942", "e4m3_block128", NONE, {}, "triton"),
    ("gfx942", "e4m3_block128", GROUP128, {}, None),
    ("gfx950", "e4m3_block128", NONE, {}, "triton"),
    ("gfx950", "e4m3_block128", GROUP128, {}, "aiter"),
    ("gfx950", "e4m3_channel", TOKEN, {}, "aiter"),
    ("gfx950", "e4m3_channel", TOKEN, {"bias": True}, "triton_w8a8"),
    ("gfx950", "mxfp8", MXFP8, {}, "triton_w8a8"),
    ("gfx950", "mxfp4", MXFP8, GPT_OSS, "triton_w4a8"),
    ("gfx942", "int8_channel", INT8, {}, "triton_w8a8"),
    ("gfx1100", "int8_channel", INT8, {"bias": True}, "triton_w8a8"),
    ("xpu-xe2", "int8_channel", INT8, {}, None),
    ("xpu-xe2", "e4m3_block128", NONE, {}, "xpu"),
    ("xpu-xe2", "e4m3_block128", GROUP128, {}, None),
    ("xpu-xe2", "e4m3_tensor", NONE, {}, "xpu"),
    ("xpu-xe2", "e4m3_channel", NONE, {}, "triton"),
    ("cpu-amx", "e4m3_block128", NONE, {}, "cpu"),
    ("cpu-amx", "e4m3_block128", GROUP128, {}, None),
    # mxfp8
    ("sm90", "mxfp8", NONE, {}, "gluon_sm90"),
    ("sm90", "mxfp8", MXFP8, {}, "triton_w8a8"),
    ("sm100", "mxfp8", MXFP8, {}, "triton_w8a8"),
    ("sm100", "mxfp8", NONE, {}, "triton"),
    ("gfx950", "mxfp8", NONE, {}, "triton"),
    ("xpu-xe3", "mxfp8", NONE, {}, "xpu"),
    # nvfp4
    ("sm90", "nvfp4", NONE, {}, "triton"),
    ("sm90", "nvfp4", NVFP4, {}, None),
    ("sm100", "nvfp4", NVFP4, {}, "flashinfer_trtllm"),
    ("sm100", "nvfp4", NVFP4, {"activation": Activation(limit=7.0)}, None),
    ("sm100", "nvfp4", NONE, {"activation": Activation(limit=7.0)}, "triton"),
    ("sm120", "nvfp4", NVFP4, {}, "flashinfer_cutlass"),
    ("sm120", "nvfp4", NVFP4, {"bias": True}, None),
    # mxfp4
    ("sm80", "mxfp4", NONE, GPT_OSS, "triton"),
    ("sm90", "mxfp4", NONE, GPT_OSS, "gluon_sm90"),
    ("sm90", "mxfp4", MXFP8, GPT_OSS, "triton_w4a8"),
    ("sm100", "mxfp4", NONE, GPT_OSS, "triton"),
    ("sm100", "mxfp4", MXFP8, GPT_OSS, "triton_w4a8"),
    ("sm120", "mxfp4", MXFP8, GPT_OSS, "triton_w4a8"),
    ("sm120", "mxfp4", NONE, GPT_OSS, "triton"),
    ("sm100", "mxfp4", MXFP4, {}, None),
    ("gfx950", "mxfp4", NONE, GPT_OSS, "triton"),
    ("xpu-xe2", "mxfp4", NONE, GPT_OSS, "xpu"),
    ("cpu-avx2", "mxfp4", NONE, GPT_OSS, "cpu"),
    # unquantized
    ("sm80", "bf16", NONE, {}, "triton"),
    ("sm90", "bf16", NONE, {}, "gluon_sm90"),
    ("sm90", "bf16", NONE, RELU2, "gluon_sm90"),
    ("sm100", "bf16", NONE, {}, "triton"),
    ("sm100", "bf16", NONE, GPT_OSS, "triton"),
    ("sm100", "bf16", NONE, RELU2, "triton"),
    ("gfx942", "bf16", NONE, {}, "triton"),
    ("xpu-xe2", "bf16", NONE, GPT_OSS, "xpu"),
    ("cpu-portable", "bf16", NONE, {}, "cpu"),
    ("sm90", "f16", NONE, {}, "triton"),
    # int8 and int4 with 8-bit activations
    ("sm90", "int4_g128", TOKEN, {}, "triton_w4a8"),
    ("sm90", "int4_g128_zp", TOKEN, {}, "triton_w4a8"),
    ("sm80", "int4_g128", TOKEN, {}, None),
    ("sm90", "int4_g128", INT8, {}, "triton_w4a8"),
    ("sm90", "int4_g128_zp", INT8, {"bias": True}, "triton_w4a8"),
    ("sm90", "int4_g128", INT8, {"act_order": True}, None),
    ("sm80", "int4_channel_zp", INT8, {}, "triton_w4a8"),
    ("gfx942", "int4_g32_zp", INT8, {}, "triton_w4a8"),
    ("gfx942", "int4_g32_zp", TOKEN, {}, None),
    ("cpu-avx512", "int4_g128_zp", INT8, {"act_order": True}, "cpu_w4a8"),
    ("sm90", "int8_channel", INT8, {}, "triton_w8a8"),
    ("sm80", "int8_tensor", INT8, {"bias": True}, "triton_w8a8"),
    ("sm90", "int8_channel_zp", INT8, {}, None),
    ("sm90", "int8_g128", INT8, {}, None),
    ("cpu-amx", "int8_channel", INT8, {}, None),
    ("cpu-avx512", "int4_g128", INT8_GROUP, {}, "cpu_w4a8"),
    ("cpu-arm", "int4_g32_zp", INT8_GROUP, {"bias": True}, "cpu_w4a8"),
    ("sm90", "int4_g128", INT8_GROUP, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "scheme", "how", "features", "expected"),
    EXPECTED,
    ids=lambda x: x if isinstance(x, str) else x.value if isinstance(x, ActivationQuant) else None,
)
def test_decision(device, scheme, how, features, expected):
    s = Scheme.parse(scheme)
    sizes = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8}
    p = Problem(
        NAMED_DEVICES[device],
        s,
        s,
        **{**sizes, **features},
        activation_quant=how,
        static_scales=how.static,
        packages=PACKAGES,
    )
    d = decide(p)
    assert (d.chosen.name if d.chosen else None) == expected, [(v.backend, v.refusals) for v in d.verdicts]
    if expected is None:
        assert all(v.refusals for v in d.verdicts)
        rounding = [v for v in d.verdicts if any(how.value in r for r in v.refusals)]
        assert rounding, "a row says that it does not round like this"


def test_each_device_and_each_scheme_is_asked_about():
    assert {e[0] for e in EXPECTED} >= set(NAMED_DEVICES) - {"sm86", "sm89", "sm103"}
    assert {e[1] for e in EXPECTED} >= {"int4_g128", "int4_g128_zp", "int8_channel", "e4m3_tensor", "e4m3_channel",
                                        "e4m3_block128", "mxfp8", "mxfp4", "nvfp4", "bf16", "f16"}  # fmt: skip
    assert {e[2] for e in EXPECTED} == set(ActivationQuant)


@pytest.mark.parametrize("device", NAMED_DEVICES)
def test_a_lower_grade_never_stands_before_a_higher_one(device):
    """Fallbacks are last, whatever is known of them: they are slow."""
    fallbacks = {b.name for b in BACKENDS if b.fallback}
    for scheme in ("int4_g128", "int4_g32", "mxfp4", "mxfp8", "e4m3_block128", "bf16"):
        s = Scheme.parse(scheme)
        for how in (NONE, GROUP128, MXFP8):
            d = decide(Problem(NAMED_DEVICES[device], s, s, 128, 2048, 768, 8, packages=PACKAGES, activation_quant=how))
            grades = [v.grade for v in d.verdicts if v.backend not in fallbacks]
            assert grades == sorted(grades, reverse=True)
            names = [v.backend in fallbacks for v in d.verdicts]
            assert names == sorted(names)
            first = next((v for v in d.verdicts if v.eligible), None)
            assert d.chosen is None if first is None else (d.chosen.name, d.grade) == (first.backend, first.grade)


@pytest.mark.parametrize(
    ("name", "device", "scheme", "grade"),
    [
        ("gluon_sm90", "sm90", "int4_g128", Grade.RUN),
        ("triton", "sm90", "int4_g128", Grade.RUN),
        ("triton", "sm100", "int4_g128", Grade.RUN_ELSEWHERE),
        ("triton", "xpu-xe2", "int4_g128", Grade.CHECKED),
        ("flashinfer_trtllm", "sm100", "mxfp8", Grade.CHECKED),
        ("flashinfer_cutlass", "sm90", "mxfp4", Grade.RUN),
        ("flashinfer_cutlass", "sm120", "nvfp4", Grade.CHECKED),
        ("xpu", "xpu-xe2", "int4_g128", Grade.CHECKED),
        ("cpu", "cpu-avx512", "int4_g128", Grade.RUN),
        ("cpu", "cpu-arm", "int4_g128", Grade.RUN_ELSEWHERE),
    ],
)
def test_what_is_known_of_a_row_depends_on_the_device_and_the_weights(name, device, scheme, grade):
    s = Scheme.parse(scheme)
    how = NVFP4 if scheme == "nvfp4" else NONE
    d = decide(Problem(NAMED_DEVICES[device], s, s, 128, 2048, 768, 8, packages=PACKAGES, activation_quant=how))
    assert next(v.grade for v in d.verdicts if v.backend == name) is grade
