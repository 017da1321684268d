"""NVIDIA ModelOpt (quant_method modelopt, quant_algo ...): e4m3 and e2m1 weights; every scale multiplies.

Per expert the tensors are `weight`, `weight_scale`, `weight_scale_2`, `input_scale`; in fused checkpoints (gpt-oss)
`gate_up_proj`, `gate_up_proj_weight_scale`, ..., stored input-first: e2m1 is packed along the inputs, but mxfp8 blocks
run along the last dimension, the outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.floats import Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import ActivationQuant, Element

__all__ = ["FORMATS", "algorithm", "factors_of", "layout", "read"]


def layout(unit: Unit) -> Layout:
    found = layout_floats(unit, _floats(unit))
    return replace(found, factors=factors_of(unit, found.k))


def read(unit: Unit) -> Part:
    part = read_floats(unit, _floats(unit))
    return part if unit.layout is None else replace(part, factors=unit.layout.factors)


def factors_of(unit: Unit, k: int) -> Tensor | None:
    """[k] f32 what the unit's input is multiplied by; None for an algorithm without them."""
    if not unit.has("pre_quant_scale") and not algorithm(unit).endswith("_AWQ") and not unit.flag("pre_quant_scale"):
        return None
    factors = unit.expect("pre_quant_scale", (k,), "BF16", "F16", "F32").read().float()
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise unit.error("a factor is NaN, infinite or not above 0", "finite numbers above 0", "pre_quant_scale")
    return factors


def _floats(unit: Unit) -> Floats:
    codes = "weight" if unit.has("weight") else ""
    element = Element.E4M3 if unit.stored(codes).dtype == "F8_E4M3" else Element.E2M1
    exponents = unit.stored("weight_scale").dtype in ("U8", "F8_E8M0")
    activation = _activation(unit, element, exponents, unit.has("input_scale"))
    return Floats(
        element,
        codes,
        "weight_scale",
        second="weight_scale_2" if unit.has("weight_scale_2") else "",
        input_scale="input_scale" if activation.static else "",
        activation=activation,
    )


def _activation(unit: Unit, element: Element, exponents: bool, has_input: bool) -> ActivationQuant:
    """How activations are to be rounded: by quant_algo, confirmed by the tensors."""
    algo = algorithm(unit)
    if algo in ROUNDING:
        return ROUNDING[algo]
    if not has_input:
        return ActivationQuant.E4M3_TOKEN if algo == "W4A8_MXFP4_FP8" else ActivationQuant.NONE
    return ActivationQuant.NVFP4 if element is Element.E2M1 and not exponents else ActivationQuant.E4M3_TENSOR


ROUNDING = {
    "FP8": ActivationQuant.E4M3_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": ActivationQuant.E4M3_TOKEN,
    "FP8_PB_WO": ActivationQuant.NONE,
    "MXFP8": ActivationQuant.MXFP8,
    "NVFP4": ActivationQuant.NVFP4,
    "W4A16_NVFP4": ActivationQuant.NONE,
    "MXFP4": ActivationQuant.NONE,
    "W4A16_MXFP4": ActivationQuant.NONE,
    "W4A16_AWQ": ActivationQuant.NONE,
    "NVFP4_AWQ": ActivationQuant.NVFP4,
}
"""quant_algo -> how activations are to be rounded."""

_BY_TENSORS = ("W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8", "")
"""The others that are read: rounded as the tensors beside the weights say.  "": a module of MIXED_PRECISION that the
configuration does not name."""


def algorithm(unit: Unit) -> str:
    """quant_algo in capitals; the form in hf_quant_config.json nests it in "quantization".  MIXED_PRECISION names one
    for each module.  CheckpointError for one that nobody here knows: what its scales mean is not known either."""
    algo: Any = unit.setting("quant_algo")
    nested = unit.setting("quantization")
    if algo is None and isinstance(nested, dict):
        algo = nested.get("quant_algo")
    if isinstance(algo, str) and algo.upper() == "MIXED_PRECISION":
        layers = unit.setting("quantized_layers") or (nested or {}).get("quantized_layers")
        entry = layers.get(unit.name) if isinstance(layers, dict) else None
        algo = entry.get("quant_algo") if isinstance(entry, dict) else ""
    found = algo.upper() if isinstance(algo, str) else None
    if found not in (*ROUNDING, *_BY_TENSORS) or (found == "" and algo is unit.setting("quant_algo")):
        known = ", ".join((*ROUNDING, *_BY_TENSORS[:-1], "MIXED_PRECISION"))
        raise unit.error(f"quant_algo is {algo!r:.80} in the quantization config", f"one of {known}")
    return found


_OPTIONAL = frozenset({"bias", "input_scale", "weight_scale_2", "pre_quant_scale"})


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
                optional=_OPTIONAL,
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
                optional=_OPTIONAL,
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
                optional=_OPTIONAL,
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
                optional=_OPTIONAL,
                detected_by=f"{detected} U8 and U8 `weight_scale` (mxfp4, W4A8_MXFP4_FP8)",
                packing="U8 [N, K/2], low nibble = even k, e2m1",
                scales="U8 e8m0 [N, K/32]",
                activation="e4m3 (W4A8_MXFP4_FP8), or none",
            ),
        ]
    return rows


FORMATS = tuple(_rows())
