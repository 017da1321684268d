"""Checkpoints of small floats that are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from float_checkpoints import AT, Config, Tensors, e4m3, modelopt, sizes, write
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint


def one_layer(weight: Tensor, **more: Tensor) -> Tensors:
    """The same tensors for each projection of one expert."""
    return {f"{AT}.0.{p}_proj.{s}": t for p in ("gate", "up", "down") for s, t in {"weight": weight, **more}.items()}


CODES = e4m3(torch.Generator(), 64, 64)
PAIRS = torch.zeros(64, 32, dtype=torch.uint8)
BLOCK: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ONE, TWO = torch.ones(1, 1), torch.ones(2, 2)

INT4 = one_layer(torch.zeros(32, 64, dtype=torch.uint8), weight_scale=torch.ones(64, 2), pre_quant_scale=torch.ones(64))
AWQ: Config = {**modelopt("W4A16_AWQ"), "group_size": 32}

REFUSED: dict[str, tuple[Tensors, Config, str]] = {
    "ModelOpt AWQ, groups of none": (INT4, {**AWQ, "group_size": 0}, "group_size 0 in .* want a number > 0"),
    "ModelOpt AWQ, groups as text": (INT4, {**AWQ, "group_size": "32"}, "group_size '32' in .* want a number > 0"),
    "ModelOpt AWQ, odd groups": (INT4, {**AWQ, "group_size": 33}, "group_size 33 in .* want a power of two"),
    "ModelOpt AWQ, zero points": (INT4, {**AWQ, "has_zero_point": True}, "has_zero_point is true"),
    "ModelOpt AWQ, another algorithm": (
        INT4,
        {**AWQ, "quant_algo": "W4A16_NVFP4"},
        "quant_algo is W4A16_NVFP4, but the tensors are int4 codes",
    ),
    "ModelOpt AWQ, a factor of zero": (
        {**INT4, f"{AT}.0.gate_proj.pre_quant_scale": torch.zeros(64)},
        AWQ,
        "pre_quant_scale: a factor is NaN, infinite or not above 0",
    ),
    "e5m2": (
        one_layer(torch.zeros(64, 64).to(torch.float8_e5m2), weight_scale_inv=ONE),
        BLOCK,
        "e5m2 weights are not read",
    ),
    "ModelOpt AWQ": (
        one_layer(torch.zeros(32, 64, dtype=torch.uint8), weight_scale=torch.ones(64, 1)),
        modelopt("W4A16_AWQ"),
        "tensor 'pre_quant_scale' is missing",
    ),
    "an algorithm that nobody knows": (
        one_layer(CODES, weight_scale=torch.ones(())),
        modelopt("FP9"),
        "quant_algo is 'FP9' in the quantization config; want one of FP8, ",
    ),
    "other blocks": (
        one_layer(CODES, weight_scale_inv=TWO),
        BLOCK,
        r"_inv: scale shape \[2, 2\] for 64 x 64 weights; want \[1, 1\] \(blocks of 128 x 128\)",
    ),
    "no block size": (one_layer(CODES, weight_scale_inv=TWO), {"quant_method": "fp8"}, r"scale shape \[2, 2\]"),
    "block of zero": (
        one_layer(CODES, weight_scale_inv=TWO),
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        r"weight_block_size \[0, 128\]",
    ),
    "block of one number": (
        one_layer(CODES, weight_scale_inv=TWO),
        {"quant_method": "fp8", "weight_block_size": 128},
        r"weight_block_size 128; want two positive integers",
    ),
    "block of text": (
        one_layer(CODES, weight_scale_inv=TWO),
        {"quant_method": "fp8", "weight_block_size": ["128", 128]},
        r"weight_block_size \['128', 128\]; want two positive integers",
    ),
    "a tensor that nobody reads, ModelOpt fp8": (
        one_layer(CODES, weight_scale=torch.ones(()), weight_amount=ONE),
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        "'weight_amount' is not known",
    ),
    "a tensor that nobody reads, ModelOpt mxfp8": (
        one_layer(CODES, weight_scale=torch.full((64, 2), 127, dtype=torch.uint8), weight_amount=ONE),
        modelopt("MXFP8"),
        "'weight_amount' is not known",
    ),
    "a tensor that nobody reads, ModelOpt nvfp4": (
        one_layer(
            PAIRS,
            weight_scale=torch.ones(64, 4).to(torch.float8_e4m3fn),
            weight_scale_2=torch.ones(()),
            weight_amount=ONE,
        ),
        modelopt("W4A16_NVFP4"),
        "'weight_amount' is not known",
    ),
    "a tensor that nobody reads, ModelOpt mxfp4": (
        one_layer(PAIRS, weight_scale=torch.full((64, 2), 127, dtype=torch.uint8), weight_amount=ONE),
        modelopt("MXFP4"),
        "'weight_amount' is not known",
    ),
    "a tensor that nobody reads, fp8": (
        one_layer(CODES, weight_scale_inv=ONE, weight_amount=ONE),
        BLOCK,
        "'weight_amount' is not known",
    ),
    "two scales": (one_layer(CODES, weight_scale_inv=ONE, weight_scale=ONE), BLOCK, "'weight_scale_inv' is not known"),
    "no scales": (one_layer(CODES), {"quant_method": "fp8"}, "fits no known format"),
    "another method": (
        one_layer(CODES, weight_scale_inv=ONE),
        {"quant_method": "gptq", "bits": 4},
        "fits no known format",
    ),
    "infinite scale": (one_layer(CODES, weight_scale_inv=ONE * math.inf), BLOCK, r"_scale_inv: a scale is NaN"),
    "bytes as scales": (
        one_layer(PAIRS, weight_scale=torch.ones(64, 3).to(torch.uint8)),
        modelopt("mxfp4"),
        r"scale shape \[64, 3\]",
    ),
    "unknown activation": (
        one_layer(CODES, weight_scale=ONE),
        {"quant_method": "fp8", "activation_scheme": "warm"},
        "activation_scheme 'warm'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_tensor_s_name(tmp_path: Path, what: str) -> None:
    tensors, quant, want = REFUSED[what]
    write(tmp_path, tensors, quant, 1, 64, 64)
    with pytest.raises(CheckpointError, match=want) as error:
        open_checkpoint(tmp_path).load(0)
    assert "gate_proj" in str(error.value)


@pytest.mark.parametrize(
    ("quant", "codes", "scales"),
    [
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}}, "weight", "weight_scale"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6"}, "weight_packed", "weight_scale"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP6"}, "weight", "weight_scale"),
        ({"quant_method": "mxfp6"}, "weight", "scales"),
        ({"quant_method": "mxfp6_e2m3"}, "qweight", "qscales"),
    ],
)
def test_mxfp6_is_refused_by_name(tmp_path: Path, quant: Config, codes: str, scales: str) -> None:
    """Whatever the tool: 32 elements of 6 bits are 24 bytes, and no other format has as many for a scale."""
    H, I, g = 64, 32, torch.Generator().manual_seed(6)
    tensors = {}
    for p, (n, k) in sizes(H, I).items():
        tensors[f"{AT}.0.{p}_proj.{codes}"] = torch.randint(0, 256, (n, k * 6 // 8), dtype=torch.uint8, generator=g)
        tensors[f"{AT}.0.{p}_proj.{scales}"] = torch.randint(120, 130, (n, k // 32), dtype=torch.uint8, generator=g)
    write(tmp_path, tensors, quant, 1, H, I)
    with pytest.raises(CheckpointError, match=r"0\.\w+_proj: mxfp6: MXFP6 weights .* are not read.*--quantize"):
        open_checkpoint(tmp_path).load(0)


def test_fused_mxfp6_is_refused_by_name(tmp_path: Path) -> None:
    H, I, g = 64, 32, torch.Generator().manual_seed(7)
    tensors = {}
    for p, (n, k) in {"gate_up": (2 * I, H), "down": (H, I)}.items():
        tensors[f"{AT}.{p}_proj_blocks"] = torch.randint(0, 256, (2, n, k // 32, 24), dtype=torch.uint8, generator=g)
        tensors[f"{AT}.{p}_proj_scales"] = torch.randint(120, 130, (2, n, k // 32), dtype=torch.uint8, generator=g)
    write(tmp_path, tensors, {"quant_method": "mxfp4"}, 2, H, I, "gpt_oss")
    with pytest.raises(CheckpointError, match=r"gate_up_proj\[0\]: mxfp6: MXFP6 weights"):
        open_checkpoint(tmp_path).load(0)


@pytest.mark.parametrize("key", ["swiglu_limit", "swiglu_alpha"])
def test_constants_that_the_activation_does_not_take_are_refused(tmp_path: Path, key: str) -> None:
    """Read as plain SiLU such a model would give wrong answers in silence."""
    H, I, g = 64, 32, torch.Generator().manual_seed(8)
    tensors = {f"{AT}.0.{p}_proj.weight": torch.randn(*nk, generator=g).bfloat16() for p, nk in sizes(H, I).items()}
    write(tmp_path, tensors, {}, 1, H, I)
    config = json.loads((tmp_path / "config.json").read_text())
    open_checkpoint(tmp_path).load(0)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: None}))
    open_checkpoint(tmp_path).load(0)
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 7.0}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is 7\.0, but qwen3_moe is known with plain silu"):
        open_checkpoint(tmp_path).load(0)
