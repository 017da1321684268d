"""Unquantized checkpoints: one expert a tensor or fused, in either orientation, of several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint

E, H, I = 3, 40, 24

Write = Callable[..., Path]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_expert_a_tensor(write_checkpoint: Write, tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    tensors = {
        f"model.layers.1.mlp.experts.{e}.{n}.weight": draw(*s, seed=10 * e + i, dtype=dtype)
        for e in range(E)
        for i, (n, s) in enumerate(sizes.items())
    }
    other = {"model.layers.1.mlp.gate.weight": draw(E, H, seed=99), "model.norm.weight": draw(H, seed=98)}
    other |= {f"model.layers.1.mlp.shared_experts.{n}.weight": draw(*s, seed=97) for n, s in sizes.items()}
    source = open_checkpoint(write_checkpoint(tmp_path, tensors | other, experts=E, hidden=H, intermediate=I, shards=3))
    w = source.load(1)
    for e in range(E):
        gate, up = w.w13.codes[e].chunk(2)
        for name, got in (("gate_proj", gate), ("up_proj", up), ("down_proj", w.w2.codes[e])):
            assert torch.equal(got, tensors[f"model.layers.1.mlp.experts.{e}.{name}.weight"])
    assert source.bytes_read == sum(t.numel() * t.element_size() for t in tensors.values())
    assert any("left alone" in note and "router" in note for note in source.info(1).notes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "gpt_oss"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_in_either_orientation(
    write_checkpoint: Write, tmp_path: Path, family: str, turned: bool, suffix: str
) -> None:
    """The shapes tell [E, 2I, H] from [E, H, 2I], whatever the family does by custom."""
    gate, up, down = draw(E, I, H, seed=1), draw(E, I, H, seed=2), draw(E, H, I, seed=3)
    rows = torch.stack((gate, up), 2).flatten(1, 2) if family == "gpt_oss" else torch.cat((gate, up), 1)
    fused = {"gate_up_proj": rows, "down_proj": down}
    tensors = {
        f"model.layers.0.mlp.experts.{n}{suffix}": (t.transpose(1, 2) if turned else t) for n, t in fused.items()
    }
    bias = draw(E, 2 * I, seed=4)
    if family == "gpt_oss":
        tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = bias
        tensors["model.layers.0.mlp.experts.down_proj_bias"] = draw(E, H, seed=5)
    folder = write_checkpoint(
        tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type=family, moe_intermediate_size=I
    )
    w = open_checkpoint(folder).load(0)
    assert torch.equal(w.w13.codes, torch.cat((gate, up), 1))
    assert torch.equal(w.w2.codes, down)
    if family == "gpt_oss":
        assert w.w13.bias is not None
        assert torch.equal(w.w13.bias, torch.cat((bias[:, 0::2], bias[:, 1::2]), 1).float())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_square_matrix_lies_as_its_partner_does(
    write_checkpoint: Write, tmp_path: Path, family: str, turned: bool
) -> None:
    """Old releases of transformers wrote qwen3_vl_moe input-first, today's output-first, always both matrices."""
    gate_up, down = draw(E, 2 * I, 2 * I, seed=1), draw(E, 2 * I, I, seed=2)
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": gate_up,
        "model.layers.0.mlp.experts.down_proj": down.transpose(1, 2) if turned else down,
    }
    folder = write_checkpoint(tmp_path, tensors, experts=E, hidden=2 * I, intermediate=I, model_type=family)
    w = open_checkpoint(folder).load(0)
    assert torch.equal(w.w13.codes, gate_up.transpose(1, 2) if turned else gate_up)
    assert torch.equal(w.w2.codes, down)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "gpt_oss"])
def test_of_h_equal_to_i_the_other_matrix_tells(write_checkpoint: Write, tmp_path: Path, family: str) -> None:
    for told in (False, True):
        gate, up, down = (draw(E, I, I, seed=n) for n in (1, 2, 3))
        rows = torch.stack((gate, up), 2).flatten(1, 2) if family == "gpt_oss" else torch.cat((gate, up), 1)
        fused = {"gate_up_proj": rows, "down_proj": down}
        tensors = {f"model.layers.0.mlp.experts.{n}": t.transpose(1, 2) if told else t for n, t in fused.items()}
        if family == "gpt_oss":
            tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = draw(E, 2 * I, seed=4)
            tensors["model.layers.0.mlp.experts.down_proj_bias"] = draw(E, I, seed=5)
        folder = write_checkpoint(
            tmp_path / f"{told}", tensors, experts=E, hidden=I, intermediate=I, model_type=family,
            moe_intermediate_size=I,
        )  # fmt: skip
        w = open_checkpoint(folder).load(0)
        assert torch.equal(w.w13.codes, torch.cat((gate, up), 1))
        assert torch.equal(w.w2.codes, down)


def test_where_the_config_names_no_inner_size_the_tensors_do(write_checkpoint: Write, tmp_path: Path) -> None:
    gate_up, down = draw(E, 2 * I, H, seed=1), draw(E, H, I, seed=2)
    at = "model.layers.0.mlp.experts"
    tensors = {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}
    folder = write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    config = json.loads((folder / "config.json").read_text())
    del config["moe_intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    w = open_checkpoint(folder).load(0)
    assert torch.equal(w.w13.codes, gate_up)
    assert torch.equal(w.w2.codes, down)


def test_other_shapes_are_refused(write_checkpoint: Write, tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": draw(E, 2 * I, H + 1, seed=1),
        "model.layers.0.mlp.experts.down_proj": draw(E, H, I, seed=2),
    }
    folder = write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    with pytest.raises(CheckpointError, match=r"gate_up_proj\[0\]: shape \[48, 41\].*want \[48, 40\] or \[40, 48\]"):
        open_checkpoint(folder).load(0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tensor_that_nobody_reads_is_refused(write_checkpoint: Write, tmp_path: Path, fused: bool) -> None:
    """It may matter: read without it the numbers could be others."""
    at = "model.layers.0.mlp.experts"
    if fused:
        tensors = {f"{at}.gate_up_proj": draw(E, 2 * I, H, seed=1), f"{at}.down_proj": draw(E, H, I, seed=2)}
        tensors[f"{at}.down_proj_amount"] = draw(E, H, seed=3)
    else:
        sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
        tensors = {f"{at}.{e}.{n}.weight": draw(*s, seed=e) for e in range(E) for n, s in sizes.items()}
        tensors[f"{at}.1.down_proj.weight_amount"] = draw(H, seed=3)
    folder = write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    with pytest.raises(CheckpointError, match=r"down_proj.*fits no known format.*amount' is not known"):
        open_checkpoint(folder).load(0)


def test_an_expert_of_three_dimensions_is_refused(write_checkpoint: Write, tmp_path: Path) -> None:
    sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I, 1)}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{n}.weight": draw(*s, seed=e) for e in range(E) for n, s in sizes.items()
    }
    folder = write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    with pytest.raises(CheckpointError, match=r"0\.down_proj\.weight: shape \[40, 24, 1\].*want two dimensions"):
        open_checkpoint(folder).load(0)


def test_dtypes_that_differ_between_experts_are_widened(write_checkpoint: Write, tmp_path: Path) -> None:
    sizes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{n}.weight": draw(
            *s, seed=e, dtype=torch.float16 if e == 1 else torch.bfloat16
        )
        for e in range(E)
        for n, s in sizes.items()
    }
    source = open_checkpoint(write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I))
    assert source.info(0).w2.name == "f32"
    w = source.load(0, [1, 2])
    assert torch.equal(w.w2.codes[0], tensors["model.layers.0.mlp.experts.1.down_proj.weight"].float())


def test_relu2_without_a_gate(write_checkpoint: Write, tmp_path: Path) -> None:
    """Nemotron-H: up and down only; one of the names is another family's fused one."""
    up, down = draw(E, I, H, seed=1), draw(E, H, I, seed=2)
    tensors: dict[str, Any] = {}
    for e in range(E):
        tensors[f"backbone.layers.4.mixer.experts.{e}.up_proj.weight"] = up[e]
        tensors[f"backbone.layers.4.mixer.experts.{e}.down_proj.weight"] = down[e]
    folder = write_checkpoint(
        tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type="nemotron_h", n_routed_experts=E
    )
    w = open_checkpoint(folder).load(4)
    assert w.activation.name == "relu2"
    assert torch.equal(w.w13.codes, up)
    assert torch.equal(w.w2.codes, down)
