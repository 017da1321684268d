"""Layers that change while requests wait and run, and work between batches."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from setup_kit import ALONE, EXECUTORS, Caller, FakeExperts, Setup, inputs, served
from waiting import until, until_inside

from expertd.errors import (
    DrainingError,
    LayerNotHeldError,
    NotReadyError,
)
from expertd_server.engine.engine import Engine
from expertd_server.engine.request import Answer


def test_an_engine_takes_nothing_before_it_is_opened():
    engine = Engine(torch.device("cpu"), policy=ALONE)
    fake = FakeExperts()
    engine.hold([served(0, fake)])
    engine.start()
    caller = Caller()
    with pytest.raises(NotReadyError, match="until its health is SERVING"):
        engine.submit(caller.request(1, inputs(1), [[2]], [[1.0]]))
    engine.open()
    engine.submit(caller.request(1, inputs(1), [[2]], [[1.0]]))
    caller.wait(1)
    engine.stop(10)
    engine.open()
    with pytest.raises(DrainingError):
        engine.submit(caller.request(2, inputs(1), [[2]], [[1.0]]))


def test_an_engine_without_layers_works_and_takes_them_later(make):
    s = make(layers=())
    with pytest.raises(LayerNotHeldError, match="want one of those held here: none"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.hold([served(4, s.fake)])
    s.run(s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=4))
    assert isinstance(s.caller.outcomes[1], Answer)
    s.engine.hold([])
    with pytest.raises(LayerNotHeldError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]], layer=4))


def test_what_waits_is_computed_by_what_was_held_when_it_came(make):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    other = FakeExperts()
    swapped = threading.Thread(target=s.engine.hold, args=([served(0, other)],))
    swapped.start()
    until_inside(swapped, "result")  # layers change between batches
    assert swapped.is_alive()
    s.fake.gate.set()
    swapped.join(20)
    s.caller.wait(1)
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert (len(s.fake.calls), len(other.calls)) == (2, 1)


def test_a_request_checked_before_a_change_is_computed_by_what_is_held_when_it_is_taken(make):
    s = make()
    r = s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=s.engine.holding[0])
    other = FakeExperts()
    s.engine.hold([served(0, other)])
    s.run(r)
    assert (len(s.fake.calls), len(other.calls)) == (0, 1)


def test_a_layer_is_forgotten_when_nothing_in_flight_uses_it(make):
    s = make()
    old = s.engine.holding[0]
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    fake, s.fake = s.fake, FakeExperts()
    threading.Timer(0.1, fake.gate.set).start()
    s.engine.hold([served(0, s.fake)])
    assert s.engine.forget([old], 20)
    assert len(fake.calls) == 2
    watch = weakref.ref(fake)
    until(lambda: reported(s) == 2)
    s.reports.clear()
    del fake, old
    until(lambda: watch() is None)  # nobody holds on to it: not the engine's thread, not its requests


def reported(s: Setup) -> int:
    """How many batches were told of."""
    s.engine.delivery.report()
    return len(s.reports)


def test_executors_drop_what_they_keep_for_a_forgotten_layer(make, monkeypatch):
    dropped = []
    for executor in EXECUTORS:
        monkeypatch.setattr(executor, "forget", lambda executor, generations: dropped.append(generations))
    s = make()
    a, b = s.engine.holding.values()
    s.engine.hold([])
    assert s.engine.forget([a, b], 20)
    assert {generation for gone in dropped for generation in gone} == {a.generation, b.generation}
    assert all(len(gone) == 1 for gone in dropped)  # callers wait meanwhile, so one after another


def test_a_layer_still_in_use_is_not_forgotten(make):
    s = make()
    old = s.engine.holding[0]
    s.block()
    assert not s.engine.forget([old], 0.05)
    s.fake.gate.set()
    assert s.engine.forget([old], 20)


def test_work_between_batches_has_the_device_for_itself(make):
    s = make()
    s.block()
    done = []
    threads = [threading.Thread(target=lambda: done.append(s.engine.between(threading.get_ident))) for _ in range(2)]
    for t in threads:
        t.start()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    for t in threads:
        until_inside(t, "result")
    assert not done
    s.fake.gate.set()
    for t in threads:
        t.join(20)
    assert done == [s.engine._thread.ident] * 2
    with pytest.raises(ZeroDivisionError):
        s.engine.between(lambda: 1 // 0)
    s.caller.wait(1)
    s.engine.stop(10)
    assert s.engine.between(threading.get_ident) == threading.get_ident(), "nobody computes any more"


def test_whoever_waits_for_work_between_batches_is_not_forgotten_when_the_engine_ends(make, monkeypatch):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    monkeypatch.setattr(s.engine, "_compute", lambda run: 1 // 0)
    done = []
    work = threading.Thread(target=lambda: done.append(s.engine.between(lambda: "done")), daemon=True)
    work.start()
    until_inside(work, "result")
    s.fake.gate.set()
    work.join(20)
    assert done == ["done"]
    s.caller.wait(0, 1)


def test_a_new_layer_brings_graphs_of_the_sizes_that_the_one_before_has(make):
    """They are captured one at a time before it is served, and the core has them with it."""
    s = make()
    core, executor, seen = s.engine._core, s.engine._executor, []
    missing = {0: 2, 3: 0}

    def capture_like(new, generation):
        assert s.engine.holding[new.layer].generation == generation, "the new one is not served yet"
        if not missing[new.layer]:
            return False
        missing[new.layer] -= 1
        seen.append(f"captured for {new.layer}")
        return True

    executor.capture_like = capture_like
    executor.graphs = lambda generation: [(0, 0, 4, 2, 0, 77)] if seen else []
    s.engine._core = Recorded(core, seen)
    try:
        old = s.engine.holding[0]
        new = served(0, FakeExperts())
        s.engine.hold([new, served(5, FakeExperts())], keep=True)
    finally:
        s.engine._core = core
    assert seen == [
        "captured for 0",
        "captured for 0",
        ("graph", 0, new.generation, 0, 0, 4, 2, 0, 77),
        ("graph", 5, s.engine.holding[5].generation, 0, 0, 4, 2, 0, 77),
    ]
    assert old.generation != new.generation


class Recorded:
    """A core that notes the graphs that it is given."""

    def __init__(self, core, seen):
        self._core, self._seen = core, seen

    def __getattr__(self, name):
        return getattr(self._core, name)

    def add_graph(self, *graph):
        self._seen.append(("graph", *graph))
