"""compressed-tensors (llm-compressor): integers packed or plain, e4m3, and the mx and nv formats.

pack-quantized, int-quantized, naive-quantized    integers: ct_integers.py
float-quantized                                   `weight` F8_E4M3 [N, K]: floats.py
nvfp4, mxfp4, mxfp8                               floats.py; nvfp4's `weight_global_scale` and `input_global_scale`
                                                  divide
"""

from __future__ import annotations

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.ct_config import (
    Group,
    activation_of,
    group_for,
    refuse_transforms,
    refuse_zero_points,
)
from expertd_kernels.checkpoint.readers.ct_integers import layout_integers, read_integers
from expertd_kernels.checkpoint.readers.floats import SCALE_TYPES, Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.fp8 import is_autoround_fp8
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import ActivationQuant, Element, Scheme

__all__ = ["FORMATS", "layout", "read"]


def layout(unit: Unit) -> Layout:
    refuse_transforms(unit)
    floats = _floats(unit)
    return layout_integers(unit) if floats is None else layout_floats(unit, floats)


def read(unit: Unit) -> Part:
    floats = _floats(unit)
    if floats is None:
        return read_integers(unit)
    if unit.has("weight_zero_point"):
        refuse_zero_points(unit, not bool(unit.read("weight_zero_point").float().any()))
    return read_floats(unit, floats)


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
        group.block,
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
        want = Scheme(Element.E4M3, *g.extent, SCALE_TYPES["BF16"]).scale_shape(n, k)
        if scale.shape != want and not (g.strategy == "tensor" and scale.shape in ((), (1,))):
            return f"{g.strategy} scales would be {list(want)}, the tensors have {list(scale.shape)}"
    return None


_METHODS = frozenset({"compressed-tensors", "auto-round"})
_OPTIONAL = frozenset(
    {"bias", "weight_shape", "weight_zero_point", "input_scale", "input_zero_point", "input_global_scale"}
)


def _not_fp8(unit: Unit) -> str | None:
    """AutoRound stores its block formats (mx_fp, nv_fp) as compressed-tensors does, plain fp8 as DeepSeek does."""
    return "data_type is fp8" if is_autoround_fp8(unit) else None


def _row(name: str, codes: tuple[str, str], scale: str, **columns: str) -> Format:
    tensors = {codes[0]: codes[1], "weight_scale": scale}
    second = columns.pop("second", "")
    if second:
        tensors[second] = "F32"
    detected = f"quant_method compressed-tensors (or auto-round), `{codes[0]}` {codes[1]}, `weight_scale` {scale}"
    return Format(
        name,
        "compressed_tensors",
        _METHODS,
        tensors,
        optional=_OPTIONAL | ({"weight_g_idx"} if codes[1] in ("I32", "I8") else set()),
        rule=_not_fp8,
        detected_by=detected,
        **columns,  # type: ignore[arg-type]
    )


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
