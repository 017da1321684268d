"""The layout of backend gluon_sm90: exact inverses, and the kernels' unpacking emulated bit by bit."""

import numpy as np
import pytest
import torch

from expertd_kernels import Activation, Scheme
from expertd_kernels.backends import gluon_sm90
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.common.problem import NAMED_DEVICES
from expertd_kernels.common.refused import Refused
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import ScaleType

SCHEMES = [
    "int4_g128", "int4_g64", "int4_g32", "int4_channel", "int4_g128_zp", "int4_g32_zp", "int8_channel", "int8_g128",
    "int8_g32_zp", "mxfp4", "mxfp8", "e4m3_block128", "e4m3_channel", "e4m3_tensor", "bf16",
]  # fmt: skip


def packed(weights: Weights):
    return gluon_sm90.pack(weights, problem_of(weights, NAMED_DEVICES["sm90"]))


def assert_same(a: QuantTensor, b: QuantTensor):
    mine, other = dict(a.tensors()), dict(b.tensors())
    assert mine.keys() == other.keys()
    assert (a.scheme, a.shape, a.segments) == (b.scheme, b.shape, b.segments)
    for name, t in mine.items():
        assert t.dtype == other[name].dtype, name
        assert torch.equal(t.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("sizes", [(256, 128), (320, 192), (200, 100)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpack_is_the_exact_inverse_of_pack(scheme, sizes):
    for activation, bias, scale in (("silu_and_mul", False, None), ("relu2", True, ScaleType.F16)):
        s = Scheme.parse(scheme)
        if scale is not None and s.element.integer:
            s = s.with_scale(scale)
        w = random_weights(s, 3, *sizes, activation=Activation.parse(activation), bias=bias, signed_scales=True)
        back = gluon_sm90.unpack(packed(w))
        assert_same(w.w13, back.w13)
        assert_same(w.w2, back.w2)
        assert back.activation == w.activation


def test_zero_scales_survive():
    w = random_weights("int4_g128", 2, 256, 128, signed_scales=True)
    w.w13.scales[:, ::3] = 0.0
    assert_same(w.w13, gluon_sm90.unpack(packed(w)).w13)


# ---------------------------------------------------------------- the kernels' unpacking, emulated
BF16_LEAST = 2.0**-133


def bf16_bits_value(bits: np.ndarray) -> np.ndarray:
    """u16 bits -> f64, subnormals included."""
    bits = bits.astype(np.int64)
    sign, exponent, mantissa = np.where(bits >> 15, -1.0, 1.0), (bits >> 7) & 255, bits & 127
    return sign * np.where(exponent == 0, mantissa * BF16_LEAST, (128 + mantissa) * 2.0 ** (exponent - 134.0))


def round_bf16(x: np.ndarray) -> np.ndarray:
    """f64 -> the nearest bf16, ties to even, as f64."""
    e = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126)))
    step = 2.0 ** (e - 7)
    return np.rint(x / step) * step


def pairs_of_word(w: np.ndarray, element: str) -> list[np.ndarray]:
    """The pairs of bf16 (u32) that the inline assembly makes of a word, in its order."""
    w = w.astype(np.uint64) & 0xFFFFFFFF

    def rotated(n):
        return ((w >> n) | (w << (32 - n))) & 0xFFFFFFFF

    match element:
        case "int4":
            return [w & 0x000F000F, w & 0x00F000F0, (w >> 8) & 0x000F000F, (w >> 8) & 0x00F000F0]
        case "e2m1":
            m = 0x81C081C0
            return [w & m, rotated(6) & m, rotated(3) & m, (((w & 0x001B001B) * 4228) & 0xFFFFFFFF) & m]
        case "int8":
            return [w & 0x00FF00FF, (w >> 8) & 0x00FF00FF]
        case "e4m3":
            return [w & 0x87F087F0, ((w << 4) & 0x80F080F0) | ((w >> 4) & 0x07000700)]
    raise AssertionError(element)


def emulate(parts, facts, element: str) -> np.ndarray:
    """[E, N, K] f64: what the tensor core is fed, times 2 ** shift, in the order of the packed rows."""
    scheme = Scheme.parse(facts["name"])
    codec = codec_of(scheme)
    if codec.bits == 16:  # blocks of 64 rows of 128 bytes, as shared memory holds them for the tensor core
        blocks = parts["codes"].numpy().view(np.uint16).reshape(*parts["codes"].shape[:2], -1, 64, 64)
        E, T, across = blocks.shape[:3]
        return bf16_bits_value(blocks).transpose(0, 1, 3, 2, 4).reshape(E, T * 64, across * 64)
    codes = parts["codes"].numpy().view(np.uint32)
    E, T, units = codes.shape[:3]
    width = 256 // codec.bits
    out = np.zeros((E, T, 64, units * width))
    warp, lane, word = np.meshgrid(np.arange(4), np.arange(32), np.arange(4), indexing="ij")
    for i, pair in enumerate(pairs_of_word(codes, element)):
        if codec.bits == 4:
            i0, i1, fragment = i % 2, i // 2, word
        else:
            i0, i1, fragment = i, word % 2, word // 2
        for h in range(2):
            value = bf16_bits_value((pair >> (16 * h)) & 0xFFFF)  # [E, T, units, warp, lane, word]
            row = 16 * warp + 8 * i0 + lane // 4
            k = 16 * fragment + 8 * i1 + 2 * (lane % 4) + h
            for u in range(units):
                out[:, :, row, u * width + k] = value[:, :, u]
    if codec.planes:
        s = parts["scales"]
        stored = bf16_bits_value((s.numpy().astype(np.uint16) << 7) if codec.e8m0 else s.view(torch.int16).numpy())
        stored = stored.transpose(0, 1, 4, 7, 5, 2, 6, 3).reshape(E, T, 64, -1, codec.planes)  # row = 16 w + 8 i0 + l8
        stored = stored.repeat(codec.group, axis=3)[:, :, :, : out.shape[3]]
        first = stored[..., 0]
        if codec.kind == "int":
            i0 = (np.arange(64) // 8 % 2)[None, None, :, None]
            offset = {4: np.where(i0, -(2.0**-126), -(2.0**-130)), 8: -(2.0**-126)}[codec.bits]
            out = round_bf16(out * first + round_bf16(first * offset))
        elif codec.kind == "zero":
            out = round_bf16(round_bf16(out * 2.0**127 + stored[..., 1]) * first)
        elif codec.kind == "float":
            out = round_bf16(out * first)
        else:
            out = round_bf16(out * first + round_bf16(out * stored[..., 1]))
    return (out * 2.0 ** facts["shift"]).reshape(E, T * 64, -1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_unpacking_gives_the_weights_rounded_once(scheme):
    H, I = 256, 128
    w = random_weights(scheme, 2, H, I, signed_scales=True)
    p = packed(w)
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        parts = {k.removeprefix(f"{name}."): t for k, t in p.tensors.items() if k.startswith(f"{name}.")}
        got = emulate(parts, {**p.meta[name], "name": scheme}, q.scheme.element.value)
        if name == "w13":  # packed rows: 8 gate, 8 up in turns
            got = got.reshape(2, -1, 2, 8, got.shape[2]).transpose(0, 2, 1, 3, 4).reshape(2, 2 * I, H)
        want = q.dequantize().double().numpy()
        if codec_of(q.scheme).kind == "float2":  # the scale's second bf16 and its product are rounded, too
            assert np.max(np.abs(got - want) / np.abs(want).clip(1e-30)) < 2.0**-8 * 1.01
        else:
            assert np.array_equal(got, round_bf16(want)), name


def test_padding_is_zero_where_it_must_be():
    w = random_weights("int4_g128", 1, 200, 100)
    p = packed(w)
    got = emulate(
        {"codes": p.tensors["w2.codes"], "scales": p.tensors["w2.scales"]},
        {**p.meta["w2"], "name": "int4_g128"},
        "int4",
    )
    assert got.shape == (1, 256, 128)
    assert not got[:, 200:].any(), "rows beyond H must give zeros"


# ---------------------------------------------------------------- refusals
def test_values_that_the_kernels_would_read_as_others_are_refused():
    w = random_weights("e4m3_block128", 1, 256, 128)
    w.w2.codes.view(torch.uint8)[0, 3, 5] = 0x7F
    with pytest.raises(Refused, match="w2: e4m3 codes hold NaN"):
        packed(w)
    w = random_weights("mxfp4", 1, 256, 128)
    w.w13.scales[0, 0, 0] = 255
    with pytest.raises(Refused, match="e8m0 scales"):
        packed(w)


def test_scales_of_any_size_find_a_shift():
    for factor in (1e-30, 1.0, 1e20, 1e37):
        w = random_weights("int4_g128", 1, 256, 128)
        w.w2.scales.mul_(factor)
        p = packed(w)
        assert_same(w.w2, gluon_sm90.unpack(p).w2)
        assert torch.isfinite(p.tensors["w2.scales"].float()).all()
