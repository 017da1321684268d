"""The quantization config: where tools write it, brought to one form, and what it says of one projection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.files import read_json
from expertd_kernels.checkpoint.patterns import matches

__all__ = ["overrides_for", "read_quant_config"]

Config = dict[str, Any]

_METHOD_NAMES = {"intel/auto-round": "auto-round", "auto_round": "auto-round", "modelopt_fp4": "modelopt"}
"""Other spellings of quant_method met in published checkpoints."""


def read_quant_config(root: Path, config: Mapping[str, Any]) -> Config:
    """{} for an unquantized checkpoint.  config.json counts first; the files beside it fill in what it lacks.

    hf_quant_config.json (modelopt), quantize_config.json (gptqmodel, AutoGPTQ), quantization_config.json (auto-round)
    and quant_config.json (AutoAWQ) are looked at.
    """
    found = _in_config(config)
    for name, normal in _BESIDE.items():
        if (root / name).exists():
            beside = normal(read_json(root / name, root))
            same_tool = not found or _method(beside) == _method(found)
            found = {**beside, **found} if same_tool else found
    if not found:
        return {}
    return {**found, "quant_method": _method(found)}


def _in_config(config: Mapping[str, Any]) -> Config:
    for view in (config, config.get("text_config"), config.get("language_config"), config.get("llm_config")):
        if isinstance(view, Mapping):
            for key in ("quantization_config", "compression_config"):
                inner = view.get(key)
                if inner is None:
                    continue
                if not isinstance(inner, Mapping):
                    raise CheckpointError(f"config.json: {key} is a {type(inner).__name__}, want an object")
                return dict(inner)
    return {}


def _method(quant: Mapping[str, Any]) -> str:
    """quant_method in its usual spelling; older modelopt files carry only quant_algo."""
    method = str(quant.get("quant_method") or ("modelopt" if "quant_algo" in quant else "")).lower()
    return _METHOD_NAMES.get(method, method)


def _modelopt(beside: Config) -> Config:
    inner = beside.get("quantization")
    return {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else {})}


def _gptq(beside: Config) -> Config:
    return {"quant_method": "gptq", **beside}


def _autoawq(beside: Config) -> Config:
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq", **{names.get(k, k): v for k, v in beside.items()}}


_BESIDE: Mapping[str, Callable[[Config], Config]] = {
    "hf_quant_config.json": _modelopt,
    "quantize_config.json": _gptq,
    "quantization_config.json": dict,
    "quant_config.json": _autoawq,
}


def overrides_for(quant: Mapping[str, Any], module: str) -> dict[str, Any]:
    """What the config says of one module: gptqmodel's `dynamic` and auto-round's `extra_config`.

    dynamic: {"+:regex" or "regex": {...}, "-:regex": {}}; the first that matches from the start of the name counts,
    "-:" means left unquantized, which the tensors show anyway.  extra_config: {name or regex: {...}}; the exact name
    counts first.
    """
    dynamic, extra = quant.get("dynamic"), quant.get("extra_config")
    if isinstance(dynamic, Mapping):
        for pattern, values in dynamic.items():
            if matches(re.sub(r"^[+-]:", "", pattern), module, "quantization_config: dynamic"):
                return {} if pattern.startswith("-:") or not isinstance(values, Mapping) else dict(values)
    if isinstance(extra, Mapping):
        if isinstance(extra.get(module), Mapping):
            return dict(extra[module])
        for pattern, values in extra.items():
            if isinstance(values, Mapping) and matches(pattern, module, "quantization_config: extra_config"):
                return dict(values)
    return {}
