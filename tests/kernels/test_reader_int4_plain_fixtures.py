"""Checkpoints of gptqmodel, AutoAWQ, AutoRound and transformers that those tools wrote: weights bit for bit, outputs,
reading twice, reading some experts, bytes read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from expertd_kernels import reference, relative_error
from expertd_kernels.checkpoint import open_checkpoint

SCHEMES = {
    "autoround-gptq-w4-g128-asym-mixtral1l": "int4_g128_zp",
    "autoround-native-awqpack-w4-g64-asym-deepseekv3": "int4_g64_zp",
    "autoround-native-gptqmodelpack-w4-g128-asym-mixtral1l": "int4_g128_zp",
    "autoround-native-w4-g128-sym-qwen3moe1l": "int4_g128",
    "autoround-native-w4-g32-sym-gptoss-ns": "int4_g32",
    "awq-gemm-w4-g128-autoawq-mixtral": "int4_g128_zp",
    "awq-gemm-w4-g128-gptqmodel-qwen3moe1l": "int4_g128_zp",
    "awq-gemm-w4-g64-autoawq-qwen3moe1l": "int4_g64_zp",
    "awq-gemm-w4-g64-gateunquant-autoawq-qwen3moe1l": "f32+int4_g64_zp",
    "bf16-fused-gptoss-ns": "bf16",
    "bf16-fusedv5-qwen3moe1l": "bf16",
    "bf16-sharded-qwen3moe1l": "bf16",
    "gptq-w4-g128-asym-v2-mixtral1l": "int4_g128_zp",
    "gptq-w4-g128-sym-descact-false-qwen3moe1l": "int4_g128",
    "gptq-w4-g32-sym-descact-true-qwen3moe1l": "int4_g32",
    "gptq-w4-g32-sym-gptoss-ns": "int4_g32",
    "gptq-w4-g64-asym-v1-mixtral": "int4_g64_zp",
    "gptq-w4-gm1-sym-deepseekv3": "int4_channel",
    "gptq-w8-g128-sym-qwen3moe1l": "int8_g128",
}
ORDERED = {"gptq-w4-g32-sym-descact-true-qwen3moe1l"}
"""The one whose columns are permuted; in all the others g_idx is absent or in natural order."""

Find = Callable[[str], Path]


def given_of(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The layer that expected.safetensors is of, and its tensors."""
    with safe_open(path / "expected.safetensors", "pt") as f:
        return int(f.metadata()["layer"]), {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_exact_and_outputs_agree(checkpoint_folder: Find, name: str) -> None:
    path = checkpoint_folder(name)
    layer, given = given_of(path)
    source = open_checkpoint(path)
    info, w = source.info(layer), source.load(layer)
    assert "+".join(dict.fromkeys((info.w13.name, info.w2.name))) == SCHEMES[name]
    assert (info.w13, info.w2) == (w.w13.scheme, w.w2.scheme)
    assert info.bias == (w.w13.bias is not None) == ("gptoss" in name)
    assert info.act_order == (w.w13.columns is not None) == (name in ORDERED)
    gate, up = w.w13.dequantize().chunk(2, dim=1)
    full = {"gate": gate, "up": up, "down": w.w2.dequantize()}
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
def test_reading_twice_and_reading_some_experts_give_the_same_bits(checkpoint_folder: Find, name: str) -> None:
    path = checkpoint_folder(name)
    source = open_checkpoint(path)
    layer = source.layers[-1]
    every, again, some = source.load(layer), open_checkpoint(path).load(layer), source.load(layer, [2, 0])
    for a, b, c in ((every.w13, again.w13, some.w13), (every.w2, again.w2, some.w2)):
        for field, t in a.tensors():
            assert torch.equal(t.view(torch.uint8), getattr(b, field).view(torch.uint8)), field
            assert torch.equal(t[[2, 0]].view(torch.uint8), getattr(c, field).view(torch.uint8)), field


@pytest.mark.parametrize("name", SCHEMES)
def test_only_what_is_held_is_read(checkpoint_folder: Find, name: str) -> None:
    source = open_checkpoint(checkpoint_folder(name))
    layer = source.layers[-1]
    source.info(layer)
    held = source.expert_bytes(layer, [1])
    assert held < 0.3 * source.expert_bytes(layer)
    orders = sum(t.nbytes for t in source.needed(layer, [1]) if t.name.endswith("g_idx"))
    before = source.bytes_read
    source.load(layer, [1])
    assert source.bytes_read - before <= held + (orders if name in ORDERED else 0)  # an order: to plan, and to load
