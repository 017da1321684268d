"""The CUDA bench's parts that need no GPU: names of shapes, the suite, its files, its refusal without a GPU."""

import argparse
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from expertd_kernels import ActivationQuant, Scheme, decide, detect_device, problem_of
from expertd_kernels.bench import cpu, cuda, cuda_timing
from expertd_kernels.bench.__main__ import main
from expertd_kernels.bench.faults import WorkerError
from expertd_kernels.bench.points import read_points
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference


def test_shapes_by_name_slice_and_numbers():
    assert cuda.shape_of("qwen3-30b-a3b").num_experts == 128
    assert cuda.shape_of("deepseek-v3/64").num_experts == 64
    free = cuda.shape_of("E60-k6-H3584-I1280")
    assert (free.num_experts, free.top_k, free.hidden_size, free.intermediate_size) == (60, 6, 3584, 1280)
    for wrong in ("qwen9", "deepseek-v3/x", "E60-k6"):
        with pytest.raises(ValueError, match="want a model, MODEL/EXPERTS"):
            cuda.shape_of(wrong)


def test_what_a_gpu_raises_is_no_sentence_of_the_bench(monkeypatch, capsys):
    def fails(error):
        def run(args):
            raise error

        return run

    monkeypatch.setattr(cuda, "run", fails(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(["--device", "cuda"])
    monkeypatch.setattr(cpu, "run", fails(WorkerError("ours: its process ended, exit code -9")))
    assert main(["--device", "cpu"]) == 1
    assert capsys.readouterr().err == "ours: its process ended, exit code -9\n"


def test_the_suite_names_real_shapes_and_schemes():
    for shape, scheme, routing in cuda.SUITE:
        assert cuda.shape_of(shape).hidden_size > 0
        assert Scheme.parse(scheme).name == scheme
        assert routing in ("uniform", "zipf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    args = argparse.Namespace(shape=None, scheme=None, backend=None, routing=None, m=None, json=None, csv=None)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        cuda.run(args)


TINY = ["--shape", "tiny,E4-k2-H64-I32", "--scheme", "int4_g32", "--m", "1,5"]


def eligible(scheme, how=ActivationQuant.NONE):
    """Rows that serve the scheme on this machine's CPU, but the reference."""
    w = random_weights(scheme, 1, 64, 32)
    verdicts = decide(problem_of(w, detect_device("cpu"), activation_quant=how)).verdicts
    return {v.backend for v in verdicts if v.eligible} - {"reference"}


@pytest.fixture
def stand_in(monkeypatch):
    """The bench on this machine's CPU: its device, weights and inputs there, fixed ceilings, and no clock."""
    for name in ("random_weights", "random_inputs"):
        made = getattr(cuda, name)
        monkeypatch.setattr(cuda, name, lambda *a, made=made, **kw: made(*a, **{**kw, "device": "cpu"}))
    monkeypatch.setattr(cuda, "detect_device", lambda name: detect_device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(cuda, "ceilings", lambda: cuda.Ceilings(4000.0, 800.0, 1400.0))
    monkeypatch.setattr(cuda, "machine", lambda: {"gpu": "G", "commit": "c"})

    def times(backends, sets, budget_ms=40.0):
        for call in backends:
            call(0)
        return [10.0 * (i + 1) for i in range(len(backends))]

    monkeypatch.setattr(cuda, "graph_times", times)
    return monkeypatch


def test_every_backend_that_is_not_refused_is_checked_and_timed(stand_in, tmp_path):
    file, table = tmp_path / "r.json", tmp_path / "r.csv"
    assert main(["--device", "cuda", *TINY, "--backend", "all", "--json", str(file), "--csv", str(table)]) == 0
    result = json.loads(file.read_text())
    assert {(r["shape"], r["backend"], r["M"]) for r in result["rows"]} == {
        (s, b, m) for s in ("tiny", "E4-k2-H64-I32") for b in eligible("int4_g32") for m in (1, 5)
    }
    for r in result["rows"]:
        assert 0 < r["relative_error"] < r["tolerance"] == 1e-2
        assert r["us"] in (10.0, 20.0, 30.0)
        assert r["gb_s"] > 0
    one = next(r for r in result["rows"] if r["shape"] == "E4-k2-H64-I32" and r["M"] == 1)
    weights = 2 * 3 * 64 * 32 * (4 + 16 / 32) / 8  # two experts, three matrices, codes and bf16 scales
    assert one["gb_s"] == pytest.approx(weights / one["us"] / 1e3)
    assert one["roofline_fraction"] == pytest.approx(weights / 4000.0 / 1e3 / one["us"])
    machine = {"gpu": "G", "commit": "c", "read_gb_s": 4000.0, "bf16_tflop_s": 800.0, "e4m3_tflop_s": 1400.0}
    assert read_points(table) == [{**r, **machine} for r in result["rows"]]


def test_rounded_activations_have_their_own_rows_tolerance_and_ceiling(stand_in):
    if "cpu_w4a8" in eligible("int4_g32", ActivationQuant.INT8_GROUP):
        assert main(["--device", "cuda", *TINY, "--activations", "int8_group", "--backend", "all"]) == 0
    assert main(["--device", "cuda", *TINY, "--activations", "e4m3_token", "--backend", "all"]) == 1, "nothing is right"
    top = cuda.Ceilings(4000.0, 800.0, 1400.0)
    assert (top.tflop_s(ActivationQuant.NONE), top.tflop_s(ActivationQuant.E4M3_TOKEN)) == (800.0, 1400.0)
    assert cuda.Ceilings(4000.0, 800.0).tflop_s(ActivationQuant.E4M3_TOKEN) == 800.0


def test_a_backend_that_fails_costs_the_others_nothing(stand_in, capsys, tmp_path):
    build = cuda.build

    class Failing:
        backend = "cpu_torch"

        def __call__(self, x, ids, w, *, out):
            if x.shape[0] > 1:
                raise RuntimeError("no kernel image")
            return out.zero_()

    def broken(decision, weights):
        if decision.chosen.name == bad:
            raise OSError("libfast.so: undefined symbol")
        return Failing() if decision.chosen.name == "cpu_torch" else build(decision, weights)

    stand_in.setattr(cuda, "build", broken)
    file = tmp_path / "r.json"
    bad = ""
    args = ["--device", "cuda", *TINY, "--backend", "cpu_torch,reference,gluon_sm90", "--json", str(file)]
    assert main(args) == 1, "wrong answers are an exit code"
    rows = json.loads(file.read_text())["rows"]
    by = {(r["backend"], r["M"]): r for r in rows if r["shape"] == "tiny"}
    assert {b for b, _ in by} == {"cpu_torch", "reference"}
    assert by["cpu_torch", 1]["relative_error"] == 1.0
    assert by["cpu_torch", 5]["relative_error"] is None
    assert by["cpu_torch", 1]["us"] is by["cpu_torch", 5]["us"] is None
    assert by["reference", 5]["us"] == 10.0
    said = capsys.readouterr().err
    assert "cpu_torch: RuntimeError: no kernel image" in said
    assert "gluon_sm90: runs on cuda" in said
    bad = "cpu_torch"
    assert main(args) == 0
    assert {r["backend"] for r in json.loads(file.read_text())["rows"]} == {"reference"}
    assert "cpu_torch: OSError: libfast.so: undefined symbol" in capsys.readouterr().err


def test_the_budget_leaves_out_layers_and_names_them(stand_in, capsys, tmp_path):
    clock = iter([0.0, 0.0, 9.0])
    stand_in.setattr(
        cuda, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: next(clock))
    )  # not that of other threads
    file = tmp_path / "r.json"
    assert main(["--device", "cuda", *TINY, "--backend", "cpu_torch", "--budget", "5", "--json", str(file)]) == 0
    assert {r["shape"] for r in json.loads(file.read_text())["rows"]} == {"tiny"}
    assert "not run, the budget was spent: E4-k2-H64-I32 int4_g32 uniform" in capsys.readouterr().err


def test_a_backend_that_no_graph_holds_has_no_time(monkeypatch, capsys):
    def capture(call, inputs, device):
        call(0)
        return lambda i: None

    def synchronizing(i):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_timing, "captured", capture)
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr(cuda_timing, "_events", lambda calls: [float(next(ticks) % 2 * 6 + 4) for _ in calls])
    times = cuda_timing.graph_times([lambda i: i, synchronizing, lambda i: i], 2)
    assert times[0] == 5.0
    assert math.isnan(times[1])
    assert times[2] == 2.0
    assert "no graph: RuntimeError: operation not permitted" in capsys.readouterr().err
    assert math.isnan(cuda_timing.graph_times([synchronizing], 2)[0])


def test_the_check_looks_at_rows_all_over_the_batch():
    w = random_weights("int4_g32", 4, 64, 32)
    inputs = random_inputs(500, 64, 4, 2)

    class LastRowWrong:
        backend = "wrong"

        def __call__(self, x, ids, weights, *, out):
            out.copy_(reference(w, x, ids, weights))
            out[-1] *= 3
            return out

    assert cuda._error(LastRowWrong(), w, inputs) > 0.1


def test_kernels_are_compiled_first_in_processes(stand_in, monkeypatch, capsys):
    seen = []

    def run_tasks(target, layers, *, jobs, budget_s, limit_s):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for layer in layers:
            seen.append((layer[0].name, layer[1].name, jobs, budget_s))
            yield layer, target(layer)

    stand_in.setattr(cuda, "run_tasks", run_tasks)
    assert main(["--device", "cuda", *TINY, "--backend", "cpu_torch", "--jobs", "3", "--budget", "50"]) == 0
    assert seen == [("tiny", "int4_g32", 3, 25.0), ("E4-k2-H64-I32", "int4_g32", 3, 25.0)]
    assert "compiled tiny int4_g32: " in capsys.readouterr().err
