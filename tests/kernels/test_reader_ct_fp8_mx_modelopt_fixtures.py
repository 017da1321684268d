"""Checkpoints of compressed-tensors, fp8, gpt-oss mxfp4 and ModelOpt that other people's tools wrote: weights bit for
bit, outputs, the activation rounding that the checkpoint asks for, and reading twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from expertd_kernels import ActivationQuant, Weights, reference, relative_error
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.float32 import apply_activation
from expertd_kernels.quantize import round_e2m1

Folder = Callable[[str], Path]

SCHEMES = {
    "ct-fp8-block-deepseekv3": "e4m3_block128",
    "ct-fp8-block-ragged-gptoss-ns": "e4m3_block128",
    "ct-fp8-dynamic-qwen3moe1l": "e4m3_channel",
    "ct-fp8-static-tensor-qwen3moe1l": "e4m3_tensor",
    "ct-mixed-w4experts-fp8attn-qwen3moe1l": "int4_g32",
    "ct-mxfp4a16-gptoss-ns": "mxfp4",
    "ct-mxfp8-qwen3moe1l": "mxfp8",
    "ct-nvfp4a16-qwen3moe1l": "nvfp4",
    "ct-old-w4a16-g128-asym-w1w2w3-mixtral1l": "int4_g128_zp",
    "ct-old-w4a16-g64-sym-gptq-actorder-group-gidx-qwen3moe1l": "int4_g64",
    "ct-w3a16-g128-sym-qwen3moe1l": "int4_g128",
    "ct-w4a16-g128-asym-mixtral": "int4_g128_zp",
    "ct-w4a16-g128-sym-qwen3moe1l": "int4_g128",
    "ct-w4a16-g32-sym-kimi-style-deepseekv3": "int4_g32",
    "ct-w8a16-channel-sym-qwen3moe1l": "int8_channel",
    "ct-w8a8-int8-qwen3moe1l": "int8_channel",
    "hf-fp8-block128-qwen3moe1l": "e4m3_block128",
    "hf-fp8-dsstyle-deepseekv3": "e4m3_block128",
    "hf-fp8-dsstyle-ue8m0-qwen3moe1l": "e4m3_block128",
    "modelopt-fp8-pcpt-qwen3moe1l": "e4m3_channel",
    "modelopt-fp8-qwen3moe1l": "e4m3_tensor",
    "modelopt-mxfp8-gptoss-ns": "bf16",
    "modelopt-mxfp8-qwen3moe1l": "mxfp8",
    "modelopt-nvfp4-gptoss-ns": "nvfp4",
    "modelopt-nvfp4-qwen3moe1l": "nvfp4",
    "modelopt-w4a16-nvfp4-mixtral1l": "nvfp4",
    "mxfp4-oai-modelopt-gptoss-ns": "mxfp4",
    "mxfp4-oai-modelopt-sharded-gptoss": "mxfp4",
}
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


def load(path: Path) -> tuple[Weights, dict[str, Tensor]]:
    """The layer that expected.safetensors is of, and its tensors."""
    with safe_open(path / "expected.safetensors", "pt") as f:
        given = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - safe_open is no mapping
        layer = int(f.metadata()["layer"])
    return open_checkpoint(path).load(layer), given


def projections(w: Weights) -> dict[str, Tensor]:
    """gate, up, down [E, out, in] f32."""
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    return {"gate": gate, "up": up, "down": w.w2.dequantize()}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_exact_and_outputs_agree(name: str, checkpoint_folder: Folder) -> None:
    w, given = load(checkpoint_folder(name))
    assert {w.w13.scheme.name, w.w2.scheme.name} == {SCHEMES[name]}
    full = projections(w)
    slices = [k for k in given if k.startswith("dequant.E")]
    assert len(slices) == 12
    for key in slices:
        _, expert, projection, part = key.split(".")
        m = full[projection][int(expert[1:])]
        assert torch.equal(m[:4] if part == "head4" else m[-4:], given[key]), key
    for projection, m in full.items():
        sums = torch.stack([m.double().sum((1, 2)), m.double().abs().sum((1, 2))], dim=1)
        torch.testing.assert_close(sums, given[f"dequant_sum.{projection}"], rtol=1e-12, atol=1e-9)
    for m in (1, 5, 33):
        x, ids, weights = (given[f"M{m}.{k}"] for k in ("hidden_states", "topk_ids", "topk_weights"))
        assert relative_error(reference(w, x, ids, weights), given[f"M{m}.expected"]) < 1e-6


@pytest.mark.parametrize("name", SCHEMES)
def test_reading_twice_and_reading_some_experts_give_the_same_bits(name: str, checkpoint_folder: Folder) -> None:
    path = checkpoint_folder(name)
    source = open_checkpoint(path)
    layer = source.layers[-1]
    every, again, some = source.load(layer), open_checkpoint(path).load(layer), source.load(layer, [2, 0])
    for a, b, c in ((every.w13, again.w13, some.w13), (every.w2, again.w2, some.w2)):
        for field, t in a.tensors():
            assert torch.equal(t.view(torch.uint8), getattr(b, field).view(torch.uint8)), field
            assert torch.equal(t[[2, 0]].view(torch.uint8), getattr(c, field).view(torch.uint8)), field


@pytest.mark.parametrize("name", SCHEMES)
def test_info_tells_what_load_gives(name: str, checkpoint_folder: Folder) -> None:
    source = open_checkpoint(checkpoint_folder(name))
    info = source.info(source.layers[-1])
    w = source.load(source.layers[-1])
    assert (info.w13, info.w2) == (w.w13.scheme, w.w2.scheme)
    assert (info.bias, info.act_order) == (w.w13.bias is not None, w.w13.columns is not None)
    assert info.checkpoint_activation is w.checkpoint_activation


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
    """Static scales and the kind of rounding were read right: the answers with rounded activations come out."""
    w, given = load(checkpoint_folder(name))
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
