import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd_kernels import Activation, ActivationKind, Element, ScaleType, Scheme

NAMES = [
    "int4_g128", "int4_g32_zp", "int4_channel", "int8_g64", "int8_channel_zp", "e4m3_tensor", "e4m3_channel",
    "e4m3_block128", "e4m3_block64x128", "mxfp8", "mxfp4", "nvfp4", "bf16", "f16", "f32",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_parses_to_the_scheme_that_bears_it(name):
    assert Scheme.parse(name).name == name


@pytest.mark.parametrize("name", ["", "int4", "fp8", "int4_g", "mxfp4_zp", "e4m3_block128_zp", "int3_g128"])
def test_other_names_are_refused_with_what_is_wanted(name):
    with pytest.raises(ValueError, match=r"want|zero points|scale type|extent"):
        Scheme.parse(name)


def test_zero_points_belong_to_integers_only():
    with pytest.raises(ValueError, match="only integer codes"):
        Scheme(Element.E4M3, 1, 0, ScaleType.F32, zeros=True)


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from(NAMES))
def test_bytes_count_codes_and_scales(n, k, name):
    scheme = Scheme.parse(name)
    rows, cols = scheme.scale_shape(n, k)
    assert scheme.nbytes(n, k) >= (n * k * scheme.element.bits) // 8
    if scheme.group_size:
        assert (rows, cols) == (n, -(-k // scheme.group_size))


def test_int4_g128_stores_4_25_bits_a_weight():
    assert Scheme.parse("int4_g128").nbytes(1024, 1024) * 8 == 1024 * 1024 * (4 + 16 / 128)


def test_each_segment_starts_a_new_scale_block():
    # gate and up of 192 rows each: two blocks of 128 rows a projection, not three for all 384 rows
    assert Scheme.parse("e4m3_block128").scale_shape(384, 320, 2) == (4, 3)


@pytest.mark.parametrize("kind", list(ActivationKind))
def test_activation_names_round_trip(kind):
    activation = Activation.parse(kind.value)
    assert activation.name == kind.value
    assert activation.segments == (1 if kind is ActivationKind.RELU2 else 2)


def test_swigluoai_comes_with_gpt_oss_constants():
    a = Activation.parse("swigluoai")
    assert (a.alpha, a.beta, a.limit) == (1.702, 1.0, 7.0)


def test_clamped_silu_says_its_limit():
    assert Activation.parse("silu_and_mul_limit10").limit == 10.0
    assert Activation.parse("silu_and_mul_limit10").name == "silu_and_mul_limit10"
