"""Experts of a layer shared among devices: which go where, what fits, and what is refused with what would."""

import json
import re

import pytest
import torch

from expertd_kernels.common.problem import NAMED_DEVICES
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_server.boot.assignment import WrongOptionError, open_source
from expertd_server.boot.joint import JointAssigner, Place, resolve_places
from expertd_server.boot.memory import by_site, fits_into, plan_memory
from expertd_server.commands.cli import main
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges, Split

GIB = 1 << 30
QWEN = "qwen3-30b-a3b:int4_g128"
GPU = Place("cuda:0", NAMED_DEVICES["sm90"], torch.device("cuda:0"))
OTHER = Place("cuda:1", NAMED_DEVICES["sm90"], torch.device("cuda:1"))
CPU = Place("cpu", NAMED_DEVICES["cpu-amx"], torch.device("cpu"))


def assigner(*places, free=None, **more):
    more = {"synthetic": QWEN} | more
    config = ServeConfig(device=",".join(p.name for p in places), **more)
    out = JointAssigner(config, open_source(config), places, [assumed_packages(BACKENDS)] * len(places))
    out.settle(free or [0] * len(places))
    return config, out


def shares(assignment):
    return {site: part.held for site, part in assignment.parts}


def test_the_first_device_is_filled_and_the_rest_goes_to_the_host():
    config, a = assigner(GPU, CPU, free=[6 * GIB, 64 * GIB])
    layers = a.all()
    held = shares(layers[0])
    n = len(held[0])
    assert 30 < n < 60, "of 128 experts, which take 13.9 GiB"
    assert held == {0: tuple(range(n)), 1: tuple(range(n, 128))}
    assert all(shares(x) == held for x in layers)
    assert layers[0].held == tuple(range(128))
    assert layers[0].decision.problem.num_experts == 128
    assert [part.decision.problem.device.kind for part in layers[0].each] == ["cuda", "cpu"]
    (name, own, these), _ = by_site(config, layers)
    assert name == "cuda:0"
    assert fits_into(own, these, 6 * GIB)
    assert a.shares_text() == f"{n} on cuda:0, {128 - n} on cpu (as many as fit into cuda:0; in order of their ids)"


def test_a_limit_bounds_accelerators_and_leaves_the_host_what_is_free():
    _, unlimited = assigner(GPU, CPU, free=[100 * GIB, 64 * GIB])
    assert shares(unlimited.all()[0]) == {0: tuple(range(128))}, "everything fits"
    config, a = assigner(GPU, CPU, free=[100 * GIB, 64 * GIB], memory_limit=6 * GIB)
    layers = a.all()
    assert set(shares(layers[0])) == {0, 1}
    plan = plan_memory(config, layers)
    assert [name for name, _ in plan.sites] == ["cuda:0", "cpu"]
    assert plan.of("cuda:0").limit == 6 * GIB >= plan.of("cuda:0").peak
    assert plan.of("cpu").limit == 0
    assert plan.weights == sum(p.weights for _, p in plan.sites)
    assert plan.of("cuda:1") is None


def test_a_model_that_fits_on_neither_device_alone_is_shared():
    free = [8 * GIB, 9 * GIB]
    for place, room in zip((GPU, CPU), free, strict=True):
        with pytest.raises(WrongOptionError, match="there is room for"):
            assigner(place, free=[room])
    config, a = assigner(GPU, CPU, free=free)
    for (_, own, these), room in zip(by_site(config, a.all()), free, strict=True):
        assert fits_into(own, these, room)


def test_devices_of_a_kind_take_the_same_number_before_the_next_kind_gets_any():
    _, a = assigner(GPU, OTHER, CPU, free=[100 * GIB, 100 * GIB, 64 * GIB])
    assert {s: len(held) for s, held in shares(a.all()[0]).items()} == {0: 64, 1: 64}
    _, a = assigner(GPU, OTHER, CPU, free=[5 * GIB, 100 * GIB, 64 * GIB])
    few = shares(a.all()[0])
    assert len(few[0]) < 64 < len(few[1])
    assert set(few) == {0, 1}


def test_the_most_used_experts_are_on_the_first_device(tmp_path):
    stats = {n: [e % 7 for e in range(128)] for n in range(48)}
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(stats))
    _, a = assigner(GPU, CPU, split=Split((18, 110)), routing_stats=file)
    assert shares(a.all()[0])[0] == tuple(range(6, 128, 7))[:18]
    assert "--split 18,110; the most used first" in a.shares_text()


def test_experts_that_were_moved_stay_where_they_are_and_the_rest_goes_on_as_before():
    config, a = assigner(GPU, CPU, split=Split((4, 124)))
    where = {e: 0 if e in (1, 50, 60, 70) else 1 for e in range(128)}
    assert a.arrange(3, where) == {}
    assert shares(a.layer(3))[0] == (1, 50, 60, 70)
    assert {p.why for p in a.layer(3).each} == {"--split 4,124; moved as routing changed"}
    assert shares(a.of(open_source(config)).layer(3))[0] == (1, 50, 60, 70), "also of new weights"
    assert shares(a.layer(4))[0] == (0, 1, 2, 3)
    assert shares(a.layer(3, [0, *range(50, 128)]))[0] == (0, 50, 60, 70), "who comes is behind those that were there"
    assert a.arrange(3, {}) == where
    assert shares(a.layer(3))[0] == (0, 1, 2, 3)


def test_moving_leaves_room_for_one_layer_more():
    free = [6 * GIB, 64 * GIB]
    _, stays = assigner(GPU, CPU, free=free)
    config, moves = assigner(GPU, CPU, free=free, move_rate=1 << 20)
    few, many = (len(shares(a.all()[0])[0]) for a in (moves, stays))
    assert few < many
    (_, own, these), _ = by_site(config, moves.all())
    assert fits_into(own, [*these, these[0]], 6 * GIB)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"0": [1, 2]}', "got 2 numbers for layer 0, want 128"),
        ("{}", "got nothing for layer 0"),
        ("[1, 2]", "want JSON"),
        ('{"0": [-1]}', "below 0"),
        ("{", "want JSON"),
        (None, "cannot be read"),
    ],
)
def test_statistics_of_another_model_or_none_are_refused(tmp_path, text, says):
    file = tmp_path / "stats.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WrongOptionError, match=r"--routing-stats") as e:
        assigner(GPU, CPU, routing_stats=file, layers=Ranges.parse("0"))
    assert says in str(e.value)


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(WrongOptionError, match=r"room for \d+ at cuda:0, \d+ at cpu") as e:
        assigner(GPU, CPU, free=[2 * GIB, 4 * GIB])
    assert "--shard 0/" in str(e.value)
    layers = int(re.search(r"the first (\d+) of 48 layers would fit", str(e.value))[1])
    _, a = assigner(GPU, CPU, free=[2 * GIB, 4 * GIB], layers=Ranges.parse(f"0-{layers - 1}"))
    assert len(a.all()) == layers
    with pytest.raises(WrongOptionError, match=r"room for 0 at cuda:0, \d+ at cpu") as e:
        assigner(GPU, CPU, free=[100 * GIB, 1 * GIB], memory_limit=GIB // 2)
    assert "allow more (--memory-limit)" in str(e.value)
    with pytest.raises(WrongOptionError, match=r"--split 100,28: 100 experts .* do not fit into cuda:0: \d+ would"):
        assigner(GPU, CPU, free=[6 * GIB, 64 * GIB], split=Split((100, 28)))
    with pytest.raises(WrongOptionError, match=r"got 128 experts, but layer 0 has 64"):
        assigner(GPU, CPU, split=Split((100, 28)), experts=Ranges.parse("0-63"))


def test_a_pinned_backend_is_that_of_the_device_it_is_for():
    _, a = assigner(GPU, CPU, split=Split((96, 32)), backend="triton")
    assert [part.decision.chosen.name for part in a.all()[0].each] == ["triton", "cpu"]
    _, a = assigner(GPU, CPU, split=Split((96, 32)), backend="cpu_torch")
    assert [part.decision.chosen.name for part in a.all()[0].each] == ["gluon_sm90", "cpu_torch"]
    _, a = assigner(GPU, CPU, split=Split((96, 32)), backend="xpu")
    assert a.all()[0].decision.chosen is None, "nobody could take it"


def test_some_experts_of_a_layer_stay_where_they_were():
    _, a = assigner(GPU, CPU, split=Split((96, 32)))
    assert shares(a.layer(5, range(32, 128))) == {0: tuple(range(32, 128))}
    assert shares(a.layer(5, range(20, 128)))[1] == tuple(range(116, 128))


def test_a_memory_node_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("EXPERTD_CPU_NODES", "0-63;64-127")
    with pytest.raises(WrongOptionError, match=r"'cpu:7' is not on this machine, whose memory nodes are 0"):
        resolve_places(ServeConfig(synthetic=QWEN, device="cpu:0,cpu:7"))
    with pytest.raises(WrongOptionError, match="not on this machine"):
        resolve_places(ServeConfig(synthetic=QWEN, device="xpu:9,cpu"))


@pytest.mark.parametrize(
    ("device", "says"),
    [("cpu,cpu", "cpu more than once"), ("rocm:0,rocm", "more than once"), ("cuda:77,cpu", "not on this machine")],
)
def test_the_command_ends_with_2(capsys, device, says):
    assert main(["serve", "--synthetic", "tiny:bf16", "--device", device, "--listen", "127.0.0.1:0"]) == 2
    assert says in capsys.readouterr().err
