"""ModelOpt's INT4 AWQ (quant_algo W4A16_AWQ): signed nibbles, two outputs a byte, and a factor for each input column.

weight           [N/2, K] U8      low nibble: row 2 i, high nibble: row 2 i + 1, two's complement
weight_scale     [N, K/g] F32
pre_quant_scale  [K] BF16         multiplies the input: y = W @ (x * pre_quant_scale)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.groups import check_extent, scale_type
from expertd_kernels.checkpoint.readers.modelopt import algorithm, factors_of
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.canonical import pack_nibbles
from expertd_kernels.weights.scheme import Element, Scheme

__all__ = ["FORMATS", "layout", "read"]


def layout(unit: Unit) -> Layout:
    codes, scale = unit.expect("weight", None, "U8"), unit.expect("weight_scale", None, "F32", "BF16", "F16")
    if len(codes.shape) != 2:
        raise unit.error(f"shape {list(codes.shape)}", "[N / 2, K]", "weight")
    if algorithm(unit) not in ("W4A16_AWQ", ""):
        raise unit.error(f"quant_algo is {algorithm(unit)}, but the tensors are int4 codes", "W4A16_AWQ")
    if unit.flag("has_zero_point"):
        raise unit.error("has_zero_point is true in the quantization config", "false: the tensors have none")
    n, k = 2 * codes.shape[0], codes.shape[1]
    group = unit.setting("group_size", 128)
    if type(group) is not int or group < 1:
        raise unit.error(f"group_size {group!r:.80} in the quantization config", "a number > 0")
    check_extent(unit, "group_size", group, k)
    unit.expect("weight_scale", (n, -(-k // group)))
    return Layout(
        Scheme(Element.INT4, 1, group, scale_type(scale)), n, k, unit.has("bias"), factors=factors_of(unit, k)
    )


def read(unit: Unit) -> Part:
    plan = unit.layout or layout(unit)
    bias = unit.read("bias") if unit.has("bias") else None
    return Part(_codes(unit.read("weight")), unit.read("weight_scale"), factors=plan.factors, bias=bias)


def _codes(rows: Tensor) -> Tensor:
    """[N/2, K] bytes of two rows -> [N, ceil(K/2)] bytes of two columns, codes 0..15 around 8."""
    source = rows.numpy()
    if source.shape[1] % 2:
        return pack_nibbles(
            torch.from_numpy(np.stack((source & 15, source >> 4), axis=1).reshape(-1, source.shape[1])) ^ 8
        )
    pairs = source.view("<u2")  # columns 2 j (low byte) and 2 j + 1
    out = np.empty((len(pairs), 2, pairs.shape[1]), np.uint8)
    out[:, 0] = (pairs & 0x000F) | ((pairs >> 4) & 0x00F0)
    out[:, 1] = ((pairs >> 4) & 0x000F) | ((pairs >> 8) & 0x00F0)
    out ^= 0x88
    return torch.from_numpy(out.reshape(-1, pairs.shape[1]))


FORMATS = (
    Format(
        "modelopt_awq",
        "modelopt_awq",
        frozenset({"modelopt"}),
        {"weight": "U8", "weight_scale": "F32 BF16 F16"},
        optional=frozenset({"pre_quant_scale", "bias"}),
        detected_by="quant_method modelopt, `weight` U8 and F32 `weight_scale` (W4A16_AWQ)",
        packing="U8 [N/2, K], two outputs a byte, signed nibbles",
        scales="F32 [N, K/128]; `pre_quant_scale` BF16 [K] multiplies the input",
        fixture="modelopt-int4-awq-qwen3moe1l",
    ),
)
