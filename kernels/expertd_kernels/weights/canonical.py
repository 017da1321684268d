"""Canonical weights: the one form that every reader makes and every backend packs from.

Row-major, N-first.  Matrices of one layer, for the E experts held here:
    w13 [E, 2I, H]  gate rows, then up rows ([E, I, H] for an activation without mul)
    w2  [E, H, I]
and one expert computes  y = w2 @ act(w13 @ x + b13) + b2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

# Why it is so: decisions 2 and 10 in DECISIONS.md.
__all__ = ["QuantTensor", "Weights", "pack_nibbles", "powers_of_two", "unpack_nibbles"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""OCP Microscaling Formats v1.0, table 5: value of each e2m1 code."""

CODE_DTYPE = {
    Element.INT4: torch.uint8,
    Element.E2M1: torch.uint8,
    Element.INT8: torch.int8,
    Element.E4M3: torch.float8_e4m3fn,
    Element.BF16: torch.bfloat16,
    Element.F16: torch.float16,
    Element.F32: torch.float32,
}
SCALE_DTYPE = {
    ScaleType.F32: torch.float32,
    ScaleType.F16: torch.float16,
    ScaleType.BF16: torch.bfloat16,
    ScaleType.E8M0: torch.uint8,
    ScaleType.E4M3: torch.float8_e4m3fn,
}


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponent f32 of integers from -127 to 127, of its bits: the same on every device.  128 gives infinity."""
    wide = exponents.to(torch.int32)
    return torch.where(wide > -127, (wide + 127) << 23, 1 << 22).to(torch.int32).view(torch.float32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., K] codes 0..15 (any integer dtype) -> [..., ceil(K/2)] u8, low nibble = even k; odd K: last nibble 0."""
    codes = codes.to(torch.uint8)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """The inverse: [..., ceil(K/2)] u8 -> [..., k] u8 codes 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :k]


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """One quantized matrix for each of E experts, [E, N, K] logical.

    codes          [E, N, K] int8 | e4m3 | bf16 | f16 | f32, or [E, N, ceil(K/2)] u8 with two 4-bit codes a byte
    scales         [E, *scheme.scale_shape(N, K, segments)] in the scheme's scale type (e8m0: u8); None if unquantized.
                   Rows of scales follow the segments: each segment starts a new block, also where its rows are no
                   multiple of the block's.  May be negative or zero, never NaN or infinite.
    zeros          as scales, u8 for int4 (0..15), int8 for int8; None = symmetric (int4: 8, int8: 0)
    global_scales  [E, segments] f32, multiplies the scales; None if the scheme has none
    columns        [E, K] int32, a permutation: code column j multiplies input column columns[j] (activation order);
                   None = natural order.  Groups of scales run along code columns.
    bias           [E, N] f32 or None
    segments       projections side by side along N, each N / segments rows
    global_exact   [E, segments] f64: the multiplier in f64, where the checkpoint stores its reciprocal and divides;
                   global_scales is it rounded to f32.  With it scales_f32() gives the bits of the division; kernels
                   use global_scales, at most one unit in the last place of f32 away
    factors        [E, K] f32: input column k is multiplied by factors[:, k] before the product, and before activations
                   are rounded (AWQ's pre_quant_scale); None = ones.  Packers never see them: builder.pack folds them
    """

    scheme: Scheme
    shape: tuple[int, int, int]
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    global_scales: Tensor | None = None
    columns: Tensor | None = None
    bias: Tensor | None = None
    segments: int = 1
    global_exact: Tensor | None = None
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        s, (E, N, K) = self.scheme, self.shape
        if N % self.segments:
            raise ValueError(f"weights: {N} rows in {self.segments} segments")
        k_stored = -(-K // 2) if s.element.packed else K
        scale_shape = (E, *s.scale_shape(N, K, self.segments))
        _expect("codes", self.codes, (E, N, k_stored), CODE_DTYPE[s.element])
        _expect("scales", self.scales, scale_shape, SCALE_DTYPE.get(s.scale), s.element.quantized)
        _expect("zeros", self.zeros, scale_shape, CODE_DTYPE[s.element], s.zeros)
        _expect("global_scales", self.global_scales, (E, self.segments), torch.float32, s.global_scale)
        if self.global_exact is not None:
            _expect("global_exact", self.global_exact, (E, self.segments), torch.float64, s.global_scale)
        if self.columns is not None:
            _expect("columns", self.columns, (E, K), torch.int32)
        if self.bias is not None:
            _expect("bias", self.bias, (E, N), torch.float32)
        if self.factors is not None:
            _expect("factors", self.factors, (E, K), torch.float32)

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(field name, tensor) of every tensor that is present."""
        for name in ("codes", "scales", "zeros", "global_scales", "columns", "bias", "global_exact", "factors"):
            t = getattr(self, name)
            if t is not None:
                yield name, t

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    def to(self, device: torch.device | str) -> QuantTensor:
        return replace(self, **{n: t.to(device) for n, t in self.tensors()})  # type: ignore[arg-type]

    def experts(self, select: slice | list[int]) -> QuantTensor:
        """The same matrix for some of the experts (a view for a slice)."""
        parts = {n: _some(t, select) for n, t in self.tensors()}
        return replace(self, shape=(parts["codes"].shape[0], *self.shape[1:]), **parts)  # type: ignore[arg-type]

    def scales_f32(self) -> Tensor:
        """[E, scale rows, scale cols] f32: the stored scale times the second-level scale.  Quantized schemes only."""
        assert self.scales is not None, "unquantized weights have no scales"
        s = self.scales
        out = powers_of_two(s.to(torch.int32) - 127) if self.scheme.scale is ScaleType.E8M0 else s.float()
        second = self.global_scales if self.global_exact is None else self.global_exact
        if second is not None:
            per_row = second.repeat_interleave(out.shape[1] // self.segments, dim=1)
            out = (out * per_row[:, :, None]).float()
        return out

    def codes_f32(self) -> Tensor:
        """[E, N, K] f32: codes as numbers, before zero point and scale, in code column order."""
        K = self.shape[2]
        if self.scheme.element is Element.E2M1:
            table = torch.tensor(E2M1_VALUES, device=self.device)
            return table[unpack_nibbles(self.codes, K).long()]
        if self.scheme.element is Element.INT4:
            return unpack_nibbles(self.codes, K).float()
        return self.codes.float()

    def spread(self, per_block: Tensor) -> Tensor:
        """[E, scale rows, scale cols] -> [E, N, K]: each block's value at each of its weights."""
        _, N, K = self.shape
        seg_rows = N // self.segments
        rows = seg_rows if self.scheme.rows == WHOLE else self.scheme.rows
        cols = K if self.scheme.cols == WHOLE else self.scheme.cols
        E, scale_rows, scale_cols = per_block.shape
        per_seg = per_block.view(E, self.segments, scale_rows // self.segments, scale_cols)
        out = per_seg.repeat_interleave(rows, dim=2)[:, :, :seg_rows].flatten(1, 2)
        return out.repeat_interleave(cols, dim=2)[:, :, :K]

    def dequantize(self) -> Tensor:
        """[E, N, K] f32 in natural input column order: (code - zero) * scale * factor, exact up to one f32 rounding a
        step."""
        w = self.codes_f32()
        if self.scheme.element.quantized:
            if self.zeros is not None:
                w = w - self.spread(self.zeros.float())
            elif self.scheme.element is Element.INT4:
                w = w - 8.0
            w = w * self.spread(self.scales_f32())
        if self.columns is not None:
            natural = torch.empty_like(w)
            index = self.columns.long()[:, None, :].expand_as(w)
            w = natural.scatter_(2, index, w)
        return w if self.factors is None else w * self.factors[:, None, :]

    def widen(self) -> QuantTensor:
        """The same values as unquantized f32, natural column order."""
        return QuantTensor(Scheme(Element.F32), self.shape, self.dequantize(), bias=self.bias, segments=self.segments)


def _some(t: Tensor, select: slice | list[int]) -> Tensor:
    """t[select].  As bytes, where elements are bytes: torch picks rows of e4m3 by number only since 2.7."""
    if isinstance(select, slice) or t.element_size() > 1:
        return t[select]
    return t.view(torch.uint8)[select].view(t.dtype)


def _expect(
    name: str, t: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None, wanted: bool = True
) -> None:
    if not wanted or t is None:
        if (t is not None) != wanted:
            raise ValueError(f"weights: {name} {'missing' if wanted else 'given, but the scheme has none'}")
        return
    if tuple(t.shape) != shape or t.dtype != dtype:
        raise ValueError(f"weights: {name} is {t.dtype} {tuple(t.shape)}, want {dtype} {shape}")


@dataclass(frozen=True, eq=False)
class Weights:
    """The experts of one MoE layer that are held here, in canonical form.

    checkpoint_activation   how the checkpoint wants activations rounded; computing otherwise is a named choice
    input_scales            [E, 2] f32 static activation scales before w13 and before w2 (E4M3_TENSOR, NVFP4), or None
    origin                  [E] int64 on the CPU: digests (weights.digest) of what these were rounded from at loading;
                            None = they are as they were read
    """

    w13: QuantTensor
    w2: QuantTensor
    activation: Activation = field(default_factory=Activation)
    checkpoint_activation: ActivationQuant = ActivationQuant.NONE
    input_scales: Tensor | None = None
    origin: Tensor | None = None

    def __post_init__(self) -> None:
        E, N, H = self.w13.shape
        E2, H2, I = self.w2.shape
        if (E2, H2) != (E, H) or self.activation.segments * I != N or self.w13.segments != self.activation.segments:
            raise ValueError(
                f"weights: w13 {self.w13.shape} in {self.w13.segments} segments and w2 {self.w2.shape} do not make"
                f" a layer with {self.activation.name}: want [E, {self.activation.segments}I, H] and [E, H, I]"
            )

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def to(self, device: torch.device | str) -> Weights:
        scales = None if self.input_scales is None else self.input_scales.to(device)
        return replace(self, w13=self.w13.to(device), w2=self.w2.to(device), input_scales=scales)

    def experts(self, select: slice | list[int]) -> Weights:
        """The layer with only some of its experts."""
        scales = None if self.input_scales is None else self.input_scales[select]
        origin = None if self.origin is None else self.origin[select]
        w13, w2 = self.w13.experts(select), self.w2.experts(select)
        return replace(self, w13=w13, w2=w2, input_scales=scales, origin=origin)
