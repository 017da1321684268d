"""The `expertd` command: its table, `explain`, and how quickly it says what it can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expertd_kernels.common.problem import NAMED_DEVICES
from expertd_kernels.oracle.table import BACKENDS
from expertd_server.commands.cli import COMMANDS, main

TINY = ("explain", "--synthetic", "tiny:int4_g128")


def explain(capsys, *args: str) -> dict:
    assert main([*TINY, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_help_lists_every_command_without_importing_torch():
    code = (
        "import sys; from expertd_server.commands.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "print('torch' in sys.modules, 'grpc' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False False\n")
    assert all(f"    {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["serve", "explain"])
def test_each_command_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    assert e.value.code == 0
    assert "--checkpoint DIR" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expertd: the following arguments are required: COMMAND"),
        (["explian"], "expertd: argument COMMAND: got 'explian', want serve or explain or"),
        (["explain", "--shrad", "0/2"], "expertd explain: unknown option --shrad; the nearest is --shard"),
        (["serve", "--max-token-count=3"], "expertd serve: unknown option --max-token-count; the nearest is --max-"),
        (["serve", "zebra"], "expertd serve: unknown argument zebra"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_has_exit_code_2_and_names_the_nearest(capsys, argv, says):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 2
    assert "--help` shows the options" in err


def test_json_has_a_verdict_for_each_backend_of_each_layer(capsys):
    found = explain(capsys, "--device", "cpu")
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    for layer in found["layers"]:
        assert layer["scheme"] == "int4_g128"
        assert {v["backend"] for v in layer["verdicts"]} == {b.name for b in BACKENDS}
        assert layer["chosen"] == next(v["backend"] for v in layer["verdicts"] if v["eligible"])
        for v in layer["verdicts"]:
            assert set(v) == {"backend", "eligible", "refusals", "grade", "microseconds", "relative_error"}
            assert v["eligible"] == (v["refusals"] == [])
            assert (v["microseconds"], v["relative_error"]) == ({}, None), "nothing is measured unless it is asked"


@pytest.mark.parametrize("device", NAMED_DEVICES)
def test_hardware_that_is_not_here_can_be_asked_about(capsys, device):
    found = explain(capsys, "--device", device)
    assert all(layer["device"] == str(NAMED_DEVICES[device]) for layer in found["layers"])
    assert all(layer["chosen"] for layer in found["layers"])
    refusals = [r for layer in found["layers"] for v in layer["verdicts"] for r in v["refusals"]]
    assert not any("is not installed" in r for r in refusals), "packages are assumed for hardware that is not here"


def table(capsys, *args: str) -> str:
    assert main([*TINY, "--layers", "0", *args]) == 0
    return capsys.readouterr().out


def test_the_first_line_says_that_packages_are_assumed(capsys):
    said = (
        "assumed: all packages are installed, at suitable versions (--packages installed uses those of this machine)\n"
    )
    assert table(capsys, "--device", "sm90").startswith(said)
    assert "assumed" not in table(capsys, "--device", "sm90", "--packages", "installed")
    assert "assumed" not in table(capsys, "--device", "cpu")
    assert table(capsys, "--device", "cpu", "--packages", "assumed").startswith(said)
    assert explain(capsys, "--device", "sm90")["packages"] == "assumed"
    assert explain(capsys, "--device", "cpu")["packages"] == "installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_devices_go_by_the_names_that_people_know(capsys):
    for name, arch in (("h100", "sm90"), ("MI300X", "gfx942"), ("arc b580", "xe2"), ("sm75", "sm75")):
        assert explain(capsys, "--device", name)["layers"][0]["device"].endswith(f":{arch}")
    for name, arch in (("cuda", "sm90"), ("rocm", "gfx942"), ("xpu", "xe2")):
        assert f"this machine has no {name} device: the table is for {arch}\n" in table(capsys, "--device", name)


def test_rows_for_other_devices_fold_into_one_line(capsys):
    folded = table(capsys, "--device", "cpu")
    (line,) = (
        x
        for x in folded.splitlines()
        if x.startswith("backends for other devices (expertd explain --all shows them): ")
    )
    others = [b.name for b in BACKENDS if all(r.kind != "cpu" for r in b.devices)]
    assert sorted(line.split(": ")[1].split(", ")) == sorted(others)
    assert "runs on cuda" not in folded
    every = table(capsys, "--device", "cpu", "--all")
    assert "for other devices" not in every
    assert every.count("runs on") == len(others)
    pinned = table(capsys, "--device", "cpu", "--backend", "marlin")
    assert "pinned, refused: runs on cuda" in pinned, "what was asked for is not folded away"


def test_a_faster_row_is_offered_with_its_command(capsys, monkeypatch):
    from expertd_kernels.oracle import probe

    real, old = probe.installed_as, SimpleNamespace(version="2.1.0")
    monkeypatch.setattr(probe, "installed_as", lambda name: old if name == "triton" else real(name))
    want = next(b.needs["triton"] for b in BACKENDS if b.name == "gluon_sm90")
    line = f"faster backend gluon_sm90 needs triton {want}: pip install 'triton{want}'"
    asked = ("--device", "sm90", "--packages", "installed")
    assert f"\n{line}\n" in table(capsys, *asked)
    advice = {"backend": "gluon_sm90", "needs": f"triton {want}", "command": f"pip install 'triton{want}'"}
    assert explain(capsys, *asked)["layers"][0]["advice"] == advice
    assert explain(capsys, "--device", "sm90")["layers"][0]["advice"] is None


def test_no_refusal_puts_words_into_the_users_mouth(capsys):
    """With --activations checkpoint nobody asked for weight-only: the checkpoint does not round."""
    for how in ("checkpoint", "weight-only"):
        found = explain(capsys, "--device", "cpu", "--activations", how)["layers"][0]
        refusals = next(v["refusals"] for v in found["verdicts"] if v["backend"] == "cpu_w4a8")
        assert refusals == ["rounds activations (int8_group, int8_token), and these are to stay in bf16"]


def test_measuring_is_asked_for_done_once_and_remembered(capsys, tmp_path):
    args = ("--device", "cpu", "--oracle", "measure", "--cache", str(tmp_path), "--max-tokens", "8")
    found = explain(capsys, *args)
    (kept,) = tmp_path.iterdir()
    for layer in found["layers"]:
        timed = {v["backend"]: v for v in layer["verdicts"] if v["microseconds"]}
        assert set(timed) == {v["backend"] for v in layer["verdicts"] if v["eligible"]}
        assert timed.keys() >= {"cpu_torch", "reference"}
        assert all(0 < v["relative_error"] < 1e-2 for v in timed.values())
        assert set(timed[layer["chosen"]]["microseconds"]) == {"1", "8"}
        assert layer["chosen_by"] == "measure"
    kept.write_text(kept.read_text().replace('"relative_error": 0.00', '"relative_error": 0.0099'))
    again = explain(capsys, *args)["layers"][0]
    assert any(v["relative_error"] == pytest.approx(0.0099, rel=0.01) for v in again["verdicts"] if v["eligible"])


def test_what_is_not_here_is_not_measured_and_that_is_said(capsys, tmp_path):
    assert main([*TINY, "--device", "sm90", "--oracle", "measure", "--cache", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr()
    assert "nothing was measured" in out.err
    layer = json.loads(out.out)["layers"][0]
    assert layer["chosen_by"] == "order"
    assert list(tmp_path.iterdir()) == []


def test_a_pin_is_used_or_refused_never_replaced(capsys):
    found = explain(capsys, "--device", "cpu", "--backend", "layers.0=reference,*=auto")
    assert (found["layers"][0]["chosen"], found["layers"][0]["pinned"]) == ("reference", True)
    assert found["layers"][1]["pinned"] is False
    refused = next(b.name for b in BACKENDS if all(r.kind != "cpu" for r in b.devices))
    found = explain(capsys, "--device", "cpu", "--backend", refused)
    assert [layer["chosen"] for layer in found["layers"]] == [None, None]
    verdict = next(v for v in found["layers"][0]["verdicts"] if v["backend"] == refused)
    assert verdict["refusals"]


def test_the_table_for_people_names_every_backend_and_reason(capsys):
    assert main([*TINY, "--device", "cpu", "--shard", "1/4"]) == 0
    out = capsys.readouterr().out
    assert "layers 0-1: int4_g128, 2 of 8 experts, H 256, I 128, top-2, silu_and_mul, compute bf16, on cpu" in out
    assert all(b.name in out for b in BACKENDS)
    assert "chosen" in out


def test_a_refused_pin_and_a_layer_that_nothing_serves_are_said_below_the_table(capsys):
    assert main([*TINY, "--device", "sm90", "--layers", "0", "--backend", "aiter"]) == 0
    out = capsys.readouterr().out
    assert "pinned, refused: runs on rocm, this is cuda:sm90" in out
    assert "note: the pinned backend aiter does not serve this layer: expertd serve would not start" in out
    assert main([*TINY, "--device", "sm90", "--layers", "0", "--compute-dtype", "float32", "--backend", "cpu"]) == 0
    assert "note: the pinned backend cpu does not serve this" in capsys.readouterr().out
    folder = Path(__file__).parents[2] / "fixtures" / "hf-fp8-block128-qwen3moe1l"
    assert main(["explain", "--checkpoint", str(folder), "--device", "gfx942", "--activations", "checkpoint"]) == 0
    text = (
        "no backend serves this layer: expertd serve would not start (--activations weight-only asks for no quantized"
    )
    assert f"note: {text}" in " ".join(capsys.readouterr().out.split())


def test_options_reach_the_oracle(capsys):
    layer = explain(capsys, "--device", "cpu", "--layers", "1", "--experts", "0,3")["layers"][0]
    assert (layer["layer"], layer["held_experts"], layer["num_experts"]) == (1, 2, 8)
    assert main(["explain", "--synthetic", "tiny:bf16", "--quantize", "mxfp4", "--json"]) == 0
    layer = json.loads(capsys.readouterr().out)["layers"][0]
    assert layer["scheme"] == "mxfp4"
    assert any("quantized at load" in note for note in layer["notes"])


def test_what_cannot_be_explained_is_one_line(capsys, tmp_path):
    assert main(["explain", "--checkpoint", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("expertd explain: ")
    assert main([*TINY, "--device", "sm1"]) == 2
    assert "devices that need not be on this machine: cpu-portable" in capsys.readouterr().err
    assert main([*TINY, "--compute-dtype", "fp8"]) == 2


def test_the_configuration_prints_itself(capsys):
    assert main(["serve", "--synthetic", "tiny:bf16", "--shard", "1/2", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert 'synthetic = "tiny:bf16"' in out
    assert 'shard = "1/2"' in out
    assert "max-tokens = 4096" in out


def test_a_slow_last_resort_is_said_unless_it_was_asked_for(capsys):
    """An engine that falls back to something slow in silence costs its users days."""
    slow = "note: only the slow float32 reference serves this layer: the table has the reasons"
    ask = ["explain", "--synthetic", "tiny:int4_g128", "--device", "sm90"]
    assert main([*ask, "--compute-dtype", "float32"]) == 0
    assert slow in capsys.readouterr().out
    for more in ([], ["--backend", "reference"]):
        assert main([*ask, *more]) == 0
        assert slow not in capsys.readouterr().out


def test_the_same_bits_can_be_demanded(capsys):
    def chosen(*more):
        assert main(["explain", "--synthetic", "tiny:mxfp4", "--device", "sm90", "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["layers"][0]

    assert chosen()["chosen"] == chosen("--deterministic", "runs")["chosen"] == "gluon_sm90"
    batches = chosen("--deterministic", "batches")
    assert batches["chosen"] == "gluon_sm90"
    why = {v["backend"]: v["refusals"] for v in batches["verdicts"]}
    assert why["triton"] == []
    assert "is not bit-identical from run to run" in why["humming"]
    assert "a token's bits depend on the batch that it is computed in" in why["humming"]


def test_a_package_that_is_installed_and_broken_is_told_as_a_server_would(capsys, monkeypatch):
    """On a device that is here packages are imported; about one that is not, only their versions are asked."""
    from expertd_kernels import Device
    from expertd_kernels.oracle import probe
    from expertd_server.boot import assignment

    real, broken = probe.installed_as, SimpleNamespace(version="0.2.5")
    monkeypatch.setattr(probe, "installed_as", lambda name: broken if name == "sgl-deep-gemm" else real(name))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    here = Device("cuda", "sm90", (9, 0)), torch.device("cpu")
    monkeypatch.setattr(assignment, "resolve_device", lambda name: here)

    def refusals(*more):
        assert main(["explain", "--synthetic", "tiny:bf16", "--json", *more]) == 0
        verdicts = json.loads(capsys.readouterr().out)["layers"][0]["verdicts"]
        return "; ".join(next(v["refusals"] for v in verdicts if v["backend"] == "deepgemm"))

    assert "package sgl-deep-gemm 0.2.5 does not import: ModuleNotFoundError" in refusals("--device", "cuda")
    assert "does not import" not in refusals("--device", "sm90", "--packages", "installed")


def test_devices_that_share_layers_are_told_with_what_each_holds(monkeypatch, capsys):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("EXPERTD_CPU_NODES", ";".join(map(str, cores)))
    if len(cores) < 2:
        pytest.skip("needs two cores: each is a memory node")
    shared = ["explain", "--synthetic", "tiny:int4_g128", "--device", "cpu:0,cpu:1", "--split", "5,3"]
    assert main(shared) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "experts of each layer: 5 on cpu:0, 3 on cpu:1 (--split 5,3; in order of their ids)" in out
    assert "cpu:1: host memory in GiB" in out
    assert main([*shared, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["held_experts"] for layer in found["layers"]] == [5, 3, 5, 3]
    assert set(found["memory"]) == {"cpu:0", "cpu:1"}
    assert found["packages"] == "installed"
    assert main([*shared, "--packages", "assumed"]) == 0
    assert capsys.readouterr().out.startswith("assumed: all packages are installed")


QWEN = ("explain", "--synthetic", "qwen3-30b-a3b:int4_g128")


@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        ("h100,cpu", ["cuda:sm90", "cpu:"]),
        ("h100:0,h100:1,zen4", ["cuda:sm90", "cuda:sm90", "cpu:"]),
        ("mi300x,graviton4", ["rocm:gfx942", "cpu:"]),
    ],
)
def test_devices_that_share_layers_need_not_be_on_this_machine(capsys, devices, kinds):
    limit = {2: "8GiB", 3: "3GiB"}[len(kinds)]
    assert main([*QWEN, "--device", devices, "--memory-limit", limit, "--layers", "0-23", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = devices.split(",")
    assert (found["packages"], list(found["memory"])) == ("assumed", names)
    each = found["layers"][: len(names)]  # the parts of layer 0
    assert all(layer["device"].startswith(kind) for layer, kind in zip(each, kinds, strict=True))
    assert sum(layer["held_experts"] for layer in each) == 128
    limits = [found["memory"][name]["limit"] for name in names]
    assert all(limits[:-1])
    assert limits[-1] == 0, "the host is not bounded by --memory-limit beside an accelerator"
    assert all(found["memory"][name]["free"] == 0 for name in names), "the memory of this machine does not matter"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_devices_that_share_layers_say_what_is_assumed_of_them(capsys):
    out = table(capsys, "--device", "cuda:0,cpu")
    assert out.startswith("assumed: all packages are installed")
    assert "this machine has no cuda:0 device: the table is for sm90\n" in out
    assert "within --memory-limit, which bounds accelerators: not all devices are on this machine" in out
    for wrong in ("h100:x,cpu", "zebra,cpu"):
        assert main([*TINY, "--device", wrong]) == 2
        assert "devices that need not be on this machine: cpu-portable" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_says_so_and_what_would(capsys):
    asked = [*QWEN, "--device", "h100", "--memory-limit"]
    assert main([*asked, "8GiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "does not fit, expertd serve would not start: loading takes 15." in out
    assert "--memory-limit allows 8.00 GiB: the first 2" in out
    assert "experts of each layer would fit (--shard 0/3)" in out
    assert main([*asked, "8GiB", "--json"]) == 0
    assert "--shard 0/3" in json.loads(capsys.readouterr().out)["does_not_fit"]
    assert main([*asked, "16GiB"]) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main([*asked, "16GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["does_not_fit"] is None
