"""NVIDIA ModelOpt (quant_method modelopt, quant_algo ...): e4m3 and e2m1 weights; every scale multiplies.

Per expert the tensors are `weight`, `weight_scale`, `weight_scale_2`, `input_scale`; in fused checkpoints (gpt-oss)
`gate_up_proj`, `gate_up_proj_weight_scale`, ..., stored input-first: e2m1 is packed along the inputs, but mxfp8 blocks
run along the last dimension, the outputs.
"""

from __future__ import annotations

from typing import Any

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.floats import Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import ActivationQuant, Element

__all__ = ["FORMATS", "layout", "read"]


def layout(unit: Unit) -> Layout:
    return layout_floats(unit, _floats(unit))


def read(unit: Unit) -> Part:
    return read_floats(unit, _floats(unit))


def _floats(unit: Unit) -> Floats:
    codes = "weight" if unit.has("weight") else ""
    if unit.has("pre_quant_scale"):
        raise unit.error(
            "has a pre_quant_scale, which multiplies the expert's input", "a checkpoint without it (not an AWQ one)"
        )
    element = Element.E4M3 if unit.stored(codes).dtype == "F8_E4M3" else Element.E2M1
    exponents = unit.stored("weight_scale").dtype in ("U8", "F8_E8M0")
    has_input = unit.has("input_scale")
    return Floats(
        element,
        codes,
        "weight_scale",
        second="weight_scale_2" if unit.has("weight_scale_2") else "",
        input_scale="input_scale" if has_input else "",
        activation=_activation(unit, element, exponents, has_input),
    )


def _activation(unit: Unit, element: Element, exponents: bool, has_input: bool) -> ActivationQuant:
    """How activations are to be rounded: by quant_algo, confirmed by the tensors."""
    algo = _algorithm(unit)
    if algo == "MXFP8":
        return ActivationQuant.MXFP8
    if "PER_TOKEN" in algo:
        return ActivationQuant.E4M3_TOKEN
    if algo.startswith("W4A16") or algo == "FP8_PB_WO" or not (has_input or algo == "W4A8_MXFP4_FP8"):
        return ActivationQuant.NONE
    if element is Element.E2M1 and not exponents:
        return ActivationQuant.NVFP4
    return ActivationQuant.E4M3_TENSOR if has_input else ActivationQuant.E4M3_TOKEN


def _algorithm(unit: Unit) -> str:
    """quant_algo in capitals; the form in hf_quant_config.json nests it in "quantization".  MIXED_PRECISION names one
    for each module."""
    algo: Any = unit.setting("quant_algo")
    nested = unit.setting("quantization")
    if algo is None and isinstance(nested, dict):
        algo = nested.get("quant_algo")
    if isinstance(algo, str) and algo.upper() == "MIXED_PRECISION":
        layers = unit.setting("quantized_layers") or (nested or {}).get("quantized_layers")
        entry = layers.get(unit.name) if isinstance(layers, dict) else None
        algo = entry.get("quant_algo") if isinstance(entry, dict) else None
    return algo.upper() if isinstance(algo, str) else ""


def _rows() -> list[Format]:
    """Each storage per expert (`weight`) and fused (the bare tensor)."""
    rows = []
    for codes, where in (("weight", ""), ("", "_fused")):
        detected = f"quant_method modelopt, `{codes or 'gate_up_proj'}`"
        rows += [
            Format(
                f"modelopt_fp8{where}",
                "modelopt",
                frozenset({"modelopt"}),
                {codes: "F8_E4M3", "weight_scale": "F32 BF16 F16"},
                detected_by=f"{detected} F8_E4M3 and F32 `weight_scale` (FP8, FP8_PER_CHANNEL_PER_TOKEN, fp8_pb_wo)",
                packing="e4m3 [N, K]",
                scales="F32 [], [N] or [N/128, 1, K/128, 1]",
                activation="static `input_scale`, dynamic a token, or none",
                fixture="" if where else "modelopt-fp8-qwen3moe1l",
            ),
            Format(
                f"modelopt_mxfp8{where}",
                "modelopt",
                frozenset({"modelopt"}),
                {codes: "F8_E4M3", "weight_scale": "U8 F8_E8M0"},
                detected_by=f"{detected} F8_E4M3 and U8 `weight_scale` (MXFP8)",
                packing="e4m3 [E, K, N]" if where else "e4m3 [N, K]",
                scales="U8 e8m0 [E, K, N/32]: widened to bf16" if where else "U8 e8m0 [N, K/32]",
                activation="mxfp8",
                fixture="modelopt-mxfp8-gptoss-ns" if where else "modelopt-mxfp8-qwen3moe1l",
            ),
            Format(
                f"modelopt_nvfp4{where}",
                "modelopt",
                frozenset({"modelopt"}),
                {codes: "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
                detected_by=f"{detected} U8, F8_E4M3 `weight_scale` and `weight_scale_2` (NVFP4, W4A16_NVFP4)",
                packing="e2m1 [E, K/2, N]" if where else "U8 [N, K/2], low nibble = even k, e2m1",
                scales="F8_E4M3 [N, K/16] times F32 `weight_scale_2`",
                activation="nvfp4 with static `input_scale`, or none",
                fixture="modelopt-nvfp4-gptoss-ns" if where else "modelopt-nvfp4-qwen3moe1l",
            ),
            Format(
                f"modelopt_mxfp4{where}",
                "modelopt",
                frozenset({"modelopt"}),
                {codes: "U8", "weight_scale": "U8 F8_E8M0"},
                detected_by=f"{detected} U8 and U8 `weight_scale` (mxfp4, W4A8_MXFP4_FP8)",
                packing="U8 [N, K/2], low nibble = even k, e2m1",
                scales="U8 e8m0 [N, K/32]",
                activation="e4m3 (W4A8_MXFP4_FP8), or none",
            ),
        ]
    return rows


FORMATS = (
    *_rows(),
    Format(
        "modelopt_awq",
        "modelopt",
        frozenset({"modelopt"}),
        {"weight": "U8", "weight_scale": "F32 BF16 F16"},
        refusal="ModelOpt's AWQ (W4A16_AWQ, W4A8_AWQ) multiplies each expert's input by pre_quant_scale, which is not"
        " computed here; use an AWQ checkpoint of another tool, or quantize without AWQ",
        detected_by="quant_method modelopt, `weight` U8 and F32 `weight_scale` (W4A16_AWQ)",
        packing="U8 [N/2, K], two outputs a byte",
        scales="F32 [N, K/128], `pre_quant_scale` BF16 [K]",
    ),
)
