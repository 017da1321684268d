"""Families, names and templates: where experts are looked for, and what is never taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.families import FAMILIES

E, H, I = 2, 16, 8
SHAPES = {"gate": (I, H), "up": (I, H), "down": (H, I)}

Write = Callable[..., Path]


def experts(template: str, names: dict[str, str], layers: tuple[int, ...] = (1,)) -> Iterator[tuple[str, Tensor]]:
    """Unquantized experts under a template; values tell layer, expert and projection apart."""
    for layer in layers:
        for e in range(E):
            for i, (projection, shape) in enumerate(SHAPES.items()):
                if names.get(projection):
                    name = template.format(layer=layer, expert=e, proj=names[projection])
                    yield f"{name}.weight", torch.full(shape, 100.0 * layer + 10 * e + i)


LLAMA = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}


def assert_experts(folder: Path, layer: int = 1, **options: Any) -> None:
    w = open_checkpoint(folder, **options).load(layer)
    for e in range(E):
        gate, up = w.w13.codes[e].chunk(2)
        for i, got in enumerate((gate, up, w.w2.codes[e])):
            assert torch.equal(got, torch.full_like(got, 100.0 * layer + 10 * e + i))


def config_of(family: Any, model_type: str) -> dict[str, Any]:
    """A config.json that uses the family's own keys."""
    return {
        "model_type": model_type,
        "hidden_size": H,
        family.intermediate[0]: I,
        family.num_experts[0]: E,
        family.top_k[0]: 2,
        "num_hidden_layers": 4,
    }


CASES = [
    (f, kind, block, names)
    for f in FAMILIES
    for kind in f.model_types
    for block in f.blocks
    for names in f.names
    if not (f.name == "granitemoe" and block == "block_sparse_moe")  # fused only, see below
]


@pytest.mark.parametrize(("family", "model_type", "block", "names"), CASES, ids=lambda v: str(getattr(v, "name", v)))
def test_every_row_of_the_table_finds_its_experts(
    tmp_path: Path, write_checkpoint: Write, family: Any, model_type: str, block: str, names: tuple[str, str, str]
) -> None:
    called = dict(zip(("gate", "up", "down"), names, strict=True))
    tensors = dict(experts(f"model.layers.{{layer}}.{block}.{{expert}}.{{proj}}", called))
    if family.bias:
        tensors |= {n.replace(".weight", ".bias"): torch.zeros(len(t)) for n, t in tensors.items()}
    router = block.rpartition(".")[0] + ".gate.weight"
    tensors |= {f"model.layers.1.{router}": torch.ones(E, H), f"model.layers.1.{block}.e_score": torch.ones(E)}
    for name, shape in SHAPES.items():
        if called[name]:
            tensors[f"model.layers.1.mlp.shared_experts.{called[name]}.weight"] = torch.ones(shape)
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    (tmp_path / "config.json").write_text(json.dumps(config_of(family, model_type)))
    source = open_checkpoint(tmp_path)
    info = source.info(1)
    assert source.family == family.name
    assert (source.layers, info.num_experts, info.top_k) == ((1,), E, 2)
    assert (info.hidden_size, info.intermediate_size) == (H, I)
    assert any(note.startswith("left alone: ") and "router" in note for note in info.notes)
    if info.activation.gated:
        assert_experts(tmp_path)


def test_granite_fuses_under_names_of_its_own(tmp_path: Path, write_checkpoint: Write) -> None:
    tensors = {
        "model.layers.0.block_sparse_moe.input_linear.weight": torch.randn(E, 2 * I, H),
        "model.layers.0.block_sparse_moe.output_linear.weight": torch.randn(E, H, I),
        "model.layers.0.block_sparse_moe.router.layer.weight": torch.randn(E, H),
    }
    write_checkpoint(
        tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type="granitemoe", intermediate_size=I
    )
    w = open_checkpoint(tmp_path).load(0)
    assert torch.equal(w.w13.codes, tensors["model.layers.0.block_sparse_moe.input_linear.weight"])
    assert torch.equal(w.w2.codes, tensors["model.layers.0.block_sparse_moe.output_linear.weight"])


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_any_prefix_before_layers(tmp_path: Path, write_checkpoint: Write, prefix: str) -> None:
    """Multimodal models nest the language model, and its config under text_config."""
    tensors = dict(experts(prefix + "layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA))
    tensors |= dict(experts("mtp.layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA))
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": text}))
    assert_experts(tmp_path)


def test_layers_beyond_the_models_own_are_left_alone_and_said_so(tmp_path: Path, write_checkpoint: Write) -> None:
    tensors = dict(experts("model.layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA, (1, 2, 4)))
    write_checkpoint(
        tmp_path,
        tensors,
        experts=E,
        hidden=H,
        intermediate=I,
        model_type="deepseek_v3",
        num_hidden_layers=4,
        first_k_dense_replace=1,
    )
    source = open_checkpoint(tmp_path)
    assert source.layers == (1, 2)
    notes = source.info(1).notes
    assert any("layers 4, beyond the model's own" in note for note in notes)
    assert any("config.json says that layers 3 have experts too" in note for note in notes)


def test_an_unknown_family_lists_the_known_ones_and_names_the_remedy(tmp_path: Path, write_checkpoint: Write) -> None:
    tensors = dict(experts("net.blocks.{layer}.moe.{expert}.{proj}", LLAMA))
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type="my_moe", hidden_act="silu")
    with pytest.raises(CheckpointError, match=r"'my_moe' is no known family.*gpt_oss.*qwen3_moe.*--layer-template"):
        open_checkpoint(tmp_path)
    assert_experts(tmp_path, layer_template="net.blocks.{layer}.moe.{expert}.{proj}")
    source = open_checkpoint(tmp_path, "net.blocks.{layer}.moe.{expert}.{proj}")
    assert (source.family, source.info(1).activation.name) == ("my_moe", "silu_and_mul")


@pytest.mark.parametrize(
    ("names", "spelled"),
    [
        (W123, "{proj}"),
        ({"gate": "gate", "up": "up", "down": "down"}, "{proj}"),
        ({"gate": "a", "up": "b", "down": "c"}, "{proj:a,b,c}"),
    ],
)
def test_templates_name_projections(
    tmp_path: Path, write_checkpoint: Write, names: dict[str, str], spelled: str
) -> None:
    tensors = dict(experts("x.{layer}.ex[{expert}].{proj}", names))
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type="my_moe", hidden_act="silu")
    assert_experts(tmp_path, layer_template="x.{layer}.ex[{expert}]." + spelled)


def test_a_template_without_expert_is_fused(tmp_path: Path, write_checkpoint: Write) -> None:
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    tensors = {"b.0.moe.w_in": gate_up, "b.0.moe.w_out": down}
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I, model_type="my_moe", hidden_act="gelu")
    source = open_checkpoint(tmp_path, "b.{layer}.moe.{proj:w_in,w_out}")
    assert source.info(0).activation.name == "gelu_and_mul"
    assert torch.equal(source.load(0).w13.codes, gate_up)


def test_a_template_overrules_a_known_family(tmp_path: Path, write_checkpoint: Write) -> None:
    """Two networks in one file: the table's pattern finds both and refuses, the template says which."""
    tensors = dict(experts("model.layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA))
    tensors |= {k.replace("model.", "student."): t + 1000 for k, t in tensors.items()}
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    with pytest.raises(CheckpointError, match=r"two tensors for one place; say with --layer-template"):
        open_checkpoint(tmp_path)
    assert_experts(tmp_path, layer_template="model.layers.{layer}.mlp.experts.{expert}.{proj}")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("model.layers.3.mlp.{expert}.{proj}", r"want one \{layer\}"),
        ("model.layers.{layer}.mlp.{expert}", r"and \{proj\}"),
        ("a.{layer}.{expert}.{expert}.{proj}", r"at most one \{expert\}"),
        ("a.{layer}.{expert}.{proj:x}", r"1 names of projections, want \[2, 3\]"),
        ("a.{layer}.{expert}.{proj}", r"no experts among its 6 tensors"),
    ],
)
def test_templates_that_make_no_sense(tmp_path: Path, write_checkpoint: Write, template: str, says: str) -> None:
    tensors = dict(experts("model.layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA))
    write_checkpoint(tmp_path, tensors, experts=E, hidden=H, intermediate=I)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path, template)


def test_activations_go_by_family_and_not_by_hidden_act(tmp_path: Path, write_checkpoint: Write) -> None:
    tensors = dict(experts("model.layers.{layer}.mlp.experts.{expert}.{proj}", LLAMA))
    biases = {n.replace(".weight", ".bias"): torch.zeros(len(t)) for n, t in tensors.items()}

    def activation(model_type: str, **config: Any) -> str:
        folder = tmp_path / f"{model_type}{len(list(tmp_path.iterdir()))}"
        sizes = {"experts": E, "hidden": H, "intermediate": I, "n_routed_experts": E, "moe_intermediate_size": I}
        named = tensors | (biases if model_type == "gpt_oss" else {})
        write_checkpoint(folder, named, model_type=model_type, **sizes, **config)
        a = open_checkpoint(folder).info(1).activation
        return f"{a.name} {a.limit} {a.alpha if a.name == 'swigluoai' else ''}".strip()

    assert activation("gpt_oss", hidden_act="silu") == "swigluoai 7.0 1.702"
    assert activation("gpt_oss", swiglu_limit=5.0, swiglu_alpha=1.5) == "swigluoai 5.0 1.5"
    assert activation("deepseek_v4", swiglu_limit=8.0) == "silu_and_mul_limit8 8.0"
    assert activation("deepseek_v3", hidden_act="gelu") == "silu_and_mul None"
