"""What executors hold of an accelerator: where outputs lie, and when memory is made anew.  The device is this machine's
memory; what runs on a GPU is in tests/gpu."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from expertd.shm.pool import PoolError
from expertd_server.engine import core as c
from expertd_server.engine import device as module
from expertd_server.engine import plain as plain_module
from expertd_server.engine.device import DeviceExecutor
from expertd_server.engine.executors import executor_of
from expertd_server.engine.pieces import Piece, Pieces
from expertd_server.engine.plain import PlainExecutor
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import batch_slot_bytes, batch_slot_routes

CPU = torch.device("cpu")
H, E, K = 64, 8, 2


def layer(in_place, experts=None, hidden=H, coded=False):
    return ServedLayer(0, E, range(E), K, hidden, 32, experts=experts, backend="b", in_place=in_place, takes_e4m3=coded)


@pytest.fixture
def plain(monkeypatch):
    """Host memory that a device would copy from, without a device."""
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: empty(*a, **more))


@pytest.fixture
def executor(plain, monkeypatch):
    made = object.__new__(DeviceExecutor)
    made._device, made._dtype, made._batch_slots, made._size = CPU, torch.bfloat16, [], (0, 0, 0, 0, 0)
    made.pieces, made.core = Pieces(), SimpleNamespace(forget_graphs=lambda: forgotten.append(True))
    made._driver = SimpleNamespace(cuGraphExecDestroy=lambda graph: destroyed.append(graph.value))
    forgotten, destroyed = made.forgotten, made.destroyed = [], []
    return made


def test_outputs_lie_where_inputs_did_until_a_layer_wants_them_apart(executor):
    first = executor.reserve(100, [layer(True), layer(True)])
    assert all(m.device_out == m.device_hidden for m in first)
    assert all(m.out != m.hidden for m in first), "host memory: answers are read while the next batch is filled"
    held = sum(
        t.nbytes
        for t in (executor._batch_slots[0].hidden, executor._batch_slots[0].slots, executor._batch_slots[0].weights)
    )
    routes = batch_slot_routes(100, K, E)
    assert (
        held
        == batch_slot_bytes(128, H, routes, 2, in_place=True)
        == batch_slot_bytes(128, H, routes, 2, False) - 128 * 2 * H
    )
    executor.pieces._kept[(0, 0, 0, 0, 0, 0)] = (None, 77)
    again = executor.reserve(100, [layer(True)])
    assert [m.device_hidden for m in again] == [m.device_hidden for m in first]
    assert not executor.destroyed

    apart = executor.reserve(100, [layer(True), layer(False)])
    assert all(m.device_out != m.device_hidden for m in apart)
    assert executor.destroyed == [77], "graphs hold addresses"
    assert len(executor.pieces) == 0
    executor.reserve(100, [layer(True)])
    assert all(batch_slot.out is not batch_slot.hidden for batch_slot in executor._batch_slots), "it does not shrink"


def test_codes_and_scales_have_room_for_the_widest_layer_that_takes_them(executor):
    executor.reserve(100, [layer(True, hidden=512), layer(True, hidden=256, coded=True)])
    batch_slot = executor._batch_slots[0]
    assert (batch_slot.codes.numel(), batch_slot.scales.numel()) == (128 * 256, 128 * 2)
    held = sum(
        t.nbytes for t in (batch_slot.hidden, batch_slot.slots, batch_slot.weights, batch_slot.codes, batch_slot.scales)
    )
    assert held == batch_slot_bytes(128, 512, batch_slot_routes(100, K, E), 2, in_place=True, coded=256)
    executor.pieces._kept[(0, 0, 0, 0, 0, 0)] = (None, 77)
    executor.reserve(100, [layer(True, hidden=512, coded=True)])
    assert executor._batch_slots[0].codes.numel() == 128 * 512
    assert executor.destroyed == [77], "graphs hold addresses"


class Routes:
    """Experts that note which slots they are called for; fails: as where memory ran out."""

    backend = "b"

    def __init__(self, fails=False):
        self.fails, self.called = fails, []

    def __call__(self, x, slots, weights, *, router_weight_on_input=False, out=None):
        if self.fails:
            raise torch.OutOfMemoryError("out of memory")
        self.called.append((len(x), slots.unique().tolist()))


@pytest.fixture
def captures(executor, monkeypatch):
    """(old, new) layers; what is captured is noted instead.  The old one has graphs of 4 and 16 rows."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(module, "free_now", lambda: 0)
    executor.streams, executor._works, executor.captured = (None,), True, []
    executor._graph = lambda body: executor.captured.append(body) or ("graph", 70 + len(executor.captured))

    def made(fails=False):
        old, new = (replace(layer(True, Routes(bad)), capturable=True) for bad in (False, fails))
        executor.reserve(16, [old])
        for rows in (4, 16):
            executor.pieces.add(old, Piece(old.generation, c.EXPERTS, 0, rows, K, 0), ("graph", rows), 0)
        return old, new

    return made


def test_a_new_layer_gets_the_graphs_of_the_one_that_it_replaces_one_after_another(executor, captures):
    old, new = captures()
    executor._batch_slots[0].slots.fill_(E + 5)
    assert [executor.capture_like(new, old.generation) for _ in range(3)] == [True, True, False]
    assert new.experts.called == [(4, [-1]), (16, [-1])], "called before, for no route, whatever a batch has left"
    assert executor.graphs(new.generation) == [(c.EXPERTS, 0, 4, K, 0, 71), (c.EXPERTS, 0, 16, K, 0, 72)]
    for body in executor.captured:
        body()
    assert [rows for rows, _ in new.experts.called[2:]] == [4, 16]
    assert len(executor.graphs(old.generation)) == 2


def test_a_new_layer_without_memory_for_graphs_goes_without(executor, captures, caplog):
    old, new = captures(fails=True)
    assert not executor.capture_like(new, old.generation)
    assert "no CUDA graph of 4 rows before it is served" in caplog.text
    assert executor.graphs(new.generation) == []
    assert executor._works, "others are captured as before"


class E4m3:
    """Experts that note what they are given and answer with what it stands for, doubled."""

    backend, takes_e4m3 = "b", True

    def __init__(self, fails_at=0):
        self.fails_at, self.calls = fails_at, []

    def __call__(self, *_, **__):
        raise AssertionError("widened")

    def of_e4m3(self, codes, scales, ids, weights, *, router_weight_on_input=False, out):
        self.calls.append((len(codes), router_weight_on_input, ids[:, 0].tolist()))
        if len(codes) == self.fails_at:
            out.fill_(float("nan"))
            raise torch.OutOfMemoryError("out of memory")
        return out.copy_(2 * codes.float() * scales.repeat_interleave(128, 1))


@pytest.mark.parametrize("fails_at", [0, 6])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_that_takes_e4m3_is_given_codes_also_in_halves(executor, monkeypatch, in_place, fails_at):
    """The output lies over the hidden states, never over the codes: nothing is collected again."""
    width, rows, experts, seen = 256, 6, E4m3(fails_at), []
    served = layer(in_place, experts, hidden=width, coded=True)
    executor.reserve(8, [served])
    batch_slot = executor._batch_slots[0]
    for t in (batch_slot.hidden, batch_slot.out, batch_slot.codes.view(torch.uint8), batch_slot.scales):
        t.fill_(7)

    def brought(table, number, codes, scales, slots, weights, verdicts, staged):
        seen.append(("collect", number, None if staged is None else tuple(staged.shape)))
        assert (codes.shape, scales.shape) == ((rows, width), (rows, 2))
        codes.copy_(torch.arange(rows)[:, None].expand(rows, width).to(torch.float8_e4m3fn))
        scales.fill_(0.5)
        slots.copy_(torch.arange(rows)[:, None].expand(rows, K))

    def took(table, number, out):
        seen.append(("deliver", number, out[:, 0].tolist()))

    monkeypatch.setattr(module, "collect_e4m3", brought)
    monkeypatch.setattr(module, "deliver", took)
    monkeypatch.setattr(module, "signal", lambda done: seen.append("signal"))
    views = module._Rows(batch_slot, served, rows, K, on_input=True)
    assert executor._launch(views, "a batch") == bool(fails_at)
    assert seen == [("collect", rows, None), ("deliver", rows, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), "signal"]
    whole, halves = [(6, True, [0, 1, 2, 3, 4, 5])], [(3, True, [0, 1, 2]), (3, True, [3, 4, 5])]
    assert experts.calls == (whole + halves if fails_at else whole)

    seen.clear()
    parts = views.parts()
    assert set(parts) == {c.WHOLE, c.EXPERTS, c.COLLECT_E4M3, c.COLLECT_STAGED, c.DELIVER}
    parts[c.COLLECT_STAGED]()
    parts[c.COLLECT_E4M3]()
    assert seen == [("collect", rows, (rows, width)), ("collect", rows, None)]


class Experts:
    backend = "b"

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):
        self.over = out.data_ptr() == x.data_ptr()
        return out.copy_(2 * x)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_plain_executor_copies_a_batch_there_and_back(in_place):
    plain, experts = PlainExecutor(CPU, "bf16", "a test"), Experts()
    served = layer(in_place, experts)
    memory = plain.reserve(100, [served])[0]
    run = c.Run(rows=3, top_k=K, hidden=memory.hidden, slots=memory.slots, weights=memory.weights, out=memory.out)
    hidden, slots, _, out = plain.views(run, H)
    hidden.fill_(1.0)
    slots.fill_(0)
    out.fill_(float("nan"))
    assert plain.run(run, served) > 0
    assert experts.over == in_place
    assert torch.equal(out, torch.full((3, H), 2.0, dtype=torch.bfloat16))
    assert bool((hidden == 1).all()), "what the client sent is as it was"


def test_a_device_without_graphs_is_served_by_the_plain_executor(monkeypatch):
    monkeypatch.setattr(plain_module, "compute_stream", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for device in ("xpu", "cuda"):
        executor, why = executor_of(torch.device(device), "bf16")
        assert type(executor) is PlainExecutor
        assert why in executor.pool_refusal()
        with pytest.raises(PoolError):
            executor.pool(1 << 20)
