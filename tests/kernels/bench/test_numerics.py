"""numerics.py: which layers it checks, what it calls wrong, and that no task of it takes another with it."""

import csv
import time
from dataclasses import replace

import pytest
import torch

import numerics
import numerics_grid
import numerics_table
from expertd_kernels import NAMED_DEVICES, Scheme, decide
from expertd_kernels.bench.workers import STOP_S, NoResult, run_tasks
from expertd_kernels.oracle.probe import assumed_packages, installed_packages
from expertd_kernels.oracle.survey import SCHEMES
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.scheme import ActivationQuant, ScaleType
from numerics import main

FULL = numerics_grid.GRIDS["full"]
PACKAGES = assumed_packages(BACKENDS)


@pytest.mark.parametrize("device", ["cpu-avx2", "sm80", "sm90", "sm100", "xpu-xe2"])
def test_every_row_that_runs_is_checked_over_every_scheme_that_it_serves(device):
    found, refused = numerics_grid.layers(FULL, NAMED_DEVICES[device], PACKAGES)
    checked = {(x.backend, x.scheme, x.activations) for x in found}
    assert {x.backend for x in found}.isdisjoint(refused)
    assert {x.backend for x in found} | set(refused) == {b.name for b in BACKENDS}
    assert all(sentence for sentence in refused.values())
    for b in BACKENDS:
        for scheme in SCHEMES:
            for how in ActivationQuant:
                layer = numerics_grid.Layer(b.name, scheme, how, "bf16", 8, 2, 1024, 512, "silu_and_mul", False)
                served = decide(layer.problem(NAMED_DEVICES[device], PACKAGES), (b,), order={}).chosen is not None
                assert served == ((b.name, scheme, how) in checked)


def test_layers_fit_their_rows_and_have_odd_sizes_and_features_where_these_are_taken():
    device = NAMED_DEVICES["sm90"]
    found, _ = numerics_grid.layers(FULL, device, PACKAGES)
    rows = {b.name: b for b in BACKENDS}
    for layer in found:
        assert decide(layer.problem(device, PACKAGES), (rows[layer.backend],), order={}).chosen is not None
    by = {(x.backend, x.scheme, x.experts): x for x in found if x.compute_dtype == "bf16"}
    assert (by["triton", "int4_g128", 128].hidden, by["triton", "int4_g128", 128].intermediate) == (1003, 331)
    assert by["gluon_sm90", "int4_g128", 128].hidden == 1000
    assert by["humming", "int4_g64", 60].hidden == 1088
    assert by["triton", "mxfp4", 128].activation == "swigluoai"
    assert by["triton", "mxfp4", 128].bias
    assert {x.experts for x in found} == {8, 60, 128}
    assert {x.compute_dtype for x in found if x.backend == "reference"} == {"bf16", "f32"}


def test_rows_take_turns_and_the_reference_is_last():
    found, _ = numerics_grid.layers(FULL, NAMED_DEVICES["sm90"], PACKAGES)
    names = [x.backend for x in found]
    first = names.index("reference")
    assert set(names[first:]) == {"reference"}
    for i in range(50, first, 50):
        for row in set(names) - {"reference"}:
            share = names[:i].count(row) / names.count(row)
            assert abs(share - i / first) <= 1 / names.count(row), f"{row} after {i} of {first} layers"
    gluon = [x.experts for x in found if x.backend == "gluon_sm90"]
    assert gluon == sorted(gluon), "a row's shapes stay in their order"


def test_chosen_rows_only_and_unknown_names_are_refused():
    found, _ = numerics_grid.layers(FULL, NAMED_DEVICES["cpu-avx2"], PACKAGES, ["cpu_torch"])
    assert {x.backend for x in found} == {"cpu_torch"}
    found, refused = numerics_grid.layers(FULL, NAMED_DEVICES["sm90"], PACKAGES, ["all", "-humming"])
    assert {x.backend for x in found} | set(refused) == {b.name for b in BACKENDS} - {"humming"}
    with pytest.raises(ValueError, match="backend nope: known are all, aiter, cpu"):
        numerics_grid.layers(FULL, NAMED_DEVICES["cpu-avx2"], PACKAGES, ["nope"])


def test_routes_are_what_their_names_say():
    E, k = 12, 3
    _, ids, _ = random_inputs(200, 8, E, k, seed=1)
    assert numerics.routes("uniform", ids, E) is ids
    one = numerics.routes("one", ids, E)
    assert torch.equal(one, torch.tensor([6, -1, -1], dtype=torch.int32).expand(200, 3))
    few = numerics.routes("few", ids, E)
    assert set(few.flatten().tolist()) == {0, 1, 2}
    assert all(len(set(row)) == k for row in few.tolist()), "a token's experts are different ones"
    _, wide, _ = random_inputs(200, 8, 2 * E, k, seed=1)
    absent = numerics.routes("absent", wide, E)
    assert absent.dtype == torch.int32
    assert set(absent.flatten().tolist()) == set(range(-1, E))
    assert bool((absent < 0).all(dim=1).any()), "some tokens have no route here"
    assert 0.4 < float((absent < 0).float().mean()) < 0.6


LAYER = numerics_grid.Layer("reference", "int4_g32", ActivationQuant.NONE, "bf16", 4, 2, 64, 32, "silu_and_mul", False)


class Faulty:
    """Right answers with one fault."""

    backend = "reference"

    def __init__(self, weights, fault):
        self.weights, self.fault, self.calls = weights, fault, 0

    def __call__(self, x, ids, w, *, router_weight_on_input=False, out=None):
        self.calls += 1
        got = reference(self.weights, x, ids, w).to(x.dtype)
        if self.fault == "unwritten":
            got[-1] = out[-1]
        elif self.fault == "wrong":
            got *= 1.05
        elif self.fault == "absent":
            got[(ids < 0).all(dim=1)] = 1e-6
        elif self.fault == "unstable" and self.calls % 2 == 0:
            got[0, 0] *= 1 + 2**-7
        return out.copy_(got)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("", ""),
        ("unwritten", "7 tokens, absent routes: relative error inf, want <= 1e-02"),
        ("wrong", "7 tokens, absent routes: relative error 5.0"),
        ("absent", "7 tokens, absent routes: a row without a route is not zero"),
        ("unstable", "7 tokens, absent routes: a second call gave other bits"),
    ],
)
def test_a_fault_is_seen_and_named(fault, sentence):
    weights = LAYER.weights("cpu")
    _, got = numerics.check_point(Faulty(weights, fault), weights, LAYER, 7, "absent", True)
    assert got.startswith(sentence)
    assert bool(got) == bool(fault)


def test_bits_may_differ_where_the_row_promises_nothing():
    weights = LAYER.weights("cpu")
    assert numerics.check_point(Faulty(weights, "unstable"), weights, LAYER, 7, "uniform", False)[1] == ""


def test_a_layer_that_cannot_be_built_is_a_fault_not_an_exception():
    impossible = replace(LAYER, backend="gluon_sm90")
    outcome = numerics.check_layer(impossible, "cpu", (1,))
    assert outcome.errors == {}
    assert "NoBackendError" in outcome.faults[0]


def test_weights_are_never_zero_and_have_what_the_rounding_needs():
    static = replace(LAYER, scheme="e4m3_tensor", activations=ActivationQuant.E4M3_TENSOR)
    assert static.weights("cpu").input_scales.shape == (4, 2)
    signed = LAYER.weights("cpu").w13.scales
    assert bool((signed < 0).any() & (signed > 0).any())
    assert bool((static.weights("cpu").w13.scales > 0).all())


def written(file):
    with file.open(newline="") as f:
        return list(csv.DictReader(f))


PAGE = ["--device", "cpu", "--grid", "small", "--backend", "cpu_torch", "--scheme", "int4_g128,bf16", "--m", "1,7"]


def test_the_command_writes_a_table_and_says_what_it_left_out(tmp_path, capsys):
    out, figures = tmp_path / "n.md", tmp_path / "n.csv"
    assert main([*PAGE, "--out", str(out), "--csv", str(figures)]) == 0
    text = out.read_text()
    assert "8 layers, 8 checked, 0 wrong, 0 not run" in text
    assert "## Faults" not in text
    assert text.count("`cpu_torch`") == 8
    rows = written(figures)
    assert {(r["scheme"], r["compute_dtype"]) for r in rows} == {
        (s, d) for s in ("int4_g128", "bf16") for d in ("bf16", "f32")
    }
    assert all([name for name in r if name.startswith("M=")] == ["M=1", "M=7"] for r in rows)
    assert all(float(r[m]) > 1e-3 for r in rows for m in ("M=1", "M=7") if r["compute_dtype"] == "bf16")
    assert "8 checked" in capsys.readouterr().out


def test_a_run_that_is_killed_leaves_what_it_knew(tmp_path, monkeypatch):
    out, figures = tmp_path / "n.md", tmp_path / "n.csv"

    def killed(target, todo, **_):
        for layer in todo[:2]:
            yield layer, numerics_table.Outcome({1: 1e-3}, 0.01, (), 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(numerics, "run_tasks", killed)
    with pytest.raises(KeyboardInterrupt):
        main([*PAGE, "--out", str(out), "--csv", str(figures), "--write-every", "0"])
    assert "8 layers, 2 checked, 0 wrong, 6 not run" in out.read_text()
    assert out.read_text().count("not run: the run ended before") == 6
    assert sum(r["ran"] == "1" for r in written(figures)) == 2


def test_the_next_run_takes_up_what_was_right_and_checks_the_rest(tmp_path, monkeypatch, capsys):
    first, second, out = tmp_path / "1.csv", tmp_path / "2.csv", tmp_path / "n.md"
    asked = []

    def some(target, todo, **_):
        asked.append(list(todo))
        for i, layer in enumerate(todo):
            wrong = ("1 tokens: wrong",) if len(asked) == 1 and i == 3 else ()
            if len(asked) > 1 or i < 5:
                yield layer, numerics_table.Outcome({1: 1e-3 * (i + 1), 7: 2e-3}, 0.01, wrong, 0.1)

    monkeypatch.setattr(numerics, "run_tasks", some)
    facts = {"cpu": "one", "commit": "aaaa"}
    monkeypatch.setattr(numerics, "machine", lambda device: facts)
    assert main([*PAGE, "--csv", str(first)]) == 1
    facts = {"cpu": "one", "commit": "bbbb"}
    assert main([*PAGE, "--earlier", str(first), "--csv", str(second), "--out", str(out)]) == 0
    assert set(asked[1]) == {asked[0][3], *asked[0][5:]}, "the wrong one and those that were not run"
    assert "8 layers, 8 checked, 0 wrong, 0 not run" in out.read_text()
    assert "4 were checked at commit aaaa." in out.read_text()
    assert sorted(r["commit"] for r in written(second)) == ["aaaa"] * 4 + ["bbbb"] * 4
    third = [*PAGE, "--earlier", str(second), "--csv", str(tmp_path / "3.csv")]
    assert main([*third]) == 0
    assert asked[2] == []
    assert "8 of 8 layers are known" in capsys.readouterr().out
    assert main([*third, "--m", "1,7,64"]) == 0, "figures that it lacks are made"
    assert len(asked[3]) == 8
    facts = {"cpu": "two", "commit": "bbbb"}
    assert main([*third]) == 1
    assert "another machine: cpu one, here two" in capsys.readouterr().err


def test_wrong_answers_and_unknown_names_are_exit_code_one(tmp_path, monkeypatch, capsys):
    assert main(["--device", "cpu", "--backend", "nope"]) == 1
    assert "known are" in capsys.readouterr().err
    found = [(LAYER, numerics_table.Outcome({1: 0.5}, 0.01, ("1 tokens: relative error",), 1.0))]
    page = numerics_table.markdown({"cpu": "c"}, (1, 7), found, {"xpu": "runs on xpu"})
    assert "1 layers, 1 checked, 1 wrong" in page
    assert "| 5.0e-01 | - | 1e-02 | WRONG |" in page
    assert "- `reference` int4_g32 E 4: 1 tokens: relative error" in page
    assert "- `xpu`: runs on xpu" in page


def test_a_run_that_checked_nothing_does_not_pass(tmp_path):
    out = tmp_path / "n.md"
    assert main([*PAGE, "--budget", "0", "--out", str(out)]) == 1
    assert " 0 checked, 0 wrong" in out.read_text()
    assert "not run: the budget was spent" in out.read_text()


def tasks(target, given, **kw):
    return dict(run_tasks(target, given, **{"jobs": 2, "budget_s": 60.0, "limit_s": 30.0, **kw}))


def test_tasks_give_their_results_in_as_many_processes_as_asked():
    assert tasks(abs, [-3, -1, 4], jobs=2) == {-3: 3, -1: 1, 4: 4}
    pid = "__import__('os').getpid()"
    assert len(set(tasks(eval, [pid, pid + " "], jobs=1).values())) == 1, "a process serves more than one task"
    assert len(set(tasks(eval, [pid, pid + " "], jobs=1, usable=bool).values())) == 2, "an unusable one only its own"


def test_a_task_that_ends_its_process_is_named_and_the_others_go_on():
    crash = "__import__('os')._exit(3)"
    got = tasks(eval, [crash, "1 + 1", "2 + 2"], jobs=1)
    assert got[crash] == NoResult("its process ended with exit code 3", ran=True)
    assert (got["1 + 1"], got["2 + 2"]) == (2, 4)


def test_a_task_that_hangs_is_stopped_and_the_others_go_on():
    hang = "__import__('time').sleep(600)"
    got = tasks(eval, [hang, "1 + 1"], jobs=1, limit_s=3.0)
    assert got["1 + 1"] == 2
    assert not got[hang].ran, "it may only be slow"
    assert got[hang].reason.startswith("not run: stopped after 3 s")
    assert got[hang].reason.endswith("the limit of a task")


def test_the_budget_ends_what_runs_and_begins_nothing_more():
    hang = "__import__('time').sleep(600)"
    got = tasks(eval, [hang, "1 + 1"], jobs=1, budget_s=3.0)
    assert got[hang].reason.endswith("the budget was spent")
    assert not got[hang].ran, "it may have been right"
    assert got["1 + 1"] == NoResult("not run: the budget was spent", ran=False)


def test_processes_that_do_not_listen_are_stopped_together():
    deaf = "__import__('signal').signal(15, 1) or __import__('time').sleep(600)"
    begin = time.monotonic()
    got = tasks(eval, [deaf, deaf + " ", deaf + "  "], jobs=3, budget_s=3.0)
    assert len(got) == 3
    assert time.monotonic() - begin < 3.0 + 2 * STOP_S, "one after the other it would be three times STOP_S"


def test_schemes_beside_the_matrix_are_others():
    assert not set(numerics_grid.EXTRA_SCHEMES) & set(SCHEMES)
    assert all(numerics_grid.scheme_of(s).name == s.split("/")[0] for s in numerics_grid.EXTRA_SCHEMES)
    assert numerics_grid.scheme_of("int4_g128/f16") == Scheme.parse("int4_g128").with_scale(ScaleType.F16)


def test_without_the_compiled_kernel_the_others_are_checked_all_the_same(tmp_path, monkeypatch):
    from expertd_kernels.native import library as native

    monkeypatch.setattr(native, "kernel_error", lambda: "cpu kernel: not built")
    facts = numerics.machine(NAMED_DEVICES["cpu-avx2"])
    assert facts["compiled kernel"] == "none"
    assert "expertd-cpu-kernel" not in facts
    _, refused = numerics_grid.layers(
        FULL, NAMED_DEVICES["cpu-avx2"], installed_packages(BACKENDS), ["cpu", "cpu_torch"]
    )
    assert "cpu kernel: not built" in refused["cpu"]
    assert set(refused) == {"cpu"}
