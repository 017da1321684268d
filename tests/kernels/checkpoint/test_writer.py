"""`expertd quantize`: what is written is read back bit for bit, nothing else changes, refusals come before writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd_kernels import Weights
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.writer import quantize_checkpoint
from expertd_kernels.weights.quantize import quantize, scheme_named
from expertd_server.commands.cli import main

Config = dict[str, Any]
QWEN: Config = {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "hidden_size": 96,
    "moe_intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
GPTOSS: Config = {
    "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 96,
    "intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": "silu",
}  # fmt: skip
SCHEMES = [
    "int4_g32", "int4_g32_zp", "int4_channel", "int4_channel_zp", "int8_channel", "int8_g32", "int8_channel_zp",
    "e4m3_block128", "e4m3_channel", "mxfp8", "mxfp4", "nvfp4",
]  # fmt: skip


def random_tensors(names_and_shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {n: (torch.randn(s, generator=g) / 8).bfloat16() for n, s in names_and_shapes.items()}


def others(layer: int, block: str) -> dict[str, tuple[int, ...]]:
    """What a layer holds beside its experts."""
    at = f"model.layers.{layer}"
    return {f"{at}.{block}.weight": (3, 96), f"{at}.self_attn.q_proj.weight": (96, 96), f"{at}.norm.weight": (96,)}


def per_expert(E: int = 3, H: int = 96, I: int = 64) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8, H), "lm_head.weight": (8, H)}
    for layer in (0, 1):
        out |= others(layer, "mlp.gate")
        for e in range(E):
            at = f"model.layers.{layer}.mlp.experts.{e}"
            out |= {f"{at}.gate_proj.weight": (I, H), f"{at}.up_proj.weight": (I, H), f"{at}.down_proj.weight": (H, I)}
    return out


def fused() -> dict[str, tuple[int, ...]]:
    """transformers' own layout of Qwen3-MoE in memory."""
    out: dict[str, tuple[int, ...]] = {}
    for layer in (0, 1):
        at = f"model.layers.{layer}.mlp.experts"
        out |= others(layer, "mlp.gate") | {f"{at}.gate_up_proj": (3, 128, 96), f"{at}.down_proj": (3, 96, 64)}
    return out


def gptoss() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {}
    for layer in (0, 1):
        at = f"model.layers.{layer}.mlp.experts"
        out |= others(layer, "mlp.router")
        out |= {f"{at}.gate_up_proj": (3, 96, 128), f"{at}.down_proj": (3, 64, 96)}
        out |= {f"{at}.gate_up_proj_bias": (3, 128), f"{at}.down_proj_bias": (3, 96)}
    return out


LAYOUTS = {"per expert": (QWEN, per_expert), "fused": (QWEN, fused), "gpt-oss": (GPTOSS, gptoss)}


def make(folder: Path, layout: str) -> dict[str, Tensor]:
    config, shapes = LAYOUTS[layout]
    tensors = random_tensors(shapes())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


def same(a: Weights, b: Weights) -> None:
    for x, y in ((a.w13, b.w13), (a.w2, b.w2)):
        assert x.scheme == y.scheme
        assert dict(x.tensors()).keys() == dict(y.tensors()).keys()
        for field, t in x.tensors():
            assert torch.equal(t.view(torch.uint8), getattr(y, field).view(torch.uint8)), field


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_written_weights_are_read_back_bit_for_bit(tmp_path: Path, layout: str, scheme: str) -> None:
    tensors = make(tmp_path / "src", layout)
    source = open_checkpoint(tmp_path / "src")
    calls: list[tuple[int, int]] = []
    summary = quantize_checkpoint(
        source, tmp_path / "dst", scheme_named(scheme), progress=lambda a, b: calls.append((a, b))
    )
    written = open_checkpoint(tmp_path / "dst")
    assert written.layers == source.layers == (0, 1)
    for layer in source.layers:
        same(quantize(source.load(layer), scheme), written.load(layer))
    assert calls == [(3, 6), (6, 6)]
    assert set(summary.errors) == {0, 1}
    assert all(0 < e < 0.2 for pair in summary.errors.values() for e in pair)
    after = load_file(tmp_path / "dst" / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".experts" not in n}
    assert all(torch.equal(after[n], t) for n, t in kept.items())
    wide = {n for n, t in after.items() if ".experts" in n and t.dtype is torch.bfloat16}
    assert all(n.endswith(("bias", "weight_scale")) for n in wide)  # no expert's matrix is left as it was
    assert (tmp_path / "dst" / "tokenizer.json").exists()


FORMS = {
    ("per expert", "int4_g32"): ("compressed-tensors", "mlp.experts.0.gate_proj.weight_packed", torch.int32, (64, 12)),
    ("gpt-oss", "int4_g32"): ("compressed-tensors", "mlp.experts.0.up_proj.bias", torch.bfloat16, (64,)),
    ("per expert", "e4m3_block128"): ("fp8", "mlp.experts.2.down_proj.weight_scale_inv", torch.float32, (1, 1)),
    ("gpt-oss", "mxfp4"): ("mxfp4", "mlp.experts.gate_up_proj_blocks", torch.uint8, (3, 128, 3, 16)),
    ("fused", "mxfp4"): ("compressed-tensors", "mlp.experts.1.up_proj.weight_scale", torch.uint8, (64, 3)),
    ("fused", "nvfp4"): ("modelopt", "mlp.experts.1.up_proj.weight_scale_2", torch.float32, ()),
}


@pytest.mark.parametrize(("layout", "scheme"), FORMS)
def test_names_and_types_are_those_of_the_format(tmp_path: Path, layout: str, scheme: str) -> None:
    make(tmp_path / "src", layout)
    quantize_checkpoint(open_checkpoint(tmp_path / "src"), tmp_path / "dst", scheme_named(scheme))
    method, name, dtype, shape = FORMS[layout, scheme]
    t = load_file(tmp_path / "dst" / "model.safetensors")[f"model.layers.1.{name}"]
    assert (t.dtype, tuple(t.shape)) == (dtype, shape)
    quant = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert quant["quant_method"] == method
    left = quant.get("ignore", quant.get("modules_to_not_convert"))
    assert "lm_head" in left or layout == "fused" or layout == "gpt-oss"
    assert not any(".experts." in name for name in left)
    if method != "mxfp4":
        assert "model.layers.0.self_attn.q_proj" in left
        assert "model.layers.0.norm" not in left


def test_shards_and_their_index(tmp_path: Path) -> None:
    make(tmp_path / "src", "per expert")
    source = open_checkpoint(tmp_path / "src")
    limit = 20_000
    summary = quantize_checkpoint(source, tmp_path / "dst", scheme_named("int4_g32"), shard_bytes=limit)
    assert len(summary.files) > 3
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    size = 0
    for file in summary.files:
        part = load_file(tmp_path / "dst" / file)
        size += (n := sum(t.numel() * t.element_size() for t in part.values()))
        assert n <= limit or len(part) == 1
        found |= dict.fromkeys(part, file)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == size
    assert sorted(p.name for p in (tmp_path / "dst").glob("*.safetensors")) == summary.files
    same(quantize(source.load(1), "int4_g32"), open_checkpoint(tmp_path / "dst").load(1))


def test_refusals_come_before_anything_is_written(tmp_path: Path) -> None:
    make(tmp_path / "src", "per expert")
    source = open_checkpoint(tmp_path / "src")
    with pytest.raises(ValueError, match="96 columns are no multiple of the group of 64"):
        quantize_checkpoint(source, tmp_path / "dst", scheme_named("int4_g64"))
    with pytest.raises(ValueError, match="no format that other tools read"):
        quantize_checkpoint(source, tmp_path / "dst", scheme_named("e4m3_block64x32"))
    assert not (tmp_path / "dst").exists()
    quantize_checkpoint(source, tmp_path / "dst", scheme_named("int8"))
    with pytest.raises(ValueError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "dst", scheme_named("int8"))
    with pytest.raises(ValueError, match=r"is quantized already \(compressed-tensors\)"):
        quantize_checkpoint(open_checkpoint(tmp_path / "dst"), tmp_path / "other", scheme_named("int8"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "src", "gpt-oss")
    src, dst = str(tmp_path / "src"), str(tmp_path / "dst")
    assert main(["quantize", src, dst, "--scheme", "mxfp4", "--shard-gib", "0.00001"]) == 0
    said = capsys.readouterr().out
    assert "6 experts of 2 layers in mxfp4 (gpt-oss-mxfp4)" in said
    assert "largest relative error" in said
    assert len(list(Path(dst).glob("model-*.safetensors"))) > 1
    assert main(["verify", "--checkpoint", dst, "--backend", "reference", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(r["layer"], r["scheme"], r["backend"]) for r in layers] == [(n, "mxfp4", "reference") for n in (0, 1)]
    assert main(["quantize", src, dst, "--scheme", "mxfp4"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["quantize", src, str(tmp_path / "x"), "--scheme", "int5"]) == 2
    assert main(["quantize", src, str(tmp_path / "x"), "--scheme", "int8", "--shard-gib", "0"]) == 2


def test_nan_is_named_with_its_layer(tmp_path: Path) -> None:
    tensors = make(tmp_path / "src", "per expert")
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][5, 6] = float("nan")
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\..*\.2\.down_proj: a weight .* is NaN .*: row 5, column 6 of w2"):
        quantize_checkpoint(open_checkpoint(tmp_path / "src"), tmp_path / "dst", scheme_named("int8"))
    assert not (tmp_path / "dst" / "config.json").exists()
