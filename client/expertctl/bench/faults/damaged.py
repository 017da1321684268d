"""Two copies of one small checkpoint, of which one has been damaged: the second is refused where the first serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from expertctl.common.workload import LayerShape

__all__ = ["write_copies"]

_INTERMEDIATE = 128
DAMAGED = 1
"""The expert whose down projection is damaged: a checkpoint's name (fingerprint) looks at others."""


def write_copies(folder: Path, shape: LayerShape) -> tuple[Path, Path]:
    """One layer of bf16 weights, whole and damaged."""
    tensors = _tensors(shape)
    whole = _written(folder / "whole", tensors, shape)
    name = _name(DAMAGED, "down_proj")
    tensors[name] = -tensors[name]
    return whole, _written(folder / "damaged", tensors, shape)


def _name(expert: int, projection: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{projection}.weight"


def _tensors(shape: LayerShape) -> dict[str, NDArray[Any]]:
    """Name -> [N, K] bf16."""
    rng, tensors = np.random.default_rng(0), {}
    inner, outer = _INTERMEDIATE, shape.hidden_size
    for expert in range(shape.num_experts):
        for projection, rows, columns in (
            ("gate_proj", inner, outer),
            ("up_proj", inner, outer),
            ("down_proj", outer, inner),
        ):
            values = rng.standard_normal((rows, columns)) / np.sqrt(columns)
            tensors[_name(expert, projection)] = values.astype(ml_dtypes.bfloat16)
    return tensors


def _written(folder: Path, tensors: dict[str, NDArray[Any]], shape: LayerShape) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": _INTERMEDIATE,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
