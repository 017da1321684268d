"""ModelOpt's checkpoints of shapes that no fixture has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float_checkpoints import AT, E2M1, check, e4m3, modelopt, packed, sizes, spread, write
from torch import Tensor

from expertd_kernels import ActivationQuant
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint


@pytest.mark.parametrize("seed", range(4))
def test_second_level_scales_of_gate_and_up_may_differ(tmp_path: Path, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors, values = {}, {}
    for e in range(2):
        for p, (n, k) in sizes(64, 48).items():
            codes = torch.randint(0, 16, (n, k), generator=g)
            scales = (torch.rand(n, k // 16, generator=g) * 400).to(torch.float8_e4m3fn)
            second, at = torch.rand((), generator=g) * 1e-3, f"{AT}.{e}.{p}_proj"
            tensors |= {f"{at}.weight": packed(codes), f"{at}.weight_scale": scales, f"{at}.weight_scale_2": second}
            tensors[f"{at}.input_scale"] = torch.tensor(0.5 if p == "down" else 0.25)
            values[e, p] = E2M1[codes] * spread(scales.float() * second, 1, 16, n, k)
    write(tmp_path, tensors, modelopt("NVFP4"), 2, 64, 48)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.global_scales is not None
    assert (w.w13.global_scales[:, 0] != w.w13.global_scales[:, 1]).all()
    assert w.checkpoint_activation is ActivationQuant.NVFP4
    assert w.input_scales is not None
    assert w.input_scales.tolist() == [[0.25, 0.5]] * 2
    write(tmp_path, tensors, modelopt("W4A16_NVFP4"), 2, 64, 48)
    assert open_checkpoint(tmp_path).load(0).checkpoint_activation is ActivationQuant.NONE


def modelopt_fp8(g: torch.Generator, n: int, k: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    codes = e4m3(g, n, k)
    if how == "FP8":
        scale = torch.rand((), generator=g)
        return codes, scale, codes.float() * scale
    if how == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = torch.rand(n, generator=g)
        return codes, scale, codes.float() * scale[:, None]
    rows, cols = -(-n // 128), -(-k // 128)
    scale = torch.rand(rows, 1, cols, 1, generator=g)
    return codes, scale, codes.float() * spread(scale[:, 0, :, 0], 128, 128, n, k)


@pytest.mark.parametrize(
    ("algo", "activation"),
    [
        ("FP8", ActivationQuant.E4M3_TENSOR),
        ("FP8_PER_CHANNEL_PER_TOKEN", ActivationQuant.E4M3_TOKEN),
        ("fp8_pb_wo", ActivationQuant.NONE),
    ],
)
@pytest.mark.parametrize(("H", "I"), [(256, 128), (320, 192), (100, 36)])
def test_modelopt_fp8(tmp_path: Path, algo: str, activation: ActivationQuant, H: int, I: int) -> None:
    g = torch.Generator().manual_seed(H)
    tensors, values = {}, {}
    for p, (n, k) in sizes(H, I).items():
        codes, scale, values[0, p] = modelopt_fp8(g, n, k, algo)
        tensors |= {f"{AT}.0.{p}_proj.weight": codes, f"{AT}.0.{p}_proj.weight_scale": scale}
        if activation.static:
            tensors[f"{AT}.0.{p}_proj.input_scale"] = torch.tensor(0.5)
    write(tmp_path, tensors, modelopt(algo), 1, H, I)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.checkpoint_activation is activation


@pytest.mark.parametrize(
    ("algo", "input_scale", "activation"),
    [
        ("W4A8_MXFP4_FP8", True, ActivationQuant.E4M3_TENSOR),
        ("W4A8_MXFP4_FP8", False, ActivationQuant.E4M3_TOKEN),
        ("mxfp4", False, ActivationQuant.NONE),
        ("MIXED_PRECISION", True, ActivationQuant.E4M3_TENSOR),  # which does not name these modules
    ],
)
@pytest.mark.parametrize("e8m0", ["", "weight_scale"])
def test_modelopt_mxfp4(tmp_path: Path, algo: str, input_scale: bool, activation: ActivationQuant, e8m0: str) -> None:
    g = torch.Generator().manual_seed(4)
    tensors, values = {}, {}
    for p, (n, k) in sizes(64, 96).items():
        codes = torch.randint(0, 16, (n, k), generator=g)
        scales = torch.randint(110, 130, (n, k // 32), generator=g).to(torch.uint8)
        tensors |= {f"{AT}.0.{p}_proj.weight": packed(codes), f"{AT}.0.{p}_proj.weight_scale": scales}
        if input_scale:
            tensors[f"{AT}.0.{p}_proj.input_scale"] = torch.tensor(0.5)
        values[0, p] = E2M1[codes] * spread(torch.exp2(scales.float() - 127), 1, 32, n, k)
    write(tmp_path, tensors, modelopt(algo), 1, 64, 96, e8m0=e8m0)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.checkpoint_activation is activation


@pytest.mark.parametrize(("E", "H", "I"), [(2, 96, 64), (1, 64, 64), (3, 64, 32)])
def test_modelopt_mxfp8_blocks_along_the_outputs(tmp_path: Path, E: int, H: int, I: int) -> None:
    """gpt-oss's fused mxfp8: [E, K, N] with blocks of 32 along N, where gate and up rows alternate; also square."""
    g = torch.Generator().manual_seed(6)
    tensors, values = {}, {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        codes = e4m3(g, E, k, n)
        scales = torch.randint(110, 130, (E, k, n // 32), generator=g).to(torch.uint8)
        tensors |= {f"{AT}.{name}": codes, f"{AT}.{name}_weight_scale": scales, f"{AT}.{name}_bias": torch.ones(E, n)}
        value = (codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=2)).transpose(1, 2)
        for e in range(E):
            if name == "down_proj":
                values[e, "down"] = value[e]
            else:
                values |= {(e, "gate"): value[e, 0::2], (e, "up"): value[e, 1::2]}
    write(tmp_path, tensors, modelopt("MXFP8"), E, H, I, "gpt_oss")
    source = open_checkpoint(tmp_path)
    check(source.load(0), values)
    assert any("along the outputs" in n for n in source.info(0).notes)
    tensors[f"{AT}.down_proj_weight_scale"][0, 0, 0] = 254
    tensors[f"{AT}.down_proj"][0, 0, 0] = 448.0
    write(tmp_path, tensors, modelopt("MXFP8"), E, H, I, "gpt_oss")
    with pytest.raises(CheckpointError, match=r"down_proj.*does not fit bf16"):
        open_checkpoint(tmp_path).load(0)


def two_rows_a_byte(codes: Tensor) -> Tensor:
    """[N, K] codes -8..7 -> [N/2, K] u8, the even row in the low nibble."""
    nibbles = codes & 15
    return (nibbles[0::2] | nibbles[1::2] << 4).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("H", "bias"), [(64, False), (64, True), (45, False)])
def test_modelopt_awq(tmp_path: Path, H: int, bias: bool, dtype: torch.dtype) -> None:
    """Factors of any type; an odd number of columns, which only a `down` that is not quantized allows; biases."""
    g, I = torch.Generator().manual_seed(H), 48
    tensors, values = {}, {}
    inputs = {k: (torch.rand(k, generator=g) + 0.5).to(dtype) for k in (H, I)}
    for p, (n, k) in sizes(H, I).items():
        at, codes = f"{AT}.0.{p}_proj", torch.randint(-8, 8, (n, k), generator=g)
        if n % 2:
            tensors[f"{at}.weight"] = codes.bfloat16()
            values[0, p] = codes.float()
            continue
        scales = torch.rand(n, -(-k // 32), generator=g)
        tensors |= {f"{at}.weight": two_rows_a_byte(codes), f"{at}.weight_scale": scales}
        tensors[f"{at}.pre_quant_scale"] = inputs[k]
        values[0, p] = codes * spread(scales, 1, 32, n, k) * inputs[k].float()
        if bias:
            tensors[f"{at}.bias"] = torch.randn(n, generator=g)
    write(tmp_path, tensors, {**modelopt("W4A16_AWQ"), "group_size": 32}, 1, H, I)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    if bias:
        assert w.w13.bias is not None
        assert w.w2.bias is not None
        assert torch.equal(w.w13.bias[0], torch.cat([tensors[f"{AT}.0.{p}_proj.bias"] for p in ("gate", "up")]))
        assert torch.equal(w.w2.bias[0], tensors[f"{AT}.0.down_proj.bias"])
