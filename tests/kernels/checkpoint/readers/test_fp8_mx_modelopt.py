"""fp8, gpt-oss mxfp4 and ModelOpt checkpoints of shapes that no fixture has, written here from random codes.

The writer and the decoder in this file know the formats from their description only; nothing of the reader is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertd_kernels import ActivationQuant, Weights
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint

Config = dict[str, Any]
Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AT = "model.layers.0.mlp.experts"
NAMES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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


@quick
@given(
    st.integers(1, 3), st.integers(1, 300), st.integers(1, 300), st.sampled_from([(128, 128), (64, 32), (1, 128)]),
    st.sampled_from(["f32", "bf16", "e8m0"]),
)  # fmt: skip
def test_block_scales_of_any_shape(tmp_path: Path, E: int, H: int, I: int, block: tuple[int, int], kind: str) -> None:
    g = torch.Generator().manual_seed(H * 301 + I)
    tensors, values = {}, {}
    for e in range(E):
        for p, (n, k) in sizes(H, I).items():
            codes, shape = e4m3(g, n, k), (-(-n // block[0]), -(-k // block[1]))
            if kind == "e8m0":
                scales = torch.randint(100, 130, shape, generator=g).to(torch.uint8)
                number = torch.exp2(scales.float() - 127)
            else:
                scales = torch.randn(shape, generator=g).to(torch.float32 if kind == "f32" else torch.bfloat16)
                number = scales.float()
            tensors |= {f"{AT}.{e}.{p}_proj.weight": codes, f"{AT}.{e}.{p}_proj.weight_scale_inv": scales}
            values[e, p] = codes.float() * spread(number, *block, n, k)
    quant = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    write(tmp_path, tensors, quant, E, H, I, e8m0="scale_inv" if kind == "e8m0" else "")
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.checkpoint_activation is ActivationQuant.E4M3_GROUP128


@pytest.mark.parametrize("I", [128, 192, 40])
@pytest.mark.parametrize("H", [256, 200])
def test_scales_of_all_experts_in_one_tensor(tmp_path: Path, H: int, I: int) -> None:
    """Blocks run along gate and up rows together: with I = 192 the second block holds rows of both."""
    g, E = torch.Generator().manual_seed(H + I), 3
    rows13, cols = -(-2 * I // 128), -(-H // 128)
    s13 = torch.rand(E, rows13, cols, generator=g)
    s2 = torch.rand(E, cols, -(-I // 128), generator=g)
    tensors = {f"{AT}.gate_up_proj_scale_inv": s13, f"{AT}.down_proj_scale_inv": s2}
    values = {}
    for e in range(E):
        both = spread(s13[e], 128, 128, 2 * I, H)
        for p, scale in (("gate", both[:I]), ("up", both[I:]), ("down", spread(s2[e], 128, 128, H, I))):
            codes = e4m3(g, *scale.shape)
            tensors[f"{AT}.{e}.{p}_proj.weight"] = codes
            values[e, p] = codes.float() * scale
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}, E, H, I)
    source = open_checkpoint(tmp_path)
    check(source.load(0), values)
    assert source.info(0).w13.element.value == "e4m3"  # split blocks, not widened weights


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_block_scales(tmp_path: Path, transposed: bool) -> None:
    g, E, H, I = torch.Generator().manual_seed(1), 2, 160, 192
    s13, s2 = torch.rand(E, 3, 2, generator=g), torch.rand(E, 2, 2, generator=g)
    c13, c2 = e4m3(g, E, 2 * I, H), e4m3(g, E, H, I)
    values = {}
    for e in range(E):
        v13 = c13[e].float() * spread(s13[e], 128, 128, 2 * I, H)
        values |= {(e, "gate"): v13[:I], (e, "up"): v13[I:]}
        values[e, "down"] = c2[e].float() * spread(s2[e], 128, 128, H, I)
    if transposed:
        c13, c2 = (t.view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn) for t in (c13, c2))
        s13, s2 = (t.transpose(1, 2).contiguous() for t in (s13, s2))
    tensors = {f"{AT}.gate_up_proj": c13, f"{AT}.gate_up_proj_scale_inv": s13}
    tensors |= {f"{AT}.down_proj": c2, f"{AT}.down_proj_scale_inv": s2}
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}, E, H, I)
    check(open_checkpoint(tmp_path).load(0), values)


@pytest.mark.parametrize("shape", [(), (1,), (48, 1), (48,)])
@pytest.mark.parametrize("static", ["input_scale", "activation_scale", ""])
def test_tensor_and_channel_scales(tmp_path: Path, shape: tuple[int, ...], static: str) -> None:
    g = torch.Generator().manual_seed(2)
    tensors, values = {}, {}
    for p, (n, k) in sizes(48, 48).items():
        scale, codes = torch.rand(shape, generator=g), e4m3(g, n, k)
        tensors |= {f"{AT}.0.{p}_proj.weight": codes, f"{AT}.0.{p}_proj.weight_scale": scale}
        if static:
            tensors[f"{AT}.0.{p}_proj.{static}"] = torch.tensor({"gate": 0.5, "up": 0.25, "down": 2.0}[p])
        values[0, p] = codes.float() * scale.reshape(-1, 1)
    write(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "static"}, 1, 48, 48)
    if not static:
        with pytest.raises(CheckpointError, match=r"gate_proj: tensor 'input_scale' is missing; want the static scale"):
            open_checkpoint(tmp_path).info(0)
        write(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"}, 1, 48, 48)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.checkpoint_activation is (ActivationQuant.E4M3_TENSOR if static else ActivationQuant.E4M3_TOKEN)
    assert (w.input_scales is not None) == bool(static)
    if w.input_scales is not None:
        assert w.input_scales.tolist() == [[0.5, 2.0]]


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "scale"])
def test_experts_of_two_e2m1_a_byte(tmp_path: Path, scale_name: str) -> None:
    """quant_method fp8 with expert_dtype fp4: `weight` is I8, scales are e8m0 for 32 columns."""
    g = torch.Generator().manual_seed(3)
    tensors, values = {}, {}
    for p, (n, k) in sizes(96, 64).items():
        codes = torch.randint(0, 16, (n, k), generator=g)
        scales = torch.randint(110, 130, (n, k // 32), generator=g).to(torch.uint8)
        tensors |= {f"{AT}.0.{p}_proj.weight": packed(codes).view(torch.int8), f"{AT}.0.{p}_proj.{scale_name}": scales}
        values[0, p] = E2M1[codes] * spread(torch.exp2(scales.float() - 127), 1, 32, n, k)
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    write(tmp_path, tensors, quant, 1, 96, 64, e8m0=scale_name)
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.scheme.name == "mxfp4"


def gptoss_tensors(E: int, H: int, I: int) -> tuple[Tensors, dict[tuple[int, str], Tensor]]:
    """Blocks and scales of a gpt-oss layer: rows 0, 2, 4, ... of gate_up are gate rows."""
    g = torch.Generator().manual_seed(E + H + I)
    tensors, values = {}, {}
    for name, (n, k) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        codes = torch.randint(0, 16, (E, n, k), generator=g)
        scales = torch.randint(110, 130, (E, n, k // 32), generator=g).to(torch.uint8)
        tensors[f"{AT}.{name}_blocks"] = packed(codes).reshape(E, n, k // 32, 16)
        tensors[f"{AT}.{name}_scales"] = scales
        tensors[f"{AT}.{name}_bias"] = torch.randn(E, n, generator=g).bfloat16()
        for e in range(E):
            value = E2M1[codes[e]] * spread(torch.exp2(scales[e].float() - 127), 1, 32, n, k)
            if name == "down_proj":
                values[e, "down"] = value
            else:
                values |= {(e, "gate"): value[0::2], (e, "up"): value[1::2]}
    return tensors, values


@pytest.mark.parametrize(("E", "H", "I"), [(1, 32, 32), (3, 64, 64), (2, 96, 160), (2, 192, 96)])
def test_gptoss_blocks_of_any_shape(tmp_path: Path, E: int, H: int, I: int) -> None:
    """Square ones, too, and sizes that are multiples of 32 only."""
    tensors, values = gptoss_tensors(E, H, I)
    write(tmp_path, tensors, {"quant_method": "mxfp4"}, E, H, I, "gpt_oss")
    w = open_checkpoint(tmp_path).load(0)
    check(w, values)
    assert w.w13.bias is not None
    stored = tensors[f"{AT}.gate_up_proj_bias"].float()
    assert torch.equal(w.w13.bias, torch.cat((stored[:, 0::2], stored[:, 1::2]), dim=1))


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("gate_up_proj_scales", torch.zeros(2, 192, 2, dtype=torch.uint8), r"_scales.*scale shape \[192, 2\]"),
        ("gate_up_proj_blocks", torch.zeros(2, 192, 3, 8, dtype=torch.uint8), r"want \[rows, K / 32, 16\]"),
        ("down_proj_blocks", torch.zeros(2, 96, 2, 16, dtype=torch.uint8), r"96 x 64 weights"),
        ("down_proj_scales", torch.full((2, 96, 3), 255, dtype=torch.uint8), r"a scale is NaN"),
        ("down_proj_scales", None, r"'scales'"),
    ],
)  # fmt: skip
def test_broken_gptoss_tensors_are_named(tmp_path: Path, name: str, value: Tensor | None, want: str) -> None:
    tensors, _ = gptoss_tensors(2, 96, 96)
    if value is None:
        del tensors[f"{AT}.{name}"]
    else:
        tensors[f"{AT}.{name}"] = value
    write(tmp_path, tensors, {"quant_method": "mxfp4"}, 2, 96, 96, "gpt_oss")
    with pytest.raises(CheckpointError, match=want):
        open_checkpoint(tmp_path).load(0)


def modelopt(algo: str) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algo}


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
    ],
)
def test_modelopt_mxfp4(tmp_path: Path, algo: str, input_scale: bool, activation: ActivationQuant) -> None:
    g = torch.Generator().manual_seed(4)
    tensors, values = {}, {}
    for p, (n, k) in sizes(64, 96).items():
        codes = torch.randint(0, 16, (n, k), generator=g)
        scales = torch.randint(110, 130, (n, k // 32), generator=g).to(torch.uint8)
        tensors |= {f"{AT}.0.{p}_proj.weight": packed(codes), f"{AT}.0.{p}_proj.weight_scale": scales}
        if input_scale:
            tensors[f"{AT}.0.{p}_proj.input_scale"] = torch.tensor(0.5)
        values[0, p] = E2M1[codes] * spread(torch.exp2(scales.float() - 127), 1, 32, n, k)
    write(tmp_path, tensors, modelopt(algo), 1, 64, 96)
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


def one_layer(weight: Tensor, **more: Tensor) -> Tensors:
    """The same tensors for each projection of one expert."""
    return {f"{AT}.0.{p}_proj.{s}": t for p in ("gate", "up", "down") for s, t in {"weight": weight, **more}.items()}


CODES = e4m3(torch.Generator(), 64, 64)
PAIRS = torch.zeros(64, 32, dtype=torch.uint8)
BLOCK: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ONE, TWO = torch.ones(1, 1), torch.ones(2, 2)

REFUSED: dict[str, tuple[Tensors, Config, str]] = {
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
