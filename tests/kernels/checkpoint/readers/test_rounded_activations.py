"""Checkpoints that ask for rounded activations: static scales and the kind of rounding are read right, because the
answers with rounded activations come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from expertd_kernels import ActivationQuant, relative_error
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.weights.float32 import apply_activation
from expertd_kernels.weights.quantize import round_e2m1

Folder = Callable[[str], Path]

ROUNDED = {
    "ct-fp8-block-deepseekv3": ActivationQuant.E4M3_GROUP128,
    "ct-fp8-dynamic-qwen3moe1l": ActivationQuant.E4M3_TOKEN,
    "ct-fp8-static-tensor-qwen3moe1l": ActivationQuant.E4M3_TENSOR,
    "ct-mxfp8-qwen3moe1l": ActivationQuant.MXFP8,
    "ct-w8a8-int8-qwen3moe1l": ActivationQuant.INT8_TOKEN,
    "hf-fp8-block128-qwen3moe1l": ActivationQuant.E4M3_GROUP128,
    "hf-fp8-dsstyle-deepseekv3": ActivationQuant.E4M3_GROUP128,
    "hf-fp8-dsstyle-ue8m0-qwen3moe1l": ActivationQuant.E4M3_GROUP128,
    "modelopt-fp8-pcpt-qwen3moe1l": ActivationQuant.E4M3_TOKEN,
    "modelopt-fp8-qwen3moe1l": ActivationQuant.E4M3_TENSOR,
    "modelopt-mxfp8-qwen3moe1l": ActivationQuant.MXFP8,
    "modelopt-nvfp4-qwen3moe1l": ActivationQuant.NVFP4,
}
"""Fixtures that carry answers with rounded activations, and the rounding that their configuration asks for."""


def groups(x: Tensor, size: int, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """rounded(groups [..., G, size], their largest magnitudes [..., G, 1]), put together again."""
    b = x.unflatten(-1, (-1, size))
    return rounded(b, b.abs().amax(-1, keepdim=True).clamp_min(1e-12)).flatten(-2)


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def power_above(a: Tensor) -> Tensor:
    """Least power of two >= a."""
    mantissa, exponent = torch.frexp(a)
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())


def nvfp4(b: Tensor, a: Tensor, second: Tensor) -> Tensor:
    scale = ((a / 6) * (1 / second)).to(torch.float8_e4m3fn).float() / (1 / second)
    return round_e2m1(b / scale) * scale


def rounded(x: Tensor, how: ActivationQuant, static: Tensor | None) -> Tensor:
    """Activations [R, K] f32 as the checkpoint's scheme rounds them."""
    match how:
        case ActivationQuant.E4M3_TOKEN:
            return groups(x, x.shape[-1], lambda b, a: e4m3(b, a / 448))
        case ActivationQuant.E4M3_GROUP128:
            return groups(x, 128, lambda b, a: e4m3(b, a / 448))
        case ActivationQuant.MXFP8:
            return groups(x, 32, lambda b, a: e4m3(b, power_above(a / 448)))
        case ActivationQuant.INT8_TOKEN:
            return groups(x, x.shape[-1], lambda b, a: torch.round(b / (a / 127.5)).clamp(-128, 127) * (a / 127.5))
    assert static is not None, f"{how.value} needs the checkpoint's static scale"
    if how is ActivationQuant.E4M3_TENSOR:
        return e4m3(x, static)
    assert how is ActivationQuant.NVFP4
    return groups(x, 16, lambda b, a: nvfp4(b, a, static))


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_activations_agree(name: str, checkpoint_folder: Folder) -> None:
    path = checkpoint_folder(name)
    with safe_open(path / "expected.safetensors", "pt") as f:
        given = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - safe_open is no mapping
        w = open_checkpoint(path).load(int(f.metadata()["layer"]))
    assert w.checkpoint_activation is ROUNDED[name]
    assert (w.input_scales is None) == (ROUNDED[name] not in (ActivationQuant.E4M3_TENSOR, ActivationQuant.NVFP4))
    how = w.checkpoint_activation
    for m in (1, 5, 33):
        x, ids, weights = (given[f"M{m}.{k}"] for k in ("hidden_states", "topk_ids", "topk_weights"))
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, j = (ids == e).nonzero(as_tuple=True)
            one = w.experts([e])
            static = (None, None) if one.input_scales is None else one.input_scales[0].unbind()
            h = rounded(x[token], how, static[0]) @ one.w13.dequantize()[0].t()
            y = rounded(apply_activation(h, w.activation), how, static[1]) @ one.w2.dequantize()[0].t()
            out.index_add_(0, token, y * weights[token, j][:, None])
        assert relative_error(out, given[f"M{m}.expected_actq"]) < 1e-2
        assert relative_error(given[f"M{m}.expected"], given[f"M{m}.expected_actq"]) > 1e-2  # it does tell them apart
