"""The oracle as a pure function: every rule, the order, pinning."""

from dataclasses import replace

import pytest

from expertd_kernels import (
    NAMED_DEVICES,
    Activation,
    ActivationKind,
    ActivationQuant,
    Backend,
    Element,
    NoBackendError,
    Package,
    Problem,
    Scheme,
    decide,
)
from expertd_kernels.common.problem import Device
from expertd_kernels.oracle.backend import CPU_KERNEL
from expertd_kernels.oracle.decision import RULES, DeviceRange, SchemeSupport

SM90 = NAMED_DEVICES["sm90"]

FAST = Backend(
    name="fast",
    target="nowhere",
    devices=(DeviceRange("cuda", (9, 0), (9, 0)),),
    schemes=(SchemeSupport(Element.INT4, frozenset({64, 128})), SchemeSupport(Element.BF16)),
    summary="",
    activations=frozenset({ActivationKind.SILU_AND_MUL}),
    needs={"fastlib": ">=1.2,<2"},
    bias=False,
    clamp=False,
    deterministic=False,
    mixed_schemes=False,
    hidden_multiple=128,
    intermediate_multiple=64,
    max_experts=128,
)
SLOW = Backend(
    name="slow",
    target="nowhere",
    devices=(DeviceRange("cuda"), DeviceRange("cpu")),
    schemes=(SchemeSupport(Element.INT4, None, None, zeros=True), SchemeSupport(Element.BF16)),
    summary="",
    act_order=True,
)
ROWS = (SLOW, FAST)
ORDER = {"cuda": ("fast", "slow")}
FITS = Problem(
    SM90, Scheme.parse("int4_g128"), Scheme.parse("int4_g128"), 128, 2048, 768, 8, packages={"fastlib": Package("1.4")}
)


def refusals(problem, backend="fast"):
    d = decide(problem, ROWS, order=ORDER)
    return next(v.refusals for v in d.verdicts if v.backend == backend)


def test_the_platform_order_decides_among_eligible_rows():
    d = decide(FITS, ROWS, order=ORDER)
    assert d.chosen is FAST
    assert [v.backend for v in d.verdicts] == ["fast", "slow"]
    assert all(v.eligible for v in d.verdicts)


CASES = {
    "device": (replace(FITS, device=NAMED_DEVICES["sm80"]), "needs compute capability 9.0, this is cuda:sm80"),
    "kind": (replace(FITS, device=NAMED_DEVICES["cpu-avx2"]), "runs on cuda, this is cpu:x86_64"),
    "package missing": (replace(FITS, packages={}), "package fastlib>=1.2,<2 is not installed"),
    "package old": (replace(FITS, packages={"fastlib": Package("1.1")}), "1.1 is installed, >=1.2,<2 is needed"),
    "package broken": (
        replace(FITS, packages={"fastlib": Package("1.4", "ImportError: libx")}),
        "fastlib 1.4 does not import: ImportError: libx",
    ),
    "element": (replace(FITS, w13=Scheme.parse("mxfp4"), w2=Scheme.parse("mxfp4")), "does not compute on e2m1 weights"),
    "group": (replace(FITS, w13=Scheme.parse("int4_g32"), w2=Scheme.parse("int4_g32")), "group size 32 (has: 64, 128)"),
    "channel": (replace(FITS, w13=Scheme.parse("int4_channel"), w2=Scheme.parse("int4_channel")), "group size channel"),
    "zero points": (
        replace(FITS, w13=Scheme.parse("int4_g128_zp"), w2=Scheme.parse("int4_g128_zp")),
        "zero points are not computed",
    ),
    "mixed": (replace(FITS, w2=Scheme.parse("int4_g64")), "w13 and w2 have different schemes"),
    "act quant": (
        replace(FITS, activation_quant=ActivationQuant.E4M3_TOKEN),
        "does not round activations to e4m3_token",
    ),
    "activation": (replace(FITS, activation=Activation(ActivationKind.RELU2)), "does not compute relu2"),
    "clamp": (replace(FITS, activation=Activation(limit=10.0)), "does not clamp"),
    "bias": (replace(FITS, bias=True), "does not add expert biases"),
    "act order": (replace(FITS, act_order=True), "does not permute columns"),
    "hidden": (replace(FITS, hidden_size=2880), "H = 2880 is no multiple of 128 (padding to 2944 would cost 2 %"),
    "intermediate": (replace(FITS, intermediate_size=100), "I = 100 is no multiple of 64 (padding to 128"),
    "experts": (replace(FITS, num_experts=256), "holds at most 128 experts, 256 are asked"),
    "dtype": (replace(FITS, compute_dtype="f32"), "does not compute in f32"),
    "deterministic": (replace(FITS, deterministic=True), "not bit-identical"),
    "batch-invariant": (replace(FITS, batch_invariant=True), "bits depend on the batch"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule_refuses_alone_and_says_why(case):
    problem, sentence = CASES[case]
    found = refusals(problem)
    assert any(sentence in r for r in found), found
    assert len(found) == 1, found


ROUNDS = replace(
    FAST,
    schemes=(SchemeSupport(Element.INT4, None, activations=frozenset(ActivationQuant)),),
    activations=frozenset(ActivationKind),
    swigluoai=(1.702, 1.0, 7.0),
    clamp=True,
    needs={},
)
WHOLE_BLOCKS = replace(
    FAST, schemes=(SchemeSupport(Element.E4M3, None, None, whole_blocks=True),), hidden_multiple=1,
    intermediate_multiple=1, mixed_schemes=True, needs={},
)  # fmt: skip
TWO_KINDS = replace(
    FAST, devices=(DeviceRange("cuda", (9, 0), (9, 0)), DeviceRange("cuda", (10, 0), (10, 9)), DeviceRange("rocm"))
)
LIBRARY = replace(FAST, devices=(DeviceRange("cpu"),), needs={CPU_KERNEL: ""})
ONE_FUNCTION = replace(
    FAST, schemes=(SchemeSupport(Element.INT4, None, functions=frozenset({ActivationKind.SILU_AND_MUL})),)
)
OAI = Activation(ActivationKind.SWIGLUOAI, limit=7.0)
E4M3 = Scheme.parse("e4m3_block128")
CPU = replace(FITS, device=NAMED_DEVICES["cpu-avx2"])


@pytest.mark.parametrize(
    ("row", "problem", "sentence"),
    [
        (FAST, FITS, ""),
        (replace(FAST, mixed_schemes=True), replace(FITS, w2=Scheme.parse("int4_g64")), ""),
        (
            replace(ONE_FUNCTION, activations=frozenset(ActivationKind)),
            replace(FITS, activation=OAI),
            f"does not compute {ActivationKind.SWIGLUOAI.value} with int4_g128 weights",
        ),
        (ONE_FUNCTION, FITS, ""),
        (FAST, replace(FITS, num_experts=129), "holds at most 128 experts, 129 are asked"),
        (ROUNDS, replace(FITS, activation_quant=ActivationQuant.E4M3_TENSOR, static_scales=True), ""),
        (
            ROUNDS,
            replace(FITS, activation_quant=ActivationQuant.E4M3_TENSOR),
            "rounds activations to e4m3_tensor with static scales, and the checkpoint has none",
        ),
        (ROUNDS, replace(FITS, activation=OAI), ""),
        (
            ROUNDS,
            replace(FITS, activation=replace(OAI, alpha=1.5)),
            "computes swigluoai with alpha 1.702, beta 1.0, limit 7.0 only, alpha 1.5, beta 1.0, limit 7.0 is asked",
        ),
        (replace(ROUNDS, swigluoai=None), replace(FITS, activation=replace(OAI, alpha=1.5)), ""),
        (WHOLE_BLOCKS, replace(FITS, w13=E4M3, w2=E4M3, hidden_size=2048, intermediate_size=768), ""),
        (WHOLE_BLOCKS, replace(FITS, w13=E4M3, w2=E4M3, hidden_size=2112), "H = 2112 is no multiple of 128"),
        (WHOLE_BLOCKS, replace(FITS, w13=E4M3, w2=E4M3, intermediate_size=704), "I = 704 is no multiple of 128"),
        (
            TWO_KINDS,
            replace(FITS, device=NAMED_DEVICES["sm80"]),
            "needs compute capability 9.0 or 10.0 to 10.9, this is cuda:sm80",
        ),
        (TWO_KINDS, CPU, "runs on cuda or rocm, this is cpu:x86_64"),
        (LIBRARY, CPU, "the compiled library is not there"),
        (LIBRARY, replace(CPU, packages={CPU_KERNEL: Package("1")}), ""),
        (LIBRARY, replace(CPU, packages={CPU_KERNEL: Package("1", "it does not load")}), "it does not load"),
    ],
)
def test_what_a_rule_lets_pass_and_what_it_refuses_lie_side_by_side(row, problem, sentence):
    (verdict,) = decide(problem, (row,), order={"cuda": ("fast",), "cpu": ("fast",)}).verdicts
    found = "; ".join(verdict.refusals)
    assert found.startswith(sentence) if sentence else found == "", found


@pytest.mark.parametrize(
    ("w13", "w2", "hidden", "intermediate"),
    [("e4m3_block128", "bf16", 128, 128), ("bf16", "e4m3_block128", 128, 128), ("mxfp8", "bf16", 32, 1),
     ("bf16", "mxfp8", 1, 32)],
)  # fmt: skip
def test_whole_blocks_count_for_the_matrix_that_has_them(w13, w2, hidden, intermediate):
    """w13 is [2I, H], w2 [H, I]: columns of one are rows of the other."""
    line = replace(WHOLE_BLOCKS.schemes[0], groups=None)
    row = replace(WHOLE_BLOCKS, schemes=(line, SchemeSupport(Element.BF16)))
    problem = replace(FITS, w13=Scheme.parse(w13), w2=Scheme.parse(w2), hidden_size=33, intermediate_size=65)
    (verdict,) = decide(problem, (row,), order={"cuda": ("fast",)}).verdicts
    found = "; ".join(verdict.refusals)
    for what, size, multiple in (("H", 33, hidden), ("I", 65, intermediate)):
        assert (f"{what} = {size} is no multiple of {multiple} " in found) == (multiple > 1), found


def test_every_rule_runs_so_the_answer_is_a_table():
    found = refusals(replace(FITS, bias=True, hidden_size=100, packages={}))
    assert len(found) == 3


def test_a_feature_never_turns_a_refusal_into_silence():
    base = refusals(replace(FITS, bias=True))
    for problem, _ in CASES.values():
        assert set(base) <= set(refusals(replace(problem, bias=True)))


def test_a_pinned_backend_is_used_or_nothing_is():
    assert decide(FITS, ROWS, pin="slow", order=ORDER).chosen is SLOW
    d = decide(replace(FITS, bias=True), ROWS, pin="fast", order=ORDER)
    assert d.chosen is None
    with pytest.raises(NoBackendError, match="the pinned backend fast does not serve") as e:
        d.require()
    assert "fast: does not add expert biases" in str(e.value)
    with pytest.raises(ValueError, match="known are fast, slow"):
        decide(FITS, ROWS, pin="fats", order=ORDER)


def test_rounding_backends_refuse_weight_only_by_name():
    rounding = replace(
        FAST, schemes=(SchemeSupport(Element.INT4, None, activations=frozenset({ActivationQuant.E4M3_TOKEN})),)
    )
    d = decide(FITS, (rounding,), order={})
    assert "rounds activations (e4m3_token), and these are to stay in bf16" in d.verdicts[0].refusals[0]
    assert decide(replace(FITS, activation_quant=ActivationQuant.E4M3_TOKEN), (rounding,), order={}).chosen is rounding


def test_the_real_table_has_distinct_names_and_an_order_that_names_them():
    from expertd_kernels.oracle.table import BACKENDS, ORDER

    names = [b.name for b in BACKENDS]
    assert len(set(names)) == len(names)
    assert {n for order in ORDER.values() for n in order} <= set(names)
    assert all(b.summary for b in BACKENDS)


@pytest.mark.parametrize("device", NAMED_DEVICES)
def test_something_serves_every_scheme_on_every_device(device):
    for name in ("int4_g128", "int4_g32_zp", "int8_channel", "e4m3_block128", "mxfp8", "mxfp4", "nvfp4", "bf16"):
        s = Scheme.parse(name)
        d = decide(Problem(NAMED_DEVICES[device], s, s, 8, 100, 60, 2, bias=True, act_order=True))
        assert d.chosen is not None
        assert all(not any(rule(d.chosen, d.problem) for rule in RULES) for _ in (0,))


def test_a_problem_checks_itself():
    with pytest.raises(ValueError, match="num_experts is 0"):
        replace(FITS, num_experts=0)
    with pytest.raises(ValueError, match="compute dtype 'fp16'"):
        replace(FITS, compute_dtype="fp16")
    assert FITS.weight_bytes == 128 * 3 * 2048 * 768 * (4 + 16 / 128) / 8
    assert str(Device("cpu", "x86_64")) == "cpu:x86_64"
