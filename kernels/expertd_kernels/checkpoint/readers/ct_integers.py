"""compressed-tensors' integers: packed or plain, of 2 to 8 bits, with zero points and activation order.

    pack-quantized      `weight_packed` I32 [N, ceil(K * bits / 32)]: fields of `bits` bits along K, low bits first,
                        no gaps; field = value + 2 ** (bits - 1)
    int-quantized, naive-quantized    `weight` I8 [N, K]
    `weight_scale` [N, K/g], [N, 1] or [1]; `weight_zero_point` packed alike along N, or I8; `weight_g_idx` I32 [K] the
    group of each column; `weight_shape` I64 [N, K]

Values of 2 to 4 bits become int4 codes and 5 to 8 bits int8 codes, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.checkpoint.bits import int4_from_narrow, unpack_fields
from expertd_kernels.checkpoint.order import columns_of
from expertd_kernels.checkpoint.readers.ct_config import (
    Group,
    activation_of,
    group_for,
    refuse_zero_points,
)
from expertd_kernels.checkpoint.readers.floats import SCALE_TYPES
from expertd_kernels.checkpoint.readers.groups import check_extent
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.canonical import pack_nibbles, unpack_nibbles
from expertd_kernels.weights.scheme import Element, Scheme

__all__ = ["layout_integers", "read_integers"]


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
        self.bits = group.bits
        self.k = self._columns(unit, codes.shape[1], group.bits)
        self.activation, self.notes = activation_of(group)
        element = Element.INT4 if self.bits <= 4 else Element.INT8
        if self.bits not in (4, 8):
            self.notes += (f"{self.bits}-bit codes are held as {element.value} (exact)",)
        self.scheme = Scheme(element, *group.extent, SCALE_TYPES[scale.dtype], zeros=not group.symmetric)
        check_extent(unit, "group_size", self.scheme.cols, self.k)
        if unit.has("weight_g_idx") or group.ordered:
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
        want = Scheme(Element.INT8, *g.extent, SCALE_TYPES["BF16"]).scale_shape(self.n, k)
        if scale != want and not (g.strategy == "tensor" and scale in ((), (1,))):
            size = f" {g.group_size}" if g.group_size else ""
            return f"{g.strategy}{size} scales would be {list(want)}, the tensors have {list(scale)}"
        return None


def layout_integers(unit: Unit) -> Layout:
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


def read_integers(unit: Unit) -> Part:
    """The projection's integer codes, whatever their storage.  Raises CheckpointError."""
    s = _Integers(unit)
    if unit.has("weight_shape") and (shape := unit.read("weight_shape").tolist()[-2:]) != [s.n, s.k]:
        raise unit.error(f"says {shape}", f"{[s.n, s.k]}, as weight_packed and config.json have it", "weight_shape")
    zeros = _zeros(unit, s) if unit.has("weight_zero_point") else None
    if zeros is not None and not s.scheme.zeros:
        refuse_zero_points(unit, bool((zeros == (8 if s.scheme.element is Element.INT4 else 0)).all()))
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
