"""Quantization without data: exact rounding, errors inside their theoretical range, edge cases, quantizing at load."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from adversarial import adversarial, e4m3_bits, int4_bits, int8_bits, mxfp4_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels import QuantTensor, Scheme, Weights, relative_error
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.sources.synthetic import SyntheticModel, random_weights
from expertd_kernels.weights import quantize as quantize_module
from expertd_kernels.weights.canonical import E2M1_VALUES, unpack_nibbles
from expertd_kernels.weights.quantize import encode, quantize, quantize_matrix, round_e2m1, scheme_named
from expertd_kernels.weights.scheme import Element, ScaleType


def matrix(w: Tensor, segments: int = 1) -> QuantTensor:
    """Unquantized [E, N, K] f32."""
    return QuantTensor(Scheme(Element.F32), tuple(w.shape), w.float().contiguous(), segments=segments)  # type: ignore[arg-type]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


RANGES = {
    # scheme: (lower, upper) bound of ||dequantized - w|| / ||w|| for normal weights with 2048 columns.  Upper: plain
    # rounding to nearest with the largest magnitude as scale; lower: what no scale of that grid can beat (the best
    # uniform 16-level quantizer of a normal variable has 0.107 without groups; groups of 128 gain little more).
    "int4_g128": (0.090, 0.111),
    "int4_g32": (0.075, 0.095),
    "int4_channel": (0.100, 0.141),
    "int4_g128_zp": (0.088, 0.101),
    "int4_channel_zp": (0.100, 0.141),
    "int8_channel": (0.0060, 0.0095),
    "int8_g128": (0.0050, 0.0070),
    "int8_channel_zp": (0.0060, 0.0095),
    "e4m3_tensor": (0.0250, 0.0270),  # 2**-4 / sqrt(3) * a factor for uniform mantissas: 0.0265
    "e4m3_channel": (0.0245, 0.0265),
    "e4m3_block128": (0.0250, 0.0270),
    "mxfp8": (0.0250, 0.0270),
    "mxfp4": (0.105, 0.1156),
    "nvfp4": (0.075, 0.0955),
}


@pytest.mark.parametrize("name", RANGES)
def test_error_lies_in_its_range(name: str) -> None:
    w = normal(1, 256, 2048) * 0.02
    q = quantize_matrix(matrix(w, segments=2), scheme_named(name))
    assert q.scheme.name == name
    low, high = RANGES[name]
    assert low < relative_error(q.dequantize(), w) < high


def plain(w: Tensor, scheme: Scheme) -> Tensor:
    """The dequantized values of the simplest choice: largest magnitude of each group of columns as scale."""
    if scheme.cols:
        w = w.unflatten(-1, (-1, scheme.cols))
    scale = (w.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    return (torch.round(w / scale).clamp(-8, 7) * scale).reshape(1, w.shape[1], -1)


@pytest.mark.parametrize("name", ["int4_g32", "int4_g128", "int4_channel"])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_search_is_better_than_the_largest_magnitude(name: str, tails: str) -> None:
    w = normal(1, 64, 1024)
    if tails == "heavy":
        w = w / normal(1, 64, 1024, seed=1).abs().clamp_min(0.2)
    scheme = Scheme.parse(name)
    found = relative_error(quantize_matrix(matrix(w), scheme).dequantize(), w)
    assert found < 0.97 * relative_error(plain(w, scheme), w)


def test_e2m1_ties_go_to_the_even_code() -> None:
    grid = torch.tensor(E2M1_VALUES[:8])
    middle = (grid[1:] + grid[:-1]) / 2
    even = torch.tensor([grid[i] if i % 2 == 0 else grid[i + 1] for i in range(7)])
    assert torch.equal(round_e2m1(middle), even)
    assert torch.equal(round_e2m1(-middle), -even)
    up, down = torch.tensor(float("inf")), torch.tensor(-float("inf"))
    assert torch.equal(round_e2m1(torch.nextafter(middle, up)), grid[1:])
    assert torch.equal(round_e2m1(torch.nextafter(middle, down)), grid[:-1])
    assert torch.equal(round_e2m1(torch.tensor([6.5, 1e30, -7.0, 0.0, 1e-45])), torch.tensor([6.0, 6, -6, 0, 0]))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_e2m1_is_the_nearest_number(values: list[float]) -> None:
    x = torch.tensor(values)
    grid = torch.tensor(E2M1_VALUES)
    nearest = (x.double()[:, None] - grid.double()).abs().amin(1)
    assert torch.equal((round_e2m1(x).double() - x.double()).abs(), nearest)


def test_encoding_a_grid_number_gives_its_code() -> None:
    values = torch.tensor([[v for v in E2M1_VALUES if v != 0 or str(v) == "0.0"]])
    codes = encode(values, Element.E2M1)
    q = QuantTensor(Scheme.parse("mxfp4"), (1, 1, 15), codes[None], torch.full((1, 1, 1), 127, dtype=torch.uint8))
    assert torch.equal(q.dequantize()[0], values)


def test_e8m0_exponents_are_exact_at_powers_of_two() -> None:
    """Around each power of two the exponent comes from the bits, where a logarithm in f32 may be off by one."""
    exponents = torch.arange(-100, 100).float()
    for factor, steps in ((448.0, (0, 1)), (448.0 * (1 - 2**-23), (0, 0)), (448.0 * (1 + 2**-22), (1, 1))):
        w = (torch.exp2(exponents) * factor)[None, :, None].expand(1, 200, 32)
        q = quantize_matrix(matrix(w), Scheme.parse("mxfp8"))
        assert q.scales is not None
        got = q.scales[0, :, 0].float() - 127 - exponents
        assert got.min() >= steps[0]
        assert got.max() <= steps[1]
        for rows in (slice(0, 50), slice(150, 200)):
            assert relative_error(q.dequantize()[:, rows], w[:, rows]) < 0.04


NAMES = tuple(RANGES)


@pytest.mark.parametrize("name", NAMES)
def test_zero_blocks_are_exactly_zero(name: str) -> None:
    w = normal(2, 160, 288)
    w[0, :32, 128:256] = 0
    w[1] = 0
    q = quantize_matrix(matrix(w), Scheme.parse(name))
    assert q.scales is not None
    d = q.dequantize()
    assert torch.isfinite(q.scales_f32()).all()
    assert torch.equal(d[1], torch.zeros(160, 288))
    assert torch.equal(d[0, :32, 128:256], torch.zeros(32, 128))
    assert (q.scales_f32() != 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-30, 1e-5, 1e5, 1e30])
def test_any_magnitude(name: str, size: float) -> None:
    """Weights far from 1 are rounded as well as others, as long as the scale's type reaches there."""
    w = normal(1, 32, 256) * size
    q = quantize_matrix(matrix(w), Scheme.parse(name))
    assert relative_error(q.dequantize(), w) < 0.15


def test_f16_scales_stay_finite() -> None:
    q = quantize_matrix(matrix(normal(1, 4, 64) * 1e9), Scheme.parse("int4_g32", ScaleType.F16))
    assert torch.isfinite(q.dequantize()).all()
    q = quantize_matrix(matrix(normal(1, 4, 64) * 1e-12), Scheme.parse("int4_g32", ScaleType.F16))
    assert torch.equal(q.dequantize(), torch.zeros(1, 4, 64))


@given(
    st.sampled_from([*NAMES, "int4_g64", "int8_g32_zp", "e4m3_block64x32"]),
    st.integers(1, 2),
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from([1, 2]),
)
@settings(max_examples=120, deadline=None)
def test_any_shape(name: str, experts: int, rows: int, cols: int, segments: int) -> None:
    """Ragged groups and blocks, odd columns, one row: each weight is within half a step of its block's scale range."""
    w = normal(experts, rows * segments, cols, seed=rows * 151 + cols)
    scheme = Scheme.parse(name)
    q = quantize_matrix(matrix(w, segments), scheme)  # QuantTensor checks every shape and dtype
    assert relative_error(q.dequantize(), w) < 0.2
    alone = quantize_matrix(matrix(w[:1, :rows]), scheme).dequantize()
    assert torch.equal(alone, q.dequantize()[:1, :rows])  # segments do not touch each other


def test_numbers_on_the_grid_survive() -> None:
    """Weights that came from e2m1 codes with a power-of-two scale come back exactly."""
    table = torch.tensor(E2M1_VALUES)
    w = table[torch.randint(0, 16, (1, 8, 64), generator=torch.Generator().manual_seed(3))]
    w[..., 0::16] = 6.0
    for name in ("mxfp4", "nvfp4"):
        assert torch.equal(quantize_matrix(matrix(w * 0.25), Scheme.parse(name)).dequantize(), w * 0.25)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "e4m3_tensor"])
def test_nan_and_infinity_are_refused_by_place(bad: float, name: str) -> None:
    w = random_weights("f32", 3, 64, 32)
    w.w13.codes[2, 40, 7] = bad
    with pytest.raises(ValueError, match=r"w13 of expert 2 holds (nan|-?inf) at row 40, column 7"):
        quantize(w, name)


def test_refusals() -> None:
    w = random_weights("int8_channel", 1, 32, 32)
    with pytest.raises(ValueError, match="w13 is int8_channel already"):
        quantize(w, "mxfp4")
    with pytest.raises(ValueError, match="quantizes nothing"):
        scheme_named("bf16")
    with pytest.raises(ValueError, match="int5"):
        scheme_named("int5_g128")
    with pytest.raises(ValueError, match="e8m0 scales"):
        quantize_matrix(matrix(normal(1, 4, 32)), Scheme(Element.INT4, 1, 32, ScaleType.E8M0))


def test_names() -> None:
    assert scheme_named("fp8_block128") == Scheme.parse("e4m3_block128")
    assert scheme_named("int8") == Scheme.parse("int8_channel")
    assert scheme_named("nvfp4").global_scale


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4"])
def test_bias_and_activation_are_kept(name: str) -> None:
    w = random_weights("bf16", 2, 256, 128, bias=True)
    q = quantize(w, name)
    assert q.w13.bias is not None
    assert w.w13.bias is not None
    assert torch.equal(q.w13.bias, w.w13.bias)
    assert q.activation == w.activation
    assert q.w13.segments == 2


def test_source_quantizes_each_expert_as_it_is_loaded() -> None:
    model = SyntheticModel.parse("tiny:bf16")
    source = QuantizedSource(model, "fp8_block128")
    info = source.info(1)
    assert info.w13.name == info.w2.name == "e4m3_block128"
    assert any("quantized at load from bf16" in n for n in info.notes)
    whole: Weights = source.load(1)
    want = quantize(model.load(1), "e4m3_block128")
    some = source.load(1, [7, 3])
    for got, one, ref in ((whole.w13, some.w13, want.w13), (whole.w2, some.w2, want.w2)):
        for field, t in ref.tensors():
            assert torch.equal(getattr(got, field).view(torch.uint8), t.view(torch.uint8))
            assert torch.equal(getattr(one, field).view(torch.uint8), t.view(torch.uint8)[[7, 3]])
    assert source.layers == model.layers
    assert source.fingerprint not in (model.fingerprint, QuantizedSource(model, "mxfp4").fingerprint)


def test_source_refuses_what_is_quantized() -> None:
    with pytest.raises(ValueError, match=r"int4_g128 already; --quantize takes bf16, f16 or f32 weights"):
        QuantizedSource(SyntheticModel.parse("tiny:int4_g128"), "mxfp4").info(0)


def test_candidates_keep_the_sign_of_scales() -> None:
    """Symmetric int4 puts the extreme weight at code -8: where it is positive, the scale is negative."""
    w = torch.tensor([[[0.1, 0.2, 4.0, -1.0] * 8, [0.1, 0.2, -4.0, 1.0] * 8]])
    q = quantize_matrix(matrix(w), Scheme.parse("int4_g32"))
    assert q.scales is not None
    assert [float(s) for s in itertools.chain(*q.scales[0].sign().tolist())] == [-1.0, 1.0]


def without_the_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_module, "rounds", lambda columns, block: False)


SERVED = ("int4_g128", "mxfp4", "int8_channel", "e4m3_block128")


def blocks_of(w: Tensor, rows: int, columns: int) -> NDArray[np.float32]:
    E, N, K = w.shape
    split = w.view(E, N // rows, rows, K // columns, columns).transpose(2, 3)
    return split.reshape(-1, rows * columns).numpy()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_bits_are_those_of_the_rules(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is IEEE's: so any device that follows them gives the same bits.  native: by the CPU kernel, where it
    takes the scheme."""
    if not native:
        without_the_cpu_kernel(monkeypatch)
    w = adversarial(2, 256, 512)
    q = quantize_matrix(matrix(w, segments=2), Scheme.parse(name))
    assert q.scales is not None
    if name == "int4_g128":
        codes, scales = int4_bits(blocks_of(w, 1, 128))
        got = unpack_nibbles(q.codes, 512).numpy().reshape(codes.shape)
    elif name == "mxfp4":
        codes, scales = mxfp4_bits(blocks_of(w, 1, 32))
        got = unpack_nibbles(q.codes, 512).numpy().reshape(codes.shape)
    elif name == "int8_channel":
        codes, scales = int8_bits(blocks_of(w, 1, 512))
        got = q.codes.numpy().reshape(codes.shape)
    else:
        codes, scales = e4m3_bits(blocks_of(w, 128, 128))
        got = blocks_of(q.codes.view(torch.uint8), 128, 128)
    assert np.array_equal(got, codes)
    assert np.array_equal(q.scales.float().flatten().numpy(), scales.astype(np.float32).flatten())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 16, 256), (3, 160, 288)])
def test_bits_do_not_depend_on_how_many_weights_are_rounded_at_a_time(
    name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator takes many experts at a time."""
    without_the_cpu_kernel(monkeypatch)
    source = matrix(adversarial(*shape), segments=2 if shape[1] % 32 == 0 else 1)
    found = []
    for elements in (1 << 11, 1 << 14, 1 << 24):
        monkeypatch.setattr(quantize_module, "_at_once", lambda w, elements=elements: elements)
        found.append(quantize_matrix(source, Scheme.parse(name)))
    for other in found[1:]:
        for (field, t), (_, same) in zip(found[0].tensors(), other.tensors(), strict=True):
            assert torch.equal(t.view(torch.uint8), same.view(torch.uint8)), field
