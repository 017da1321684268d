"""gpt-oss's mxfp4 of shapes that no fixture has, and broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float_checkpoints import AT, E2M1, Tensors, check, packed, spread, write
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint


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


@pytest.mark.parametrize("e8m0", ["", "_scales"])
@pytest.mark.parametrize(("E", "H", "I"), [(1, 32, 32), (3, 64, 64), (2, 96, 160), (2, 192, 96)])
def test_gptoss_blocks_of_any_shape(tmp_path: Path, E: int, H: int, I: int, e8m0: str) -> None:
    """Square ones, too, and sizes that are multiples of 32 only; scales as bytes or under their own name."""
    tensors, values = gptoss_tensors(E, H, I)
    write(tmp_path, tensors, {"quant_method": "mxfp4"}, E, H, I, "gpt_oss", e8m0)
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
        ("down_proj_amount", torch.ones(2, 96), r"'amount' is not known"),
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
