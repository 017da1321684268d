"""fp8 checkpoints of shapes that no fixture has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float_checkpoints import AT, E2M1, check, e4m3, packed, sizes, spread, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertd_kernels import ActivationQuant
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.readers.fp8 import is_autoround_fp8
from expertd_kernels.checkpoint.readers.protocol import Unit
from expertd_kernels.checkpoint.tensors import Stored

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    w = source.load(0)
    check(w, values)
    assert source.info(0).w13.element.value == "e4m3"  # split blocks, not widened weights
    assert w.checkpoint_activation is ActivationQuant.E4M3_GROUP128
    tensors[f"{AT}.down_proj_scale_inv"] = s2.bfloat16()
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}, E, H, I)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scale_inv.* is F32 and .* is BF16; want one dtype"):
        open_checkpoint(tmp_path).load(0)


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


@pytest.mark.parametrize(
    ("method", "data_type", "dtypes", "plain"),
    [
        ("auto-round", None, {"weight": "F8_E4M3", "weight_scale": "U8", "input_scale": "F32"}, False),
        ("auto-round", None, {"weight": "U8", "weight_scale": "BF16"}, True),
        ("auto-round", "fp8", {"weight": "F8_E4M3", "weight_scale": "U8"}, True),
        ("auto-round", "mx_fp", {"weight": "F8_E4M3", "weight_scale": "F32"}, False),
        ("fp8", "fp8", {"weight": "F8_E4M3", "weight_scale": "F32"}, False),
    ],
)
def test_what_auto_round_made_in_plain_fp8(
    method: str, data_type: str | None, dtypes: dict[str, str], plain: bool
) -> None:
    """By the data type, where it is said; else one scale that is an exponent tells a block format."""
    nowhere: Any = None
    tensors = {s: Stored(s, dtype, (64, 64), nowhere, 0, 0) for s, dtype in dtypes.items()}
    quant = {"quant_method": method, "data_type": data_type}
    assert is_autoround_fp8(Unit("gate", 0, 0, "gate", 64, 64, tensors, quant=quant)) is plain


@pytest.mark.parametrize("quant", [{"quant_method": "fbgemm_fp8"}, {"quant_method": "auto-round", "data_type": "fp8"}])
def test_other_methods_that_store_fp8(tmp_path: Path, quant: dict[str, Any]) -> None:
    g, tensors, values = torch.Generator().manual_seed(11), {}, {}
    for p, (n, k) in sizes(64, 48).items():
        scale, codes = torch.rand(n, 1, generator=g), e4m3(g, n, k)
        tensors |= {f"{AT}.0.{p}_proj.weight": codes, f"{AT}.0.{p}_proj.weight_scale": scale}
        values[0, p] = codes.float() * scale
    write(tmp_path, tensors, quant, 1, 64, 48)
    check(open_checkpoint(tmp_path).load(0), values)
