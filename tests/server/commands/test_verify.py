"""`expertd verify`: passes right checkpoints of every family, and says by its exit code what is wrong with others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from expertd_server.commands.cli import main

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NAMES = sorted(p.name for p in FIXTURES.iterdir() if (p / "expected.safetensors").is_file())
CT = "ct-w4a16-g128-sym-qwen3moe1l"
FP8 = "ct-fp8-static-tensor-qwen3moe1l"


def verify(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", "--checkpoint", str(folder), "--json", *flags])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


@pytest.mark.parametrize("name", NAMES)
def test_float32_compute_is_within_2e_3(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, FIXTURES / name, "--compute-dtype", "float32")
    assert code == 0, found
    assert {"layer", "scheme", "backend", "relative_error"} <= found["layers"][0].keys()
    assert [c["case"] for c in found["expected"]] == ["M1", "M5", "M33"]
    for row in (*found["layers"], *found["expected"]):
        assert 0 <= row["relative_error"] <= 2e-3
        assert row["tolerance"] == 2e-3
    assert all(r["experts_compared"] == r["experts"] > 0 and r["bytes_read"] > 0 for r in found["layers"])


@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_bf16_within_1e_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, FIXTURES / name)
    assert code == 0, found
    assert all(0 < row["relative_error"] <= 1e-2 for row in (*found["layers"], *found["expected"]))


def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--checkpoint", str(FIXTURES / CT), "--backend", "reference"]) == 0
    said = capsys.readouterr().out
    for word in ("int4_g128", "reference", "tolerance", "M33", "expected", "ok"):
        assert word in said
    assert "FAILED" not in said


def copied(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to / name)
    return to / name


def change(path: Path, tensor: str, factor: float) -> None:
    """Multiply one tensor of a safetensors file."""
    with safe_open(path, "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - safe_open is no mapping
        metadata = f.metadata()
    tensors[tensor] = (tensors[tensor].float() * factor).to(tensors[tensor].dtype)
    save_file(tensors, path, metadata)


def test_wrong_answers_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(CT, tmp_path)
    change(folder / "expected.safetensors", "M5.expected", 1.03)
    code, found = verify(capsys, folder)
    assert code == 1
    assert [c["ok"] for c in found["expected"]] == [True, False, True]
    assert found["expected"][1]["relative_error"] == pytest.approx(0.03, rel=0.3)
    assert found["layers"][0]["ok"]


def test_changed_weights_fail_against_the_answers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference computes on the weights that are there; given answers know what should be there."""
    folder = copied(CT, tmp_path)
    change(folder / "model.safetensors", "model.layers.0.mlp.experts.3.down_proj.weight_scale", 1.5)
    code, found = verify(capsys, folder)
    assert code == 1
    assert found["layers"][0]["ok"]
    assert not found["expected"][2]["ok"]


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(CT, tmp_path)
    change(folder / "model.safetensors", "model.layers.0.mlp.experts.3.down_proj.weight_scale", float("nan"))
    code, found = verify(capsys, folder)
    assert code == 1
    assert found["layers"][0]["relative_error"] is None
    assert "experts.3.down_proj.weight_scale" in found["layers"][0]["fault"]
    (folder / "model.safetensors").write_bytes(b"short")
    assert main(["verify", "--checkpoint", str(folder)]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert main(["verify", "--checkpoint", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_broken_answers_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(CT, tmp_path)
    save_file({"M5.expected": torch.ones(5, 4)}, folder / "expected.safetensors", {"layer": "0"})
    assert main(["verify", "--checkpoint", str(folder)]) == 2
    assert "M<m>.hidden_states" in capsys.readouterr().err


def test_a_pinned_backend_that_refuses_fails_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, FIXTURES / CT, "--backend", "gluon_sm90")
    assert code == 1
    assert found["layers"][0]["backend"] is None
    assert "sm90" in found["layers"][0]["fault"]


def test_some_experts_are_checked_without_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--checkpoint", str(FIXTURES / CT), "--experts", "2-5", "--json"]) == 0
    got = capsys.readouterr()
    found = json.loads(got.out)
    assert found["expected"] == []
    assert found["layers"][0]["experts"] == 4
    assert "not compared" in got.err


def test_bounded_reference(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, FIXTURES / CT, "--reference-experts", "2")
    assert code == 0
    assert found["layers"][0]["experts_compared"] == 2
    assert main(["verify", "--checkpoint", str(FIXTURES / CT), "--reference-experts", "0"]) == 2


def test_quantizing_at_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers are those of the stored weights, so they are not compared with weights that were rounded at load."""
    config = {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 64,
              "moe_intermediate_size": 32, "num_hidden_layers": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    at = "model.layers.0.mlp.experts"
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    save_file(
        {f"{at}.{e}.{p}.weight": torch.randn(s).bfloat16() for e in (0, 1) for p, s in shapes.items()},
        tmp_path / "model.safetensors",
    )
    for scheme, name in (("int8", "int8_channel"), ("fp8_block128", "e4m3_block128"), ("mxfp4", "mxfp4")):
        code, found = verify(capsys, tmp_path, "--quantize", scheme, "--backend", "reference")
        assert code == 0, found
        assert found["layers"][0]["scheme"] == name
        assert found["layers"][0]["quantization_error"].keys() == {"w13", "w2"}
    assert main(["verify", "--checkpoint", str(FIXTURES / CT), "--quantize", "int8"]) == 2
    assert "int4_g128 already" in capsys.readouterr().err


def test_what_quantizing_changed_is_what_quantize_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of the backend says nothing about it: the reference computes with the quantized weights."""
    folder = FIXTURES / "bf16-sharded-qwen3moe1l"
    assert main(["quantize", str(folder), str(tmp_path / "q"), "--scheme", "int4_g128"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    flags = ["--quantize", "int4_g128", "--backend", "reference"]
    assert main(["verify", "--checkpoint", str(folder), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said
    code, found = verify(capsys, folder, *flags)
    assert code == 0
    layer = found["layers"][0]
    assert all(f"{name} {layer['quantization_error'][name]:.4f}" in said for name in ("w13", "w2"))
    assert min(layer["quantization_error"].values()) > 10 * layer["relative_error"]
    whole = verify(capsys, folder, "--backend", "reference")[1]["layers"][0]
    assert whole["quantization_error"] is None
    half = verify(capsys, folder, *flags, "--shard", "1/2")[1]["layers"][0]
    assert half["quantization_error"] != layer["quantization_error"], "of another expert"
    assert (layer["bytes_read"], half["bytes_read"]) == (whole["bytes_read"], whole["bytes_read"] // 2)


def test_rounded_activations_are_compared_with_rounded_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine whose backends do not round activations that way, asking for it fails and says so."""
    code, found = verify(capsys, FIXTURES / FP8, "--activations", "checkpoint")
    if found["layers"][0]["backend"] is None:
        assert code == 1
        assert "e4m3_tensor" in found["layers"][0]["fault"]
    else:
        assert code == 0
        assert {c["against"] for c in found["expected"]} == {"expected_actq"}
