"""Unquantized weights: bf16, f16 or f32, one expert a tensor or cut out of fused ones, in either orientation."""

from __future__ import annotations

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import Element, Scheme

__all__ = ["FORMATS", "layout", "read", "turned"]

_ELEMENT = {"BF16": Element.BF16, "F16": Element.F16, "F32": Element.F32}
_FLOATS = "BF16 F16 F32"
_SCALED = frozenset(
    {"weight_scale", "weight_scale_inv", "scale", "scale_inv", "scales", "weight_packed", "qweight", "blocks"}
)


def _suffix(unit: Unit) -> str:
    return "weight" if unit.has("weight") else ""


def turned(unit: Unit) -> bool:
    """Whether the tensor lies [k, n].  One expert a tensor never does; fused ones by shape, square ones by family."""
    shape = unit.stored(_suffix(unit)).shape
    if not unit.fused:
        return False
    straight, other = shape == (unit.n, unit.k), shape == (unit.k, unit.n)
    if unit.n and unit.k and not straight and not other:
        raise unit.error(
            f"shape {list(shape)} of one expert", f"{[unit.n, unit.k]} or {[unit.k, unit.n]}", _suffix(unit)
        )
    return unit.transposed if straight == other else other


def layout(unit: Unit) -> Layout:
    t = unit.stored(_suffix(unit))
    if len(t.shape) != 2:
        raise unit.error(f"shape {list(t.shape)} of one expert", "two dimensions", _suffix(unit))
    n, k = reversed(t.shape) if turned(unit) else t.shape
    return Layout(Scheme(_ELEMENT[t.dtype]), n, k, bias=unit.has("bias"))


def read(unit: Unit) -> Part:
    stored = unit.stored(_suffix(unit))
    bias = unit.read("bias") if unit.has("bias") else None
    return Part(stored.read().t() if turned(unit) else stored, bias=bias)


FORMATS = (
    Format(
        "unquantized",
        "plain",
        frozenset({"*"}),
        {"weight": _FLOATS},
        absent=_SCALED,
        optional=frozenset({"bias"}),
        detected_by="`weight` BF16, F16 or F32 and no scales",
        packing="[N, K]",
        scales="none",
        fixture="bf16-sharded-qwen3moe1l",
    ),
    Format(
        "unquantized_fused",
        "plain",
        frozenset({"*"}),
        {"": _FLOATS},
        absent=_SCALED | {"weight"},
        optional=frozenset({"bias"}),
        detected_by="fused `gate_up_proj`, `down_proj` BF16, F16 or F32 and no scales",
        packing="[E, N, K] or [E, K, N], by shape; gpt-oss: gate and up rows alternate",
        scales="none",
        bias="`*_bias`",
        fixture="bf16-fused-gptoss-ns",
    ),
)
