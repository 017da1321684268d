"""Random checkpoints of real sizes, to measure loading with: expert tensors shaped like Qwen3-30B-A3B's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from expertd_kernels.checkpoint.errors import CheckpointError

__all__ = ["KINDS", "write_synthetic"]

HIDDEN, INTERMEDIATE, EXPERTS, GROUP = 2048, 768, 128, 128

Tensors = dict[str, Tensor]


def _words(rows: int, cols: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, cols), dtype=torch.int32)


def _scales(rows: int, cols: int) -> Tensor:
    return (torch.rand(rows, cols) * 0.01 + 0.001).half()


def _gptq(n: int, k: int, order: bool = False) -> Tensors:
    groups = k // GROUP
    g_idx = (torch.arange(k) // GROUP).int()
    return {
        "qweight": _words(k // 8, n),
        "qzeros": torch.full((groups, n // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(groups, n),
        "g_idx": g_idx[torch.arange(k).flip(0)] if order else g_idx,
    }


def _awq(n: int, k: int) -> Tensors:
    groups = k // GROUP
    return {"qweight": _words(k, n // 8), "qzeros": _words(groups, n // 8), "scales": _scales(groups, n)}


def _compressed(n: int, k: int) -> Tensors:
    return {
        "weight_packed": _words(n, k // 8),
        "weight_scale": _scales(n, k // GROUP).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }


def _fp8(n: int, k: int) -> Tensors:
    codes = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.rand(-(-n // 128), -(-k // 128)) + 0.5}


def _bf16(n: int, k: int) -> Tensors:
    return {"weight": torch.randn(n, k).bfloat16()}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "checkpoint_format": "gptq"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}},
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

KINDS: Mapping[str, tuple[Callable[[int, int], Tensors], dict[str, Any] | None]] = {
    "gptq": (_gptq, {**_GPTQ, "desc_act": False}),
    "gptq-order": (lambda n, k: _gptq(n, k, order=True), {**_GPTQ, "desc_act": True}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed-tensors": (_compressed, _COMPRESSED),
    "fp8": (_fp8, _FP8),
    "bf16": (_bf16, None),
}


def write_synthetic(
    folder: Path, text: str, seed: int = 0, *, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
) -> Path:
    """Write "KIND:GIB" into `folder`, one file a layer; whole layers, the last one with fewer experts if need be."""
    kind, _, size = text.partition(":")
    if kind not in KINDS:
        raise CheckpointError(f"synthetic {text!r}: want KIND:GIB with one of {', '.join(KINDS)}")
    make, quant = KINDS[kind]
    torch.manual_seed(seed)
    probe = 3 * sum(t.numel() * t.element_size() for t in make(intermediate, hidden).values())
    total = max(1, round(float(size or 1) * 2**30 / probe))
    experts = min(EXPERTS, total)
    layers = max(1, total // experts)
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        tensors = {}
        for e in range(experts):
            for name, n, k in (
                ("gate_proj", intermediate, hidden),
                ("up_proj", intermediate, hidden),
                ("down_proj", hidden, intermediate),
            ):
                module = f"model.layers.{layer}.mlp.experts.{e}.{name}"
                tensors.update({f"{module}.{suffix}": t for suffix, t in make(n, k).items()})
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "num_hidden_layers": layers,
    }
    config |= {"quantization_config": quant} if quant else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
