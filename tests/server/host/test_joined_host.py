"""A server whose layers two devices share: two memory nodes here, as far as the processor has two cores."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from prometheus_client import generate_latest

from expertctl.cli import main as expertctl
from expertctl.commands.describe import show
from expertd.common.tables import console
from expertd_client import ExpertClient
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import BootError, open_source
from expertd_server.boot.layers import Stopped
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Split
from expertd_server.host.host import Host
from expertd_server.views.page import Page

H, E, K = 256, 8, 2
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
TINY = {
    "synthetic": "tiny:int4_g128",
    "device": "cpu:0,cpu:1",
    "listen": Address("127.0.0.1", 0),
    "threads": 2,
    "max_tokens": 64,
}
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores: each is a memory node")


@pytest.fixture
def started(monkeypatch):
    """started(**options): a Host that serves."""
    monkeypatch.setenv("EXPERTD_CPU_NODES", f"{CORES[0]};{CORES[1]}")
    with ExitStack() as stack:

        def make(**options) -> Host:
            host = Host(ServeConfig(**(TINY | options)))
            stack.callback(host.close)
            host.start()
            host.ready(60)
            return host

        yield make


@pytest.fixture(scope="module")
def weights():
    return {n: open_source(ServeConfig(synthetic="tiny:int4_g128")).load(n) for n in (0, 1)}


def error(answer, weights, batch, held=range(E)):
    x, ids, w = batch
    slots = torch.where(torch.isin(ids, torch.tensor(list(held))), ids, -1).int()
    return relative_error(torch.as_tensor(answer.output).float(), reference(weights, x, slots, w))


@pytest.mark.parametrize(
    ("options", "unary", "transport"),
    [
        ({"shm": "on"}, False, "shm"),
        ({"shm": "off", "tcp": "on"}, False, "tcp"),
        ({"shm": "off"}, False, "inline"),
        ({"shm": "off"}, True, "inline"),
    ],
)
def test_clients_see_one_layer_on_every_transport(started, weights, options, unary, transport):
    host = started(split=Split((5, 3)), **options)
    with ExpertClient(host.address, unary=unary) as client:
        for layer, tokens in ((0, 1), (1, 7), (0, 40)):
            batch = random_inputs(tokens, H, E, K, seed=tokens)
            batch[1][0, 1] = -1
            answer = client.forward(layer, *batch)
            assert answer.routes_computed == 2 * tokens - 1
            assert error(answer, weights[layer], batch) <= tolerance("bf16"), tokens
        if not unary:
            assert client.session().transport == transport
    batch = random_inputs(9, H, E, K, seed=9)
    with ExpertClient(host.address, unary=unary) as client:
        wide = client.forward(0, *batch, output_dtype="f32")
        assert error(wide, weights[0], batch) <= tolerance("bf16")


def test_its_parts_are_told_by_describe_the_page_and_metrics(started, capsys):
    host = started(split=Split((5, 3)))
    with ExpertClient(host.address) as client:
        brief, full = client.describe(), client.describe(include_decisions=True)
        for seed in range(3):
            client.forward(0, *random_inputs(4, H, E, K, seed=seed))
        layer = full.layers[0]
        assert [(r.first, r.count) for r in layer.held] == [(0, 8)]
        assert layer.backend == "cpu"
        assert [(p.device, p.held[0].first, p.held[0].count) for p in layer.parts] == [("cpu:0", 0, 5), ("cpu:1", 5, 3)]
        assert {p.why for p in layer.parts} == {"--split 5,3; in order of their ids"}
        assert all(p.weights_bytes > 0 for p in layer.parts)
        for p in layer.parts:
            assert {(s.experts, s.routes) for s in p.surface} >= {(1, 1), (p.held[0].count,) * 2}
            assert all(s.microseconds > 0 for s in p.surface)
        assert not any(p.surface for p in brief.layers[0].parts), "of them only with the decisions"
        show(console(), host.address, full, client.session())
    out = " ".join(capsys.readouterr().out.split())
    assert "--split 5,3; in order of their ids" in out
    assert "cpu:1 (cpu:" in out
    group = json.loads(Page(host.metrics, host._describe).facts())["groups"][0]
    assert [(p["device"], p["count"], p["experts"]) for p in group["parts"]] == [
        ("cpu:0", 5, "0-4"),
        ("cpu:1", 3, "5-7"),
    ]
    scraped = generate_latest(host.metrics.registry).decode()
    for device in ("cpu:0", "cpu:1"):
        line = next(x for x in scraped.splitlines() if x.startswith(f'expertd_part_routes_total{{device="{device}"}}'))
        assert float(line.split()[-1]) > 0


def test_expertctl_plan_expects_a_time_from_what_it_measured(started, tmp_path, capsys):
    host = started(split=Split((5, 3)))
    trace = tmp_path / "loads.json"
    trace.write_text(json.dumps({n: [1.0] * E for n in (0, 1)}))
    assert expertctl(["plan", host.address, "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "expected time of a layer" in out
    rows = [line.split() for line in out.splitlines() if line.split() and line.split()[0] in ("1", "8", "64")]
    assert [row[0] for row in rows] == ["1", "8", "64"]
    assert all("us" in row for row in rows)


def test_experts_go_and_come_while_it_serves(started, weights):
    host = started(split=Split((5, 3)))
    batch = random_inputs(20, H, E, K, seed=1)
    with ExpertClient(host.address) as client:
        host.residence.remove(0, experts=range(3), timeout_s=20)
        held = range(3, E)
        assert error(client.forward(0, *batch), weights[0], batch, held) <= tolerance("bf16")
        parts = client.describe().layers[0].parts
        assert [[(r.first, r.count) for r in p.held] for p in parts] == [[(3, 5)]], "five fit at the first device"
        host.residence.add(0)
        assert error(client.forward(0, *batch), weights[0], batch) <= tolerance("bf16")


def test_with_a_cache_the_second_start_maps_both_parts(started, weights, tmp_path):
    batch = random_inputs(5, H, E, K, seed=2)
    for start in range(2):
        host = started(cache=tmp_path / "cache")
        with ExpertClient(host.address) as client:
            assert error(client.forward(1, *batch), weights[1], batch) <= tolerance("bf16")
            assert client.describe().layers[0].from_cache == bool(start)
        host.drain(10)


def test_in_float32_sums_are_as_exact_as_one_device_s(started, weights):
    host = started(compute_dtype="float32")
    batch = random_inputs(6, H, E, K, seed=3, dtype=torch.float32)
    with ExpertClient(host.address) as client:
        answer = client.forward(0, *batch, output_dtype="f32")
    assert error(answer, weights[0], batch) <= tolerance("f32")
    assert np.asarray(answer.output).dtype == np.float32


def test_experts_are_moved_as_routing_changes_and_no_call_fails(started, weights):
    host = started(
        split=Split((3, 5)),
        move_rate=1 << 40,
        test_part_us=Split((0, 400)),
        metrics_listen=Address("127.0.0.1", 0),
    )
    follower = host._follower
    stop, answers, faults = threading.Event(), [], []

    def call() -> None:
        with ExpertClient(host.address) as client:
            n = 0
            while not stop.is_set():
                x, _, w = random_inputs(4, H, E, K, seed=n)
                ids = torch.tensor([[5, 7]] * 4, dtype=torch.int32)
                ids[0, 0] = n % E if n % E != 7 else 0
                try:
                    answers.append(error(client.forward(n % 2, x, ids, w), weights[n % 2], (x, ids, w)))
                except Exception as e:
                    faults.append(e)
                n += 1

    caller = threading.Thread(target=call)
    caller.start()
    try:
        deadline = time.monotonic() + 60
        while follower.moves.layers < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = len(answers)
        while len(answers) < seen + 20 and not faults:
            time.sleep(0.01)
    finally:
        stop.set()
        caller.join()
    assert not faults
    assert max(answers) <= tolerance("bf16")
    with ExpertClient(host.address) as client:
        layers = client.describe().layers
    for layer in layers:
        held = {p.device: {e for r in p.held for e in range(r.first, r.first + r.count)} for p in layer.parts}
        assert {5, 7} <= held["cpu:0"]
        assert [len(held[d]) for d in ("cpu:0", "cpu:1")] == [3, 5]
        assert {p.why for p in layer.parts} == {"--split 3,5; moved as routing changed"}
    scraped = generate_latest(host.metrics.registry).decode()
    moved = next(x for x in scraped.splitlines() if x.startswith("expertd_part_moves_total"))
    assert float(moved.split()[-1]) >= 8
    assert "expertd_part_moves_failed_total 0.0" in scraped


def test_a_move_is_not_kept_in_the_cache_and_a_change_keeps_it(started, weights, tmp_path):
    host = started(split=Split((5, 3)), cache=tmp_path / "cache", admin_listen=None)
    entries = sorted(p.name for p in (tmp_path / "cache").rglob("*"))
    before = host.residence.booted[0]
    where = dict.fromkeys(range(3), 1) | dict.fromkeys(range(3, 8), 0)
    assert host.residence.rearrange(before, where)
    assert not host.residence.rearrange(before, where), "that layer is not held any more"
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*")) == entries
    batch = random_inputs(20, H, E, K, seed=1)
    with ExpertClient(host.address) as client:
        assert error(client.forward(0, *batch), weights[0], batch) <= tolerance("bf16")
        host.residence.remove(0, experts=[4], timeout_s=20)
        held = [e for e in range(E) if e != 4]
        assert error(client.forward(0, *batch), weights[0], batch, held) <= tolerance("bf16")
        assert {e for r in client.describe().layers[0].parts[0].held for e in range(r.first, r.first + r.count)} >= {
            3,
            5,
        }


def test_a_move_waits_for_a_change_and_an_update_for_a_move(started):
    host = started(split=Split((5, 3)))
    residence, booted = host.residence, host.residence.booted[0]
    residence.claim("an update is under way")
    with pytest.raises(BootError, match="an update is under way"):
        residence.rearrange(booted, dict.fromkeys(range(5), 0))
    residence.unclaim()
    assert residence.booted[0] is booted
    with pytest.raises(Stopped):
        residence.rearrange(booted, dict.fromkeys(range(3), 1), lambda: True)
    assert residence._assigner.layer(0).each[0].held == tuple(range(5)), "what failed is not remembered"
    residence.claim("again")
    residence.unclaim()
