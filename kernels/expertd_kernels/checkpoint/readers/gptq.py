"""GPTQ and AutoRound's GPTQ packings: int32 words packed along K, scales [groups, N].

    qweight [K * bits / 32, N] I32   field k % (32 / bits) of word k * bits / 32, low bits first
    qzeros  [groups, N * bits / 32]  packed along N; version 1 stores zero - 1, version 2 the zero point itself
    scales  [groups, N] F16          g_idx [K] I32: group of each input column (may be absent: natural order)
    weight[n, k] = (q - zero) * scale

Transposing the words [K/8, N] -> [N, K/8] makes canonical bytes of them: eight codes along K in a little-endian word
are four bytes with the low nibble first.  No nibble is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from expertd_kernels.checkpoint.bits import (
    add_to_fields,
    every_field,
    int4_from_narrow,
    unpack_fields,
    words_for,
)
from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.order import columns_of, is_natural
from expertd_kernels.checkpoint.readers.groups import GroupInfo, check_extent, integer_scheme, scale_type
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.repack import Repacked, gather_rows, transpose_rows
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.canonical import pack_nibbles
from expertd_kernels.weights.scheme import WHOLE

__all__ = ["FORMATS", "layout", "may_be_ordered", "read"]

_BITS = (2, 3, 4, 8)
_FLIP = -0x7F7F7F80  # 0x80808080 as int32: unsigned bytes minus 128


def _info(unit: Unit) -> GroupInfo:
    """Sizes by the shapes, checked against bits, group size and each other."""
    bits = unit.setting("bits")
    if type(bits) is not int or bits not in _BITS:
        raise unit.error(f"bits {bits!r} in the quantization config", "2, 3, 4 or 8")
    q = unit.expect("qweight", None, "I32")
    if len(q.shape) != 2:
        raise unit.error(f"shape {list(q.shape)}", "[K * bits / 32, N]", "qweight")
    n, k = q.shape[1], q.shape[0] * 32 // bits
    if unit.k and words_for(unit.k, bits) == q.shape[0]:
        k = unit.k  # 3 bits: the last word may have room to spare
    group = unit.setting("group_size", -1)
    if type(group) is not int or group == 0 or group < -1:
        raise unit.error(f"group_size {group!r} in the quantization config", "-1 or a number > 0")
    check_extent(unit, "group_size", group, k)
    groups = 1 if group == -1 else -(-k // group)
    scales = unit.expect("scales", (groups, n), "F16", "BF16", "F32")
    unit.expect("qzeros", (groups, words_for(n, bits)), "I32")
    if unit.has("g_idx") or unit.flag("desc_act"):
        unit.expect("g_idx", (k,), "I32", "I64")
    return GroupInfo(n, k, bits, WHOLE if group == -1 else group, groups, scale_type(scales), _symmetric(unit))


def layout(unit: Unit) -> Layout:
    info = _info(unit)
    scheme, notes = integer_scheme(info)
    columns = None
    if unit.has("g_idx") and may_be_ordered(unit):
        try:
            columns = columns_of(unit.read("g_idx"), info.groups, info.cols or info.k)
        except ValueError as e:
            raise unit.error(str(e), f"groups of {info.cols or info.k} columns, as group_size says", "g_idx") from None
    return Layout(scheme, info.n, info.k, bias=unit.has("bias"), columns=columns, notes=notes)


def read(unit: Unit) -> Part:
    plan, bits = unit.layout or layout(unit), int(unit.setting("bits"))
    scales = unit.read("scales").t()
    zeros = _zeros(unit, bits, plan.n)
    bias = unit.read("bias") if unit.has("bias") else None
    if unit.has("g_idx") and not may_be_ordered(unit):
        _require_natural(unit, plan)
    return Part(
        _codes(unit.stored("qweight"), bits, plan, zeros is None), scales, zeros, columns=plan.columns, bias=bias
    )


def may_be_ordered(unit: Unit) -> bool:
    """Whether columns may be permuted.  AutoRound knows no activation order and has no key for it."""
    default = unit.quant.get("quant_method") != "auto-round"
    return bool(unit.flag("desc_act", default))


def _require_natural(unit: Unit, plan: Layout) -> None:
    if not is_natural(unit.read("g_idx"), plan.scheme.cols or plan.k):
        raise unit.error(
            "columns are not in natural order, and the quantization config does not say desc_act true",
            "0, 0, ..., 1, 1, ..., or desc_act true in config.json",
            "g_idx",
        )


def _zeros(unit: Unit, bits: int, n: int) -> Tensor | None:
    """[N, groups] canonical zero points: u8 0..15 for codes held as int4, int8 for 8 bits; None if symmetric."""
    words, middle, raw_stored, symmetric = unit.read("qzeros"), 1 << (bits - 1), _raw_zeros(unit), _symmetric(unit)
    if symmetric and bits != 3:
        usual = every_field(middle if raw_stored else middle - 1, bits)
        if words.numpy().tobytes() == _repeated(usual, words.numel()):
            return None
    if bits == 3:
        raw = unpack_fields(words, 3, n, dim=1)
        raw = raw if raw_stored else (raw + 1) & 7
    else:
        raw = unpack_fields(words if raw_stored else add_to_fields(words, bits), bits, n, dim=1)
    if not symmetric:
        return (raw ^ 0x80).view(torch.int8).t() if bits == 8 else raw.t()
    if not bool((raw == middle).all()):
        raise unit.error(
            f"zero points other than {middle} though the quantization config says sym true",
            f"{middle} everywhere, or sym false in config.json",
            "qzeros",
        )
    return None


@cache
def _repeated(word: int, count: int) -> bytes:
    return word.to_bytes(4, "little", signed=True) * count


def _symmetric(unit: Unit) -> bool:
    """Where the config does not say, zero points are read as they are."""
    return bool(unit.flag("sym"))


def _raw_zeros(unit: Unit) -> bool:
    """Whether zero points are stored as they are (version 2), and not minus 1."""
    if unit.quant.get("quant_method") == "auto-round":
        return unit.quant.get("packing_format") in _RAW_PACKINGS
    return _version(unit) == "gptq_v2"


def _codes(words: Stored, bits: int, plan: Layout, symmetric: bool) -> Tensor | Repacked:
    """Canonical codes of packed words [K * bits / 32, N], the columns brought into group order."""
    columns = plan.columns
    if bits >= 4:
        flip = _FLIP if bits == 8 else 0
        return transpose_rows(words, flip) if columns is None else gather_rows(words, columns, bits, flip)
    fields = unpack_fields(words.read(), bits, plan.k, dim=0)
    fields = fields if columns is None else fields.index_select(0, columns)
    return pack_nibbles((int4_from_narrow(fields, bits) if symmetric else fields).t())


_RAW_PACKINGS = ("auto_round", "auto_round:gptqmodel")
_V1_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq")


def _version(unit: Unit) -> str:
    """checkpoint_format; tools that leave it out write version 1."""
    return str(unit.quant.get("checkpoint_format") or unit.quant.get("format") or "gptq")


def _is_v1(unit: Unit) -> str | None:
    return None if _version(unit) == "gptq" else f"checkpoint_format is {_version(unit)!r}, want 'gptq' or none"


def _is_v2(unit: Unit) -> str | None:
    return None if _version(unit) == "gptq_v2" else f"checkpoint_format is {_version(unit)!r}, want 'gptq_v2'"


def _is_repacked(unit: Unit) -> str | None:
    marlin = unit.quant.get("is_marlin_format") or _version(unit) in ("marlin", "bitblas", "qqq")
    return None if marlin else "no kernel's own layout"


def _packs(names: tuple[str, ...]) -> Callable[[Unit], str | None]:
    def rule(unit: Unit) -> str | None:
        packing = unit.quant.get("packing_format", "auto_round:auto_gptq")
        return None if packing in names else f"packing_format is {packing!r}, want {' or '.join(names)}"

    return rule


_TENSORS = {"qweight": "I32", "qzeros": "I32", "scales": "F16 BF16 F32"}
_PACKING = "`qweight` I32 [K*b/32, N] along K, low bits first; 2, 3, 4 or 8 bits"
_SCALES = "`scales` F16 [K/g, N]; any g, -1 = whole column; `g_idx`: activation order"


def _row(name: str, method: str, rule: Callable[[Unit], str | None], detected: str, zeros: str, fixture: str) -> Format:
    return Format(
        name,
        "gptq",
        frozenset({method}),
        _TENSORS,
        frozenset({"weight"}),
        frozenset({"g_idx", "bias"}),
        rule,
        detected_by=detected,
        packing=_PACKING,
        scales=_SCALES,
        zero_points=zeros,
        fixture=fixture,
    )


FORMATS = (
    _row(
        "gptq_v1",
        "gptq",
        _is_v1,
        "quant_method gptq, checkpoint_format gptq or none",
        "`qzeros` I32 along N, stored minus 1 with borrow; sym: the middle, checked",
        "gptq-w4-g64-asym-v1-mixtral",
    ),
    _row(
        "gptq_v2",
        "gptq",
        _is_v2,
        "quant_method gptq, checkpoint_format gptq_v2",
        "`qzeros` I32 along N, as they are",
        "gptq-w4-g128-asym-v2-mixtral1l",
    ),
    _row(
        "autoround_gptq",
        "auto-round",
        _packs(_V1_PACKINGS),
        "quant_method auto-round, packing_format auto_round:auto_gptq",
        "`qzeros` I32 along N, stored minus 1",
        "autoround-native-w4-g128-sym-qwen3moe1l",
    ),
    _row(
        "autoround_native",
        "auto-round",
        _packs(_RAW_PACKINGS),
        "quant_method auto-round, packing_format auto_round or auto_round:gptqmodel",
        "`qzeros` I32 along N, as they are",
        "autoround-native-gptqmodelpack-w4-g128-asym-mixtral1l",
    ),
    Format(
        "gptq_repacked",
        "gptq",
        frozenset({"gptq", "marlin"}),
        {},
        frozenset({"weight", ""}),
        rule=_is_repacked,
        refusal="weights in the layout of one kernel (Marlin, BitBLAS, QQQ) are not read; use the checkpoint in GPTQ's"
        " own layout (checkpoint_format gptq or gptq_v2)",
        detected_by="checkpoint_format marlin, bitblas or qqq, or is_marlin_format",
        packing="refused",
    ),
)
