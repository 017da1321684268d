"""AWQ: int32 words packed along N (GEMM) or along K (GEMV), zero points as they are.

gemm  qweight [K, N/8] I32, nibble i of word c holds column 8c + ORDER[i]; qzeros [groups, N/8] likewise
      scales  [groups, N]
      8 bits: qweight [K, N/4], byte i of word c holds column 4c + BYTE_ORDER[i]; qzeros [groups, N/4] likewise.
      (That is the order in which vLLM and SGLang read them for Marlin; AutoAWQ itself writes 4 bits alone.)
gemv  qweight [N, K/8] I32 in natural order: canonical bytes; scales [N, >= groups], qzeros [N, >= groups / 8]
      padded to a multiple that depends on the group size
weight[n, k] = (q - zero) * scale
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertd_kernels.checkpoint.bits import unpack_fields, words_for
from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.groups import GroupInfo, check_extent, integer_scheme, scale_type
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.repack import Repacked, transpose_columns
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.canonical import pack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element

__all__ = ["FORMATS", "layout", "read"]

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within its eight, that nibble i of a word holds: nibble 4 h + m holds column 2 m + h."""

BYTE_ORDER = (0, 2, 1, 3)
"""Column, within its four, that byte i of a word holds; its own inverse."""

_PLACE = tuple(ORDER.index(i) for i in range(8))
"""Nibble of a word that holds column i of its eight."""

_FLOATS = ("F16", "BF16", "F32")


def _info(unit: Unit) -> GroupInfo:
    """Sizes by the shapes, checked against the group size and each other."""
    bits = unit.setting("bits")
    if type(bits) is not int or (bits != 4 and (bits != 8 or _is_gemv(unit))):
        want = "4: GEMV has no other" if _is_gemv(unit) else "4 or 8"
        raise unit.error(f"bits {bits!r} in the quantization config", want)
    fields = 32 // bits
    q = unit.expect("qweight", None, "I32")
    if len(q.shape) != 2:
        raise unit.error(f"shape {list(q.shape)}", "two dimensions", "qweight")
    n, k = (q.shape[0], q.shape[1] * 8) if _is_gemv(unit) else (q.shape[1] * fields, q.shape[0])
    group = unit.setting("group_size", -1)
    if type(group) is not int or group == 0 or group < -1:
        raise unit.error(f"group_size {group!r} in the quantization config", "-1 or a number > 0")
    check_extent(unit, "group_size", group, k)
    groups = 1 if group == -1 else -(-k // group)
    scales = unit.expect("scales", None, *_FLOATS)
    zeros = unit.expect("qzeros", None, "I32")
    if _is_gemv(unit):
        fits = [s.shape[0] == n and s.shape[1] * f >= groups for s, f in ((scales, 1), (zeros, 8)) if len(s.shape) == 2]
        if fits != [True, True]:
            raise unit.error(f"scales {list(scales.shape)}, qzeros {list(zeros.shape)}", f"[{n}, >= {groups}] of both")
    else:
        unit.expect("scales", (groups, n), *_FLOATS)
        unit.expect("qzeros", (groups, words_for(n, bits)), "I32")
    return GroupInfo(n, k, bits, WHOLE if group == -1 else group, groups, scale_type(scales), _symmetric(unit))


def _symmetric(unit: Unit) -> bool:
    """AutoAWQ says zero_point false, AutoRound sym true."""
    return unit.flag("zero_point") is False or unit.flag("sym") is True


def _is_gemv(unit: Unit) -> bool:
    return _version(unit) == "gemv"


def layout(unit: Unit) -> Layout:
    info = _info(unit)
    scheme, notes = integer_scheme(info)
    return Layout(scheme, info.n, info.k, bias=unit.has("bias"), notes=notes)


def read(unit: Unit) -> Part:
    plan = unit.layout or layout(unit)
    symmetric, words, packed_zeros = not plan.scheme.zeros, unit.stored("qweight"), unit.read("qzeros")
    eight = plan.scheme.element is Element.INT8
    codes: Tensor | Stored | Repacked
    if _is_gemv(unit):
        groups = plan.scheme.scale_shape(plan.n, plan.k)[1]
        codes, scales = words, unit.read("scales")[:, :groups]
        zeros = unpack_fields(packed_zeros, 4, groups, dim=1)
    elif eight:
        codes, scales = _gemm_bytes(words.read()).t(), unit.read("scales").t()
        zeros = _gemm_bytes(packed_zeros).t()
    else:
        codes, scales = _gemm_codes(words), unit.read("scales").t()
        zeros = _gemm_zeros(packed_zeros)
    if symmetric and not bool((zeros == (0 if eight else 8)).all()):
        middle = 128 if eight else 8
        raise unit.error(
            f"zero points other than {middle} though the quantization config says that there are none",
            f"{middle} everywhere, or zero_point true (sym false) in config.json",
            "qzeros",
        )
    bias = unit.read("bias") if unit.has("bias") else None
    return Part(codes, scales, None if symmetric else zeros, bias=bias)


def _gemm_bytes(words: Tensor) -> Tensor:
    """[rows, N/4] words in BYTE_ORDER -> [rows, N] int8: unsigned bytes minus 128."""
    fields = words.contiguous().view(torch.uint8).view(*words.shape, 4)[..., list(BYTE_ORDER)]
    return (fields ^ 0x80).view(torch.int8).flatten(1)


def _gemm_zeros(words: Tensor) -> Tensor:
    """[groups, N/8] words in ORDER -> [N, groups] u8.

    Turned first, as words.  Byte 2 h + a of a word then holds the nibbles of columns 4 a + h (low) and 4 a + 2 + h.
    """
    turned = np.ascontiguousarray(words.numpy().T)
    blocks, groups = turned.shape
    out = np.empty((blocks, 2, 2, 2, groups), np.uint8)  # column 4 a + 2 b + h, b: low or high nibble
    for b in range(2):
        fields = ((turned >> (4 * b)) & 0x0F0F0F0F).view(np.uint8).reshape(blocks, groups, 2, 2)
        out[:, :, b] = fields.transpose(0, 3, 2, 1)
    return torch.from_numpy(out.reshape(8 * blocks, groups))


def _gemm_codes(words: Stored) -> Tensor | Repacked:
    """[K, N/8] words along N -> [N, K/8] words along K, or [N, ceil(K/2)] bytes where K is no multiple of 8."""
    K, C = words.shape
    if K % 8 == 0:
        return transpose_columns(words, ORDER)
    fields = unpack_fields(words.read(), 4, 8 * C, dim=1).view(K, C, 8)[:, :, list(_PLACE)].flatten(1)
    return pack_nibbles(fields.t())


def _version(unit: Unit) -> str:
    if unit.quant.get("quant_method") == "auto-round":
        return "gemm"
    return str(unit.quant.get("version") or unit.quant.get("format") or "gemm").lower()


def _gemm_rule(unit: Unit) -> str | None:
    return None if _version(unit) == "gemm" else f"version is {_version(unit)!r}, want 'gemm'"


def _gemv_rule(unit: Unit) -> str | None:
    return None if _is_gemv(unit) else f"version is {_version(unit)!r}, want 'gemv'"


def _other_rule(unit: Unit) -> str | None:
    return None if _version(unit) in ("gemv_fast", "llm-awq", "marlin") else f"version is {_version(unit)!r}"


def _autoround_rule(unit: Unit) -> str | None:
    packing = unit.quant.get("packing_format")
    return None if packing in _PACKINGS else f"packing_format is {packing!r}, want {' or '.join(_PACKINGS)}"


_PACKINGS = ("auto_round:auto_awq", "auto_round:awq")
_TENSORS = {"qweight": "I32", "qzeros": "I32", "scales": " ".join(_FLOATS)}
_GEMM_PACKING = (
    "`qweight` I32 [K, N/8] along N, columns 0 2 4 6 1 3 5 7 of each eight; 8 bits: [K, N/4], columns 0 2 1 3 of each"
    " four"
)
_ZEROS = "`qzeros` I32 in the same order, as they are"

FORMATS = (
    Format(
        "awq_gemm",
        "awq",
        frozenset({"awq"}),
        _TENSORS,
        frozenset({"weight"}),
        frozenset({"bias"}),
        _gemm_rule,
        detected_by="quant_method awq, version gemm or none",
        packing=_GEMM_PACKING,
        scales="`scales` F16 or BF16 [K/g, N]",
        zero_points=_ZEROS,
        fixture="awq-gemm-w4-g128-autoawq-mixtral",
    ),
    Format(
        "awq_gemv",
        "awq",
        frozenset({"awq"}),
        _TENSORS,
        frozenset({"weight"}),
        frozenset({"bias"}),
        _gemv_rule,
        detected_by="quant_method awq, version gemv",
        packing="`qweight` I32 [N, K/8] along K",
        scales="`scales` F16 [N, padded K/g]",
        zero_points="`qzeros` I32 [N, padded K/g/8] along groups",
    ),
    Format(
        "awq_other",
        "awq",
        frozenset({"awq"}),
        {},
        frozenset({"weight", ""}),
        rule=_other_rule,
        refusal="this version of AWQ's packing is not read; want version gemm (or gemv)",
        detected_by="quant_method awq, version gemv_fast, llm-awq or marlin",
        packing="refused",
    ),
    Format(
        "autoround_awq",
        "awq",
        frozenset({"auto-round"}),
        _TENSORS,
        frozenset({"weight"}),
        frozenset({"bias"}),
        _autoround_rule,
        detected_by="quant_method auto-round, packing_format auto_round:auto_awq",
        packing=_GEMM_PACKING,
        scales="`scales` F16 [K/g, N]",
        zero_points=_ZEROS,
        fixture="autoround-native-awqpack-w4-g64-asym-deepseekv3",
    ),
)
