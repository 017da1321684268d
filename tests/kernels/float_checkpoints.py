"""Writes fp8, gpt-oss mxfp4 and ModelOpt checkpoints from random codes, and checks what a reader makes of them.

It knows the formats from their description only; nothing of the reader is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels import Weights

Config = dict[str, Any]
Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AT = "model.layers.0.mlp.experts"
NAMES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16",
}  # fmt: skip


def write(
    folder: Path, tensors: Mapping[str, Tensor], quant: Config, E: int, H: int, I: int, family: str = "qwen3_moe",
    e8m0: str = "",
) -> None:  # fmt: skip
    """A safetensors file by hand: tensors whose name ends in `e8m0` get the dtype F8_E8M0."""
    size = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    config = {
        "model_type": family, "num_local_experts": E, "num_experts_per_tok": 1, "hidden_size": H, size: I,
        "num_hidden_layers": 1, "quantization_config": quant,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, t in tensors.items():
        raw = t.reshape(-1).clone().view(torch.uint8).numpy().tobytes()
        dtype = "F8_E8M0" if e8m0 and name.endswith(e8m0) else NAMES[t.dtype]
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def sizes(H: int, I: int) -> dict[str, tuple[int, int]]:
    return {"gate": (I, H), "up": (I, H), "down": (H, I)}


def check(w: Weights, values: Mapping[tuple[int, str], Tensor]) -> None:
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    down = w.w2.dequantize()
    for (e, p), value in values.items():
        assert torch.equal({"gate": gate, "up": up, "down": down}[p][e], value), (e, p)


def e4m3(g: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(*shape, generator=g) * 64).to(torch.float8_e4m3fn)


def spread(scales: Tensor, rows: int, cols: int, n: int, k: int) -> Tensor:
    """Block scales at each weight."""
    return scales.float().repeat_interleave(rows, dim=0)[:n].repeat_interleave(cols, dim=1)[:, :k]


def packed(codes: Tensor) -> Tensor:
    """[..., K] codes 0..15 -> [..., K/2] u8, low nibble first."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def modelopt(algo: str) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algo}
