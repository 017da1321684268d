"""compressed-tensors (llm-compressor): integers packed or plain, e4m3, and the mx and nv formats.

    pack-quantized          `weight_packed` I32 [N, ceil(K * bits / 32)]: fields of `bits` bits along K, low bits first,
                            no gaps; field = value + 2 ** (bits - 1).  `weight_zero_point`: the same along N, or I8
    int-, naive-quantized   `weight` I8 [N, K]
    float-quantized         `weight` F8_E4M3 [N, K]
    nvfp4, mxfp4, mxfp8     see floats.py; nvfp4's `weight_global_scale` and `input_global_scale` divide

Values of 2 to 4 bits become int4 codes and 5 to 8 bits int8 codes, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.canonical import pack_nibbles, unpack_nibbles
from expertd_kernels.checkpoint.bits import int4_from_narrow, unpack_fields
from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.order import columns_of
from expertd_kernels.checkpoint.readers.ct_config import Group, activation_of, group_for, refuse_transforms
from expertd_kernels.checkpoint.readers.floats import SCALE_TYPES, Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.scheme import WHOLE, ActivationQuant, Element, Scheme

__all__ = ["FORMATS", "layout", "read"]


def layout(unit: Unit) -> Layout:
    refuse_transforms(unit)
    floats = _floats(unit)
    return _layout_integers(unit) if floats is None else layout_floats(unit, floats)


def read(unit: Unit) -> Part:
    floats = _floats(unit)
    if floats is None:
        return _read_integers(unit)
    if unit.has("weight_zero_point"):
        _refuse_zero_points(unit, not bool(unit.read("weight_zero_point").float().any()))
    return read_floats(unit, floats)


def _refuse_zero_points(unit: Unit, idle: bool) -> None:
    """Older versions wrote zero points for symmetric schemes, too: they must do nothing."""
    if not idle:
        raise unit.error("zero points, but the config group is symmetric", "none, or zeros", "weight_zero_point")


def _floats(unit: Unit) -> Floats | None:
    """Where a float unit's tensors are; None for an integer one."""
    packed = unit.has("weight_packed")
    codes = unit.stored("weight_packed" if packed else "weight")
    if codes.dtype not in ("U8", "F8_E4M3"):
        return None
    element = Element.E2M1 if packed else Element.E4M3

    def fits(g: Group) -> str | None:
        if (g.bits, g.kind) != (element.bits, "float"):
            return f"{g.kind}{g.bits}, the tensors hold {element.value}"
        return _blocks_fit(unit, g)

    group = group_for(unit, fits)
    activation, notes = activation_of(group)
    static = activation in (ActivationQuant.E4M3_TENSOR, ActivationQuant.NVFP4)
    return Floats(
        element,
        "weight_packed" if packed else "weight",
        "weight_scale",
        group.block if group is not None else None,
        second="weight_global_scale" if unit.has("weight_global_scale") else "",
        divides=True,
        input_scale="" if not static else "input_global_scale" if packed else "input_scale",
        input_divides=packed,
        activation=activation,
        notes=notes,
    )


def _blocks_fit(unit: Unit, g: Group) -> str | None:
    """Why the group's strategy contradicts the scale's shape of a float unit."""
    scale = unit.stored("weight_scale")
    if SCALE_TYPES.get(scale.dtype) not in (SCALE_TYPES["U8"], SCALE_TYPES["F8_E4M3"]):
        n, k = unit.stored("weight").shape if len(unit.stored("weight").shape) == 2 else (0, 0)
        want = Scheme(Element.E4M3, *_extent(g), SCALE_TYPES["BF16"]).scale_shape(n, k)
        if scale.shape != want and not (g.strategy == "tensor" and scale.shape in ((), (1,))):
            return f"{g.strategy} scales would be {list(want)}, the tensors have {list(scale.shape)}"
    return None


def _extent(g: Group) -> tuple[int, int]:
    """(rows, cols) of weights that share a scale."""
    if g.strategy == "tensor":
        return WHOLE, WHOLE
    if g.strategy == "block" and g.block is not None:
        return g.block
    return 1, g.group_size or WHOLE


class _Integers:
    """What the tensors and the configuration say of an integer unit together; all checks of shapes are here."""

    def __init__(self, unit: Unit) -> None:
        self.packed = unit.has("weight_packed")
        self.name = "weight_packed" if self.packed else "weight"
        codes = unit.expect(self.name, None, "I32" if self.packed else "I8")
        scale = unit.expect("weight_scale", None, "BF16", "F16", "F32")
        if len(codes.shape) != 2:
            raise unit.error(f"shape {list(codes.shape)}", "a matrix", self.name)
        self.n = codes.shape[0]
        group = group_for(unit, lambda g: self._contradiction(unit, g, codes.shape[1], scale.shape))
        if group is None:
            size = unit.setting("group_size", -1)
            strategy = "group" if size > 0 else "channel"
            symmetric = not unit.has("weight_zero_point")
            bits = unit.setting("bits", 4)
            group = Group("", bits, "int", strategy, max(size, 0) or None, None, symmetric, None, ())
            if (reason := self._contradiction(unit, group, codes.shape[1], scale.shape)) is not None:
                raise unit.error(reason, "tensors that agree with bits and group_size of the configuration")
        self.bits = group.bits
        self.k = self._columns(unit, codes.shape[1], group.bits)
        self.activation, self.notes = activation_of(group)
        element = Element.INT4 if self.bits <= 4 else Element.INT8
        if self.bits not in (4, 8):
            self.notes += (f"{self.bits}-bit codes are held as {element.value} (exact)",)
        self.scheme = Scheme(element, *_extent(group), SCALE_TYPES[scale.dtype], zeros=not group.symmetric)
        if unit.has("weight_g_idx"):
            unit.expect("weight_g_idx", (self.k,), "I32", "I64")
        if unit.has("weight_shape"):
            unit.expect("weight_shape", (3,) if unit.fused else (2,), "I64", "I32")
        self.columns = _columns_of(unit, self.scheme.scale_shape(self.n, self.k)[1], self.scheme.cols or self.k)

    def _columns(self, unit: Unit, stored: int, bits: int) -> int:
        """K: config.json's where it agrees with the words, else as many as they hold."""
        if not self.packed:
            return stored
        return unit.k if unit.k and -(-unit.k * bits // 32) == stored else stored * 32 // bits

    def _contradiction(self, unit: Unit, g: Group, stored: int, scale: tuple[int, ...]) -> str | None:
        """Why config group `g` cannot be that of tensors with `stored` columns and this scale shape."""
        if g.kind != "int":
            return f"{g.kind}{g.bits}, the tensors hold integers"
        if not 2 <= g.bits <= 8:
            return f"{g.bits} bits, 2 to 8 are read"
        if not g.symmetric and not unit.has("weight_zero_point"):
            return "asymmetric, but weight_zero_point is missing"
        k = self._columns(unit, stored, g.bits)
        if unit.k and k != unit.k:
            return f"{g.bits} bits make {k} columns of {stored} stored ones, config.json says {unit.k}"
        want = Scheme(Element.INT8, *_extent(g), SCALE_TYPES["BF16"]).scale_shape(self.n, k)
        if scale != want and not (g.strategy == "tensor" and scale in ((), (1,))):
            size = f" {g.group_size}" if g.group_size else ""
            return f"{g.strategy}{size} scales would be {list(want)}, the tensors have {list(scale)}"
        return None


def _layout_integers(unit: Unit) -> Layout:
    s = _Integers(unit)
    return Layout(
        s.scheme,
        s.n,
        s.k,
        bias=unit.has("bias"),
        columns=s.columns,
        activation=s.activation,
        notes=s.notes,
    )


def _read_integers(unit: Unit) -> Part:
    s = _Integers(unit)
    if unit.has("weight_shape") and (shape := unit.read("weight_shape").tolist()[-2:]) != [s.n, s.k]:
        raise unit.error(f"says {shape}", f"{[s.n, s.k]}, as weight_packed and config.json have it", "weight_shape")
    zeros = _zeros(unit, s) if unit.has("weight_zero_point") else None
    if zeros is not None and not s.scheme.zeros:
        _refuse_zero_points(unit, bool((zeros == (8 if s.scheme.element is Element.INT4 else 0)).all()))
        zeros = None
    codes = _packed_codes(unit, s) if s.packed else _plain_codes(unit, s)
    if s.columns is not None:
        codes = _permuted(codes.read() if isinstance(codes, Stored) else codes, s)
    return Part(
        codes,
        unit.read("weight_scale").reshape(s.scheme.scale_shape(s.n, s.k)),
        zeros,
        columns=s.columns,
        bias=unit.read("bias") if unit.has("bias") else None,
    )


def _bytes(t: Tensor) -> Tensor:
    """[..., c] integers of any width -> their bytes [..., c * width] u8, little-endian."""
    return t.contiguous().view(torch.uint8)


def _packed_codes(unit: Unit, s: _Integers) -> Tensor | Stored:
    """Canonical codes of `weight_packed`: int4 [n, ceil(k/2)] bytes or [n, k/8] words, or int8 [n, k]."""
    if s.bits == 4 and s.k % 8 == 0:
        return unit.stored("weight_packed")
    words = unit.read("weight_packed")
    if s.bits == 8:
        return (_bytes(words)[:, : s.k] ^ 0x80).view(torch.int8)
    stored = unpack_fields(words, s.bits, s.k, dim=1)
    if s.scheme.element is Element.INT4:
        return pack_nibbles(int4_from_narrow(stored, s.bits))
    return (stored.to(torch.int16) - (1 << (s.bits - 1))).to(torch.int8)


def _plain_codes(unit: Unit, s: _Integers) -> Tensor | Stored:
    """Canonical codes of an I8 `weight`."""
    if s.scheme.element is Element.INT8:
        return unit.stored("weight")
    codes = unit.read("weight")
    half = 1 << (s.bits - 1)
    if bool(((codes < -half) | (codes >= half)).any()):
        raise unit.error(f"codes from {int(codes.min())} to {int(codes.max())}", f"{s.bits}-bit ones", "weight")
    return pack_nibbles(codes + 8)


def _zeros(unit: Unit, s: _Integers) -> Tensor:
    """Canonical zero points: packed along N, or one I8 each as older versions wrote them."""
    rows, cols = s.scheme.scale_shape(s.n, s.k)
    half = 1 << (s.bits - 1)
    if unit.stored("weight_zero_point").dtype == "I8":
        signed = unit.expect("weight_zero_point", None).read().reshape(-1, cols).to(torch.int16)
        if tuple(signed.shape) != (rows, cols):
            raise unit.error(f"shape {list(signed.shape)}", f"{[rows, cols]}", "weight_zero_point")
    else:
        unit.expect("weight_zero_point", (-(-rows * s.bits // 32), cols), "I32")
        signed = unpack_fields(unit.read("weight_zero_point"), s.bits, rows, dim=0).to(torch.int16) - half
    return (signed + 8).to(torch.uint8) if s.scheme.element is Element.INT4 else signed.to(torch.int8)


def _columns_of(unit: Unit, groups: int, group_size: int) -> Tensor | None:
    """Activation order: the input column of each code column once groups are contiguous; None for the natural order.

    weight_g_idx[k] is the group of column k; -1 everywhere = not used.
    """
    if not unit.has("weight_g_idx"):
        return None
    group = unit.read("weight_g_idx")
    if bool((group == -1).all()):
        return None
    try:
        return columns_of(group, groups, group_size)
    except ValueError as e:
        raise unit.error(str(e), f"{groups} groups of {group_size} columns", "weight_g_idx") from None


def _permuted(codes: Tensor, s: _Integers) -> Tensor:
    """Codes with their columns in group order."""
    assert s.columns is not None, "only called for an activation order"
    if s.scheme.element.packed:
        return pack_nibbles(unpack_nibbles(_bytes(codes), s.k)[:, s.columns.long()])
    return codes[:, s.columns.long()]


_METHODS = frozenset({"compressed-tensors", "auto-round"})


def _row(name: str, codes: tuple[str, str], scale: str, **columns: str) -> Format:
    tensors = {codes[0]: codes[1], "weight_scale": scale}
    second = columns.pop("second", "")
    if second:
        tensors[second] = "F32"
    detected = f"quant_method compressed-tensors, `{codes[0]}` {codes[1]}, `weight_scale` {scale}"
    return Format(name, "compressed_tensors", _METHODS, tensors, detected_by=detected, **columns)  # type: ignore[arg-type]


FORMATS = (
    _row(
        "ct_pack_quantized",
        ("weight_packed", "I32"),
        "BF16 F16 F32",
        packing="I32 [N, K*bits/32], fields along K, value + 2^(bits-1); 2 to 8 bits",
        scales="BF16 [N, K/g] or [N, 1]; `weight_g_idx` for activation order",
        zero_points="`weight_zero_point` I32 packed along N, or I8",
        activation="none, e4m3 or int8 a token",
        fixture="ct-w4a16-g128-sym-qwen3moe1l",
    ),
    _row(
        "ct_int_quantized",
        ("weight", "I8"),
        "BF16 F16 F32",
        packing="I8 [N, K]",
        scales="BF16 [N, 1], [1] or [N, K/g]",
        zero_points="`weight_zero_point` I8",
        activation="int8 a token, or none",
        fixture="ct-w8a8-int8-qwen3moe1l",
    ),
    _row(
        "ct_float_quantized",
        ("weight", "F8_E4M3"),
        "BF16 F16 F32",
        packing="e4m3 [N, K]",
        scales="BF16 [1], [N, 1] or [N/128, K/128]",
        activation="e4m3 a token, a group of 128, or static",
        fixture="ct-fp8-static-tensor-qwen3moe1l",
    ),
    _row(
        "ct_mxfp8",
        ("weight", "F8_E4M3"),
        "U8 F8_E8M0",
        packing="e4m3 [N, K]",
        scales="U8 e8m0 [N, K/32]",
        activation="mxfp8, or none",
        fixture="ct-mxfp8-qwen3moe1l",
    ),
    _row(
        "ct_nvfp4",
        ("weight_packed", "U8"),
        "F8_E4M3",
        second="weight_global_scale",
        packing="U8 [N, K/2], low nibble = even k, e2m1",
        scales="F8_E4M3 [N, K/16] divided by F32 `weight_global_scale`",
        activation="nvfp4 with static `input_global_scale`, or none",
        fixture="ct-nvfp4a16-qwen3moe1l",
    ),
    _row(
        "ct_mxfp4",
        ("weight_packed", "U8"),
        "U8 F8_E8M0",
        packing="U8 [N, K/2], low nibble = even k, e2m1",
        scales="U8 e8m0 [N, K/32]",
        activation="mxfp4, or none",
        fixture="ct-mxfp4a16-gptoss-ns",
    ),
    Format(
        "ct_sparse",
        "compressed_tensors",
        frozenset({"compressed-tensors"}),
        {"compressed": "BF16 F16 F32 F8_E4M3 I8", "bitmask": "U8"},
        refusal="sparse weights (sparse-bitmask, sparse-24-bitmask) are not read; decompress the checkpoint first",
        detected_by="`compressed` and `bitmask`",
    ),
    Format(
        "ct_marlin_24",
        "compressed_tensors",
        frozenset({"compressed-tensors"}),
        {"weight_packed": "I32", "scale_packed": "BF16 F16 F32"},
        refusal="marlin-24 (2:4 sparse, packed for one kernel) is not read; use the pack-quantized checkpoint",
        detected_by="`weight_packed`, `scale_packed` and `meta`",
    ),
)
