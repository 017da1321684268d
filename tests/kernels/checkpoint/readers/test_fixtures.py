"""Checkpoints that other people's tools wrote: weights bit for bit, outputs, reading twice, reading some experts, bytes
read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from expertd_kernels import Weights, reference, relative_error
from expertd_kernels.checkpoint import open_checkpoint

Folder = Callable[[str], Path]

SCHEMES = {
    "autoround-gptq-w4-g128-asym-mixtral1l": "int4_g128_zp",
    "autoround-native-awqpack-w4-g64-asym-deepseekv3": "int4_g64_zp",
    "autoround-native-gptqmodelpack-w4-g128-asym-mixtral1l": "int4_g128_zp",
    "autoround-native-mxfp8-qwen3moe1l": "mxfp8",
    "autoround-native-w4-g128-sym-qwen3moe1l": "int4_g128",
    "autoround-native-w4-g32-sym-gptoss-ns": "int4_g32",
    "awq-gemm-w4-g128-autoawq-mixtral": "int4_g128_zp",
    "awq-gemm-w4-g128-gptqmodel-qwen3moe1l": "int4_g128_zp",
    "awq-gemm-w4-g64-autoawq-qwen3moe1l": "int4_g64_zp",
    "awq-gemm-w4-g64-gateunquant-autoawq-qwen3moe1l": "f32+int4_g64_zp",
    "bf16-fused-gptoss-ns": "bf16",
    "bf16-fusedv5-qwen3moe1l": "bf16",
    "bf16-sharded-qwen3moe1l": "bf16",
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
    "gptq-w4-g128-asym-v2-mixtral1l": "int4_g128_zp",
    "gptq-w4-g128-sym-descact-false-qwen3moe1l": "int4_g128",
    "gptq-w4-g32-sym-descact-true-qwen3moe1l": "int4_g32",
    "gptq-w4-g32-sym-gptoss-ns": "int4_g32",
    "gptq-w4-g64-asym-v1-mixtral": "int4_g64_zp",
    "gptq-w4-gm1-sym-deepseekv3": "int4_channel",
    "gptq-w8-g128-sym-qwen3moe1l": "int8_g128",
    "hf-fp8-block128-qwen3moe1l": "e4m3_block128",
    "hf-fp8-dsstyle-deepseekv3": "e4m3_block128",
    "hf-fp8-dsstyle-ue8m0-qwen3moe1l": "e4m3_block128",
    "modelopt-fp8-pcpt-qwen3moe1l": "e4m3_channel",
    "modelopt-fp8-qwen3moe1l": "e4m3_tensor",
    "modelopt-int4-awq-qwen3moe1l": "int4_g128",
    "modelopt-mxfp8-gptoss-ns": "bf16",
    "modelopt-mxfp8-qwen3moe1l": "mxfp8",
    "modelopt-nvfp4-gptoss-ns": "nvfp4",
    "modelopt-nvfp4-qwen3moe1l": "nvfp4",
    "modelopt-w4a16-nvfp4-mixtral1l": "nvfp4",
    "mxfp4-oai-modelopt-gptoss-ns": "mxfp4",
    "mxfp4-oai-modelopt-sharded-gptoss": "mxfp4",
}
ORDERED = {"gptq-w4-g32-sym-descact-true-qwen3moe1l", "ct-old-w4a16-g64-sym-gptq-actorder-group-gidx-qwen3moe1l"}
"""Those whose columns are permuted; in all the others g_idx is absent or in natural order."""


def given_of(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The layer that expected.safetensors is of, and its tensors."""
    with safe_open(path / "expected.safetensors", "pt") as f:
        return int(f.metadata()["layer"]), {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - no mapping


def projections(w: Weights) -> dict[str, Tensor]:
    """gate, up, down [E, out, in] f32."""
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    return {"gate": gate, "up": up, "down": w.w2.dequantize()}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_exact_and_outputs_agree(checkpoint_folder: Folder, name: str) -> None:
    path = checkpoint_folder(name)
    layer, given = given_of(path)
    w = open_checkpoint(path).load(layer)
    assert "+".join(dict.fromkeys((w.w13.scheme.name, w.w2.scheme.name))) == SCHEMES[name]
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
def test_info_tells_what_load_gives(checkpoint_folder: Folder, name: str) -> None:
    source = open_checkpoint(checkpoint_folder(name))
    layer = source.layers[-1]
    info, w = source.info(layer), source.load(layer)
    assert (info.w13, info.w2) == (w.w13.scheme, w.w2.scheme)
    assert info.bias == (w.w13.bias is not None) == ("gptoss" in name)
    assert info.act_order == (w.w13.columns is not None) == (name in ORDERED)
    assert info.static_scales == (w.input_scales is not None)
    assert info.checkpoint_activation is w.checkpoint_activation


@pytest.mark.parametrize("name", SCHEMES)
def test_reading_twice_and_reading_some_experts_give_the_same_bits(checkpoint_folder: Folder, name: str) -> None:
    path = checkpoint_folder(name)
    source = open_checkpoint(path)
    layer = source.layers[-1]
    every, again, some = source.load(layer), open_checkpoint(path).load(layer), source.load(layer, [2, 0])
    for a, b, c in ((every.w13, again.w13, some.w13), (every.w2, again.w2, some.w2)):
        for field, t in a.tensors():
            assert torch.equal(t.view(torch.uint8), getattr(b, field).view(torch.uint8)), field
            assert torch.equal(t.view(torch.uint8)[[2, 0]], getattr(c, field).view(torch.uint8)), field


@pytest.mark.parametrize("name", SCHEMES)
def test_only_what_is_held_is_read(checkpoint_folder: Folder, name: str) -> None:
    source = open_checkpoint(checkpoint_folder(name))
    layer = source.layers[-1]
    source.info(layer)
    held = source.expert_bytes(layer, [1])
    assert held < 0.3 * source.expert_bytes(layer)
    orders = sum(t.nbytes for t in source.needed(layer, [1]) if t.name.endswith("g_idx"))
    before = source.bytes_read
    source.load(layer, [1])
    twice = orders if name in ORDERED else 0  # to plan, and to load
    assert source.bytes_read - before <= 1.001 * held + twice  # scales of fused projections: once for each
