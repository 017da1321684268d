"""Checkpoints with one thing changed are refused by name, or give the same numbers (mutate.py says how it is judged).

Here: a few changes of each kind for each fixture of this repository, and those that were served with wrong numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mutate import FOLDERS, KINDS, mutations, run
from mutations import NOT_NUMBERS, Raw, Tensor, stored

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_server.boot.assignment import BootError, assign_layers, open_source
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig

OWN = sorted(p.parent for p in FOLDERS[0].glob("*/config.json"))
MOST = 20
"""Changes of each kind and fixture: half a minute in all."""


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name)
def test_no_change_is_accepted_with_other_numbers(path: Path, tmp_path: Path) -> None:
    verdicts = list(run(path, KINDS, MOST, tmp_path))
    assert len(verdicts) > 5 * len(KINDS)
    assert [f"{v.outcome}: {v.mutation}: {v.text}" for v in verdicts if v.wrong] == []


Change = Callable[[Raw], object]
EXPERTS = "model.layers.0.mlp.experts"


def drop(name: str) -> Change:
    return lambda raw: raw.tensors.pop(f"{EXPERTS}.{name}")


def put(name: str, what: str) -> Change:
    """The tensor's first number becomes NaN or inf."""

    def change(raw: Raw) -> None:
        t = raw.tensors[f"{EXPERTS}.{name}"]
        pattern = NOT_NUMBERS[t.dtype][what]
        raw.tensors[f"{EXPERTS}.{name}"] = Tensor(t.dtype, t.shape, pattern + t.data[len(pattern) :])

    return change


def add(name: str, dtype: str) -> Change:
    """One more tensor, a single one."""
    return lambda raw: raw.tensors.update({f"{EXPERTS}.{name}": stored(np.ones(()), dtype)})


def say(key: str, value: object) -> Change:
    return lambda raw: raw.json["config.json"].update({key: value})


GPTQ = "gptq-w4-g32-sym-descact-true-qwen3moe1l"
CT = "ct-old-w4a16-g64-sym-gptq-actorder-group-gidx-qwen3moe1l"
GPT_OSS = "mxfp4-oai-modelopt-gptoss-ns"
MIXED = "awq-gemm-w4-g64-gateunquant-autoawq-qwen3moe1l"
STATIC = "ct-fp8-static-tensor-qwen3moe1l"

ONCE_SILENT: dict[str, tuple[str, Change, str]] = {
    "GPTQ without one order": (GPTQ, drop("3.up_proj.g_idx"), r"3\.up_proj: tensor 'g_idx' is missing"),
    "compressed-tensors without one order": (
        CT,
        drop("3.up_proj.weight_g_idx"),
        r"3\.up_proj: tensor 'weight_g_idx' is missing",
    ),
    "gpt-oss without biases of w13": (GPT_OSS, drop("gate_up_proj_bias"), r"experts\.gate_up_proj.*bias.*missing"),
    "gpt-oss without biases of w2": (GPT_OSS, drop("down_proj_bias"), r"experts\.down_proj.*bias.*missing"),
    "second-level scale infinite": (
        "ct-nvfp4a16-qwen3moe1l",
        put("2.down_proj.weight_global_scale", "inf"),
        r"2\.down_proj\.weight_global_scale: a scale is NaN or infinite",
    ),
    "more experts a token than there are": (
        GPTQ,
        say("num_experts_per_tok", 1000),
        r"config\.json: num_experts_per_tok is 1000, want at most the 8 experts",
    ),
    "NaN scale in a layer that is widened": (
        MIXED,
        put("1.up_proj.scales", "NaN"),
        r"1\.up_proj: a weight \(or its scale\) is NaN or infinite: row 128, column \d+ of w13",
    ),
    "NaN code of e4m3": (
        "hf-fp8-block128-qwen3moe1l",
        put("7.down_proj.weight", "NaN"),
        r"7\.down_proj: a weight .* is NaN or infinite: row 0, column 0 of w2",
    ),
    "negative NaN code of e4m3": (STATIC, put("7.gate_proj.weight", "-NaN"), r"7\.gate_proj: a weight .* is NaN"),
    "NaN weight of bf16": ("bf16-sharded-qwen3moe1l", put("0.gate_proj.weight", "NaN"), r"0\.gate_proj: a weight"),
    "one static scale missing": (STATIC, drop("4.up_proj.input_scale"), r"4\.up_proj: tensor 'input_scale' is missing"),
    "static scale infinite": (STATIC, put("4.up_proj.input_scale", "inf"), r"4\.up_proj\.input_scale: a scale is NaN"),
    "a second-level scale for one alone": (
        STATIC,
        add("4.up_proj.weight_global_scale", "F32"),
        r"4\.up_proj: fits no known format.*'weight_global_scale' is not known",
    ),
}


@pytest.mark.parametrize("what", ONCE_SILENT)
def test_what_was_served_with_wrong_numbers_is_refused_by_name(
    what: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    fixture, change, says = ONCE_SILENT[what]
    raw = Raw.of(checkpoint_folder(fixture))
    change(raw)
    raw.write(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path).load(0)


def test_the_boot_blames_the_checkpoint_and_not_a_backend(tmp_path: Path) -> None:
    raw = Raw.of(FOLDERS[0] / "hf-fp8-block128-qwen3moe1l")
    put("7.down_proj.weight", "NaN")(raw)
    raw.write(tmp_path)
    config = ServeConfig(checkpoint=tmp_path, device="cpu")
    source = open_source(config)
    assignments = assign_layers(config, source, detect_device("cpu"), installed_packages(BACKENDS))
    with pytest.raises(BootError, match=r"7\.down_proj: a weight .* is NaN") as error:
        boot_layers(assignments, Workshop(source, torch.device("cpu")))
    assert "--backend" not in str(error.value)


def test_every_tensor_of_an_expert_is_taken_away() -> None:
    """A tool that changes nothing would find nothing: the changes are there, and each is a change."""
    raw = Raw.of(OWN[0])
    names = [n for n in raw.tensors if ".experts." in n]
    removed = [m for m in mutations(raw, names, ["remove"], None) if m.kind == "remove"]
    assert sorted(m.subject for m in removed) == sorted(names)
    before = json.dumps(raw.json), dict(raw.tensors)
    for m in mutations(raw, names, KINDS, 30):
        changed = raw.copy()
        m.change(changed)
        assert (json.dumps(changed.json), changed.tensors) != before, str(m)
    assert (json.dumps(raw.json), raw.tensors) == before
