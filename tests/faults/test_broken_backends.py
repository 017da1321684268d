"""A server boots with a broken backend first in its table: refused with the reason, replaced only where the oracle had
the choice.  The rows are found, imported, packed, checked and called on the ordinary way."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from expertd_kernels import Device, reference, relative_error
from expertd_kernels.backends import reference as sound
from expertd_kernels.common.refused import Refused
from expertd_kernels.measure import autotuning as tournament
from expertd_kernels.oracle import table
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs
from expertd_server.boot import autotuning as measuring
from expertd_server.boot import layers as server_boot
from expertd_server.boot.assignment import BootError, assign_layers, open_source
from expertd_server.boot.autotuning import Autotuning
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.prepare import Workshop
from expertd_server.commands.cli import main
from expertd_server.config.serve import ServeConfig
from expertd_server.views.describe import describe_layer

CPU = Device("cpu", "x86_64")
ROW = next(b for b in table.BACKENDS if b.name == "reference")


class Experts:
    """Sound experts with a fault in their calls."""

    backend = "fragile"

    def __init__(self, packed, problem, how: str) -> None:
        self.inner, self.how = sound.experts(packed, problem), how

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):
        if self.how == "first call" or (self.how == "warm-up" and len(x) == 32):
            raise RuntimeError("illegal memory access")
        y = self.inner(x, ids, weights, router_weight_on_input=router_weight_on_input)
        if self.how == "wrong":
            y = y * 1.05
        if self.how == "nan":
            y[0, 0] = float("nan")
        if self.how == "one expert wrong":
            y[(ids == 5).any(dim=1)] *= 1.2
        if self.how == "not written" and out is not None:
            return out
        return y if out is None else out.copy_(y)


@pytest.fixture
def fragile(monkeypatch, tmp_path):
    """fragile(how): the table is `fragile`, broken in that way, before `reference`."""

    def install(how: str, after: tuple[str, ...] = ("reference",)) -> None:
        module = types.ModuleType("fragile_backend")

        def pack(weights, problem):
            if how == "pack":
                raise RuntimeError("out of shared memory")
            if how == "refused":
                raise Refused("scales beyond f16")
            return sound.pack(weights, problem)

        def experts(packed, problem):
            if how == "experts":
                raise ValueError("bad layout")
            return Experts(packed, problem, how)

        module.pack, module.experts = pack, experts
        if how == "ImportError":
            monkeypatch.setitem(sys.modules, "fragile_backend", None)
        else:
            monkeypatch.setitem(sys.modules, "fragile_backend", module)
        rows = (replace(ROW, name="fragile", target="fragile_backend"), ROW)
        monkeypatch.setattr(table, "BACKENDS", tuple(r for r in rows if r.name in ("fragile", *after)))
        monkeypatch.setattr(table, "ORDER", {})
        monkeypatch.setattr(measuring, "user_folder", lambda: tmp_path / "user")

    return install


def boot(config: ServeConfig):
    source, device = open_source(config), torch.device("cpu")
    plans = assign_layers(config, source, CPU, {})
    oracle = Autotuning.of(config, device, plans)
    return source, boot_layers(plans, Workshop(source, device), oracle=oracle)


CRASHES = {
    "ImportError": "when packing: ModuleNotFoundError: import of fragile_backend halted",
    "pack": "when packing: RuntimeError: out of shared memory",
    "refused": "when packing: scales beyond f16",
    "experts": "when packing: ValueError: bad layout",
    "first call": "when first called: RuntimeError: illegal memory access",
    "warm-up": "when warmed up: RuntimeError: illegal memory access",
}
WRONG = {
    "wrong": "relative error 0.05",
    "nan": "relative error inf, want <= 0.01",
    "one expert wrong": "relative error 0.",
    "not written": "relative error inf, want <= 0.01",
}


def assert_reference_serves(source, booted, says: str) -> None:
    for b in booted:
        assert b.served.backend == b.assignment.decision.require().name == "reference"
        verdict = next(v for v in b.assignment.decision.verdicts if v.backend == "fragile")
        assert len(verdict.refusals) == 1
        assert says in verdict.refusals[0]
        described = {v.backend: v for v in describe_layer(b).verdicts}
        assert says in described["fragile"].refusals[0]
        assert not described["fragile"].eligible
        x, ids, w = random_inputs(5, 256, 8, 2)
        assert relative_error(b.served.experts(x, ids, w), reference(source.load(b.served.layer), x, ids, w)) < 1e-2


@pytest.mark.parametrize("how", CRASHES)
def test_in_the_platforms_order_a_crash_is_a_refusal_and_the_next_one_serves(fragile, how):
    fragile(how)
    source, booted = boot(ServeConfig(synthetic="tiny:int4_g128"))
    assert len(booted) == 2
    assert_reference_serves(source, booted, CRASHES[how])
    assert {b.assignment.chosen_by for b in booted} == {"order"}


def test_weights_that_are_not_what_the_headers_promised_meet_the_rules_again(fragile, monkeypatch):
    """The headers tell nothing of an activation order; the weights that are read have one, and the row takes none."""
    fragile("sound")
    load = SyntheticModel.load

    def other(self, layer, experts=None):
        w = load(self, layer, experts)
        order = torch.arange(w.hidden_size, dtype=torch.int32).flip(0).expand(w.num_experts, -1).contiguous()
        return replace(w, w13=replace(w.w13, columns=order))

    monkeypatch.setattr(SyntheticModel, "load", other)
    rows = tuple(replace(b, act_order=b.name == "reference") for b in table.BACKENDS)
    monkeypatch.setattr(table, "BACKENDS", rows)
    source, booted = boot(ServeConfig(synthetic="tiny:int4_g128"))
    assert_reference_serves(source, booted, "when packing: does not permute columns (activation order)")


@pytest.mark.parametrize("how", WRONG)
def test_in_the_platforms_order_a_wrong_answer_stops_the_boot_with_the_figures(fragile, how):
    fragile(how)
    with pytest.raises(BootError) as e:
        boot(ServeConfig(synthetic="tiny:int4_g128"))
    assert str(e.value).startswith("layer 0: self-check of backend fragile against the float32 reference: ")
    assert WRONG[how] in str(e.value)


@pytest.mark.parametrize("how", [*(how for how in CRASHES if how != "warm-up"), *WRONG])
def test_measuring_refuses_whatever_is_broken_and_the_next_one_serves(fragile, how):
    fragile(how)
    source, booted = boot(ServeConfig(synthetic="tiny:int4_g128", oracle="measure", max_tokens=8))
    says = WRONG[how] if how in WRONG else CRASHES[how].split(": ", 1)[1]
    assert_reference_serves(source, booted, says)
    for b in booted:
        assert b.assignment.chosen_by == "measure"
        verdicts = {v.backend: v for v in b.assignment.decision.verdicts}
        assert [m for m, _ in verdicts["reference"].times] == [1, 8]
        if how == "wrong":
            assert verdicts["fragile"].relative_error == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("oracle", ["order", "measure"])
@pytest.mark.parametrize("how", [*CRASHES, *WRONG])
def test_a_pinned_one_stops_the_boot_whatever_the_oracle_would_do(fragile, capsys, how, oracle):
    fragile(how)
    args = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--backend", "fragile", "--oracle", oracle]
    assert main(["serve", "--listen", "127.0.0.1:0", *args]) == 1
    out = capsys.readouterr()
    assert out.err.count("\n") == 1, out.err
    assert "Traceback" not in out.err
    if how in WRONG:
        assert "layer 0: self-check of backend fragile against the float32 reference: " in out.err
        assert WRONG[how] in out.err
    else:
        assert "layer 0: the pinned backend fragile cannot take the weights: " in out.err
        assert CRASHES[how].split(": ", 1)[1] in out.err
    assert "serving on" not in out.out


@pytest.mark.parametrize("oracle", ["order", "measure"])
def test_one_that_takes_the_device_down_stops_the_boot_and_is_named(fragile, monkeypatch, capsys, oracle):
    """After an illegal address every call fails: trying the next one would blame it."""
    fragile("first call")
    for module in (server_boot, tournament):
        monkeypatch.setattr(module, "device_fault", lambda device: "CUDA error: an illegal memory access")
    args = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--oracle", oracle, "--max-tokens", "8"]
    assert main(["serve", "--listen", "127.0.0.1:0", *args]) == 1
    err = capsys.readouterr().err
    assert "the device is lost to this process: CUDA error: an illegal memory access, when" in err
    assert "fragile" in err
    assert "reference" not in err.replace("float32 reference", "")


@pytest.mark.parametrize("oracle", ["order", "measure"])
def test_where_nothing_is_left_the_boot_stops_with_the_whole_table(fragile, oracle):
    fragile("pack", after=())
    with pytest.raises(BootError, match="layer 0: no backend serves int4_g128") as e:
        boot(ServeConfig(synthetic="tiny:int4_g128", oracle=oracle, max_tokens=8))
    assert "fragile: " in str(e.value)
    assert "RuntimeError: out of shared memory" in str(e.value)


def test_one_that_breaks_after_it_won_gives_way_in_that_layer_alone(fragile, monkeypatch):
    """The autotuning runs on the first layer; the second layer's weights are the ones that it cannot take."""
    fragile("sound")
    module, packed = sys.modules["fragile_backend"], []

    def pack(weights, problem):
        packed.append(problem)
        if len(packed) > 2:  # measured, layer 0, layer 1
            raise RuntimeError("out of shared memory")
        return sound.pack(weights, problem)

    monkeypatch.setattr(module, "pack", pack)

    def measure(*args, **kwargs):
        found = tournament.measure(*args, **kwargs)
        quick = {r.backend: {m: us / 1e6 for m, us in r.microseconds.items()} for r in found}
        return [replace(r, microseconds=quick[r.backend]) if r.backend == "fragile" else r for r in found]

    monkeypatch.setattr(measuring, "measure", measure)
    _, booted = boot(ServeConfig(synthetic="tiny:int4_g128", oracle="measure", max_tokens=8))
    assert [b.served.backend for b in booted] == ["fragile", "reference"]
    first, second = (b.assignment.decision for b in booted)
    assert first.verdicts[0].refusals == ()
    assert second.verdicts[0].refusals == ("when packing: RuntimeError: out of shared memory",)
