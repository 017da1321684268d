"""`expertctl strip`: every tensor but those of experts, byte by byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from expertctl import cli
from expertd_client.engines.strip import is_expert, is_quantized, strip, tensor_names
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.families import FAMILIES

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SHARDED = FIXTURES / "bf16-sharded-qwen3moe1l"
NEVER = (
    "gate.weight",
    "gate.e_score_correction_bias",
    "shared_experts.gate_proj.weight",
    "shared_expert.up_proj.weight",
)


def blocks():
    """(family, where its experts hang, what they are called there)"""
    for family in FAMILIES:
        for block in family.blocks:
            for name in {n for names in family.names for n in names if n}:
                yield family.name, block, f"7.{name}.weight"
            for name in {n for names in family.fused for n in names}:
                yield family.name, block, name


@pytest.mark.parametrize("family", [f.name for f in FAMILIES])
def test_experts_of_every_family_are_known_by_name(family):
    for _, block, name in (b for b in blocks() if b[0] == family):
        if block.endswith("experts") or "linear" in name:
            assert is_expert(f"model.layers.3.{block}.{name}"), (block, name)
            assert is_expert(f"model.layers.3.{block}.{name}_scale_inv") or "linear" in name
        for other in NEVER:
            assert not is_expert(f"model.layers.3.{block.removesuffix('.experts')}.{other}"), (block, other)


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda p: p.name)
def test_what_a_server_reads_is_what_is_left_out(folder):
    source = open_checkpoint(folder)
    recipes = [source.recipe(layer) for layer in source.layers]
    pieces = [piece for recipe in recipes for expert in recipe.pieces for piece in expert.values()]
    served = {t.name.partition("[")[0] for piece in pieces for t in piece.unit.tensors.values()}
    names = tensor_names(folder)
    # What a reader needs not (g_idx in order, a static input scale, transformers' own fused scales) goes all the same.
    left_out = {name for name in names if is_expert(name)}
    assert served <= left_out
    projections = re.compile(r"\.experts\.(?:\d+\.)?(?:(?:gate_up|gate|up|down)_proj|w[123]\b)")
    assert all(projections.search(name) for name in left_out)
    assert len(names) > len(left_out)


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda p: p.name)
def test_attention_decides_what_config_says_of_quantization(folder, tmp_path):
    done = strip(folder, tmp_path / "out")
    left = [name for name in tensor_names(folder) if not is_expert(name)]
    attention = {name.rpartition(".")[2] for name in left if "self_attn" in name}
    assert done.plain == (not is_quantized(left)) == (attention <= {"weight", "bias", "sinks"})
    config = json.loads((tmp_path / "out/config.json").read_text())
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == (quantized and not done.plain)


def test_every_other_tensor_and_file_is_copied(tmp_path):
    out = tmp_path / "out"
    done, kept = strip(SHARDED, out), {}
    for path in SHARDED.glob("model*.safetensors"):
        kept.update({n: t for n, t in load_file(path).items() if not is_expert(n)})
    found = {}
    for path in out.glob("*.safetensors"):
        found.update(load_file(path))
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert found.keys() == kept.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in kept.items())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == kept.keys()
    assert (
        set(index["weight_map"].values())
        == set(done.files)
        == {p.name for p in (tmp_path / "out").glob("*.safetensors")}
    )
    assert index["metadata"]["total_size"] == done.tensor_bytes == sum(t.nbytes for t in kept.values())
    assert (tmp_path / "out/generation_config.json").exists()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((SHARDED / "config.json").read_text())


def made(folder, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"quantization_config": {}, "text_config": {"quantization_config": {}, "a": 1}}'
    )
    save_file(tensors, folder / "model.safetensors")
    return folder


EXPERT, OTHER = "model.layers.0.mlp.experts.0.up_proj.weight", "model.norm.weight"


def test_one_file_stays_one_file_and_progress_ends_at_all(tmp_path):
    source = made(
        tmp_path / "in", {EXPERT: torch.ones(64), OTHER: torch.arange(5.0), "model.z": torch.ones(3, dtype=torch.uint8)}
    )
    told = []
    strip(source, tmp_path / "out", lambda done, total: told.append((done, total)))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[OTHER], torch.arange(5.0))
    assert told[-1] == (23, 23)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"text_config": {"a": 1}}


def test_what_cannot_be_stripped_is_refused(tmp_path):
    dense = made(tmp_path / "dense", {OTHER: torch.ones(2)})
    with pytest.raises(ValueError, match="dense: got no tensor of experts"):
        strip(dense, tmp_path / "out")
    with pytest.raises(ValueError, match="dense: is not empty"):
        strip(SHARDED, dense)
    with pytest.raises(ValueError, match=r"got no config\.json"):
        strip(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["cut", "length", "header"])
def test_a_damaged_file_is_named(tmp_path, damage):
    source = made(tmp_path / "in", {EXPERT: torch.ones(64), OTHER: torch.ones(64)})
    file = source / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(
        {"cut": data[:-8], "length": b"\xff" * 7 + data[7:], "header": data[:9] + b"x" + data[10:]}[damage]
    )
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        strip(source, tmp_path / "out")


def test_the_command_says_what_it_left_out(tmp_path, capsys):
    assert cli.main(["strip", str(SHARDED), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"left out: 24 tensors of experts, \d+\.\d MiB", said)
    assert cli.main(["strip", str(SHARDED), str(tmp_path / "more"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 24
    assert cli.main(["strip", str(SHARDED), str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err
