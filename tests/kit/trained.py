"""A tiny model that is trained: a checkpoint of random bf16 experts for each step, and servers of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from expertd.v1 import weights_service_pb2 as pb
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address

E, H, I, K, LAYERS = 4, 256, 128, 2, (0, 1)
HERE = Address("127.0.0.1", 0)
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64",
          torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip


def step(number: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All tensors of the experts at a step, and one that is no expert's."""
    g = torch.Generator().manual_seed(number)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    out = {
        f"model.layers.{n}.mlp.experts.{e}.{name}.weight": (torch.randn(shape, generator=g) * 0.05).to(dtype)
        for n in LAYERS
        for e in range(E)
        for name, shape in shapes.items()
    }
    out["model.embed_tokens.weight"] = torch.randn(8, H, generator=g).to(dtype)
    return out


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True)
    facts = {"model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I, "num_experts": E}
    facts |= {"num_experts_per_tok": K, "num_hidden_layers": len(LAYERS)}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "model.safetensors")
    return folder


def config(folder: Path, **more: Any) -> ServeConfig:
    """Of a server of the folder."""
    return ServeConfig(
        **{"checkpoint": folder, "device": "cpu", "listen": HERE, "admin_listen": HERE, "threads": 1} | more
    )


def parts(tensors: dict[str, Tensor], cut: int = 1 << 30) -> list[pb.WeightPart]:
    """Of each tensor, in pieces of at most `cut` bytes."""
    out = []
    for name, t in tensors.items():
        data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(data), cut):
            piece = data[at : at + cut]
            out.append(pb.WeightPart(name=name, dtype=DTYPES[t.dtype], shape=list(t.shape), offset=at, data=piece))
    return out
