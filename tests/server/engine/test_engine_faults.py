"""Backends, transports and devices that fail: who is told, and what goes on."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from setup_kit import EXECUTORS, H, inputs, on_cpu

from expertd.errors import (
    BackendFailedError,
    DrainingError,
    InternalError,
)
from expertd_kernels.common.protocol import ExpertsLostError
from expertd_server.engine.request import Answer, Operand


def test_a_backend_that_raises_fails_its_batch_and_the_next_works(make):
    s = make()
    s.fake.error = RuntimeError("out of registers")
    s.run(s.caller.request(1, inputs(2), [[2]] * 2, [[1.0]] * 2))
    with pytest.raises(BackendFailedError, match="backend fake, layer 0, 2 tokens: RuntimeError: out of registers"):
        raise s.caller.outcomes[1]
    s.fake.error = None
    s.run(s.caller.request(2, inputs(2), [[2]] * 2, [[1.0]] * 2))
    assert isinstance(s.caller.outcomes[2], Answer)


def test_a_transport_that_fails_gets_the_error_and_the_engine_goes_on(make):
    s = make()
    seen = []

    def broken(r, outcome):
        seen.append(outcome)
        if isinstance(outcome, Answer):
            raise ValueError("the pipe is gone")

    r = s.caller.request(1, inputs(1), [[2]], [[1.0]])
    r.reply = broken
    s.engine.submit(r)
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert isinstance(seen[0], Answer)
    assert isinstance(seen[1], InternalError)
    assert "the pipe is gone" in seen[1].message


def test_an_engine_that_ends_on_its_own_fault_answers_everybody_and_says_so(make, monkeypatch):
    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))

    def broken(*args):
        raise ZeroDivisionError("a fault of the engine's own")

    monkeypatch.setattr(s.engine, "_compute", broken)
    s.fake.gate.set()
    s.caller.wait(0, 1)
    assert isinstance(s.caller.outcomes[1], InternalError)
    assert ended.wait(20)
    assert said == ["the engine failed with an internal error"]
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert s.engine.idle()


def test_a_lost_device_ends_the_engine_and_what_waits_may_go_elsewhere(make, monkeypatch):
    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    for tag in (1, 2):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.fake.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for executor in EXECUTORS:
        monkeypatch.setattr(
            executor, "fault", lambda batch_slot: "CUDA error: an illegal memory access was encountered"
        )
    s.fake.gate.set()
    s.caller.wait(0, 1, 2)
    assert isinstance(s.caller.outcomes[0], BackendFailedError), "its batch was under way"
    for tag in (1, 2):
        assert isinstance(s.caller.outcomes[tag], DrainingError)
        assert "illegal memory access" in str(s.caller.outcomes[tag])
        assert s.caller.outcomes[tag].retryable
    assert ended.wait(20)
    assert said[0].startswith("the device is lost to this process: CUDA error: an illegal memory access")
    assert "backend fake" in said[0]
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    assert s.engine.idle()


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_batch_that_memory_runs_out_for_is_computed_in_halves(make, caplog, rows):
    troubles = []
    s = make(trouble=troubles.append)
    s.fake.most_rows = (rows + 1) // 2
    x = inputs(rows)
    s.run(s.caller.request(1, x, [[2, 3]] * rows, [[1.0, 0.5]] * rows))
    want = x * (1.0 * 1 + 0.5 * 2)
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(rows, H), want)
    assert s.caller.outcomes[1].routes_computed == 2 * rows
    assert [tokens for tokens, *_ in s.fake.calls] == [rows, (rows + 1) // 2, rows // 2]
    assert troubles == ["split"]
    assert "CUDA out of memory" in caplog.text
    s.run(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert isinstance(s.caller.outcomes[2], Answer)


def test_halves_are_not_halved(make):
    """Memory that is not enough for half of a batch fails it, and nothing else."""
    troubles = []
    s = make(trouble=troubles.append)
    s.fake.most_rows = 2
    s.run(s.caller.request(1, inputs(8), [[2]] * 8, [[1.0]] * 8))
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert "out of memory" in str(s.caller.outcomes[1])
    assert [tokens for tokens, *_ in s.fake.calls] == [8, 4]
    s.run(s.caller.request(2, inputs(2), [[2]] * 2, [[1.0]] * 2))
    assert isinstance(s.caller.outcomes[2], Answer)
    assert troubles == ["failed"]


@on_cpu
def test_what_was_overwritten_is_not_computed_again(make, monkeypatch):
    """A client in shared memory may want the output where its input lies: half a try may have spoiled it."""
    s = make()
    s.fake.most_rows = 2
    x = inputs(4)
    r = s.caller.request(1, x, [[2]] * 4, [[1.0]] * 4)
    memory = np.array(r.hidden.values).view(np.float32)
    r.hidden, submit = Operand("f32", memory), s.engine.delivery.submit

    def in_place(f, request, out, operands):
        f.out = f.hidden
        return submit(f, request, memory, operands)

    monkeypatch.setattr(s.engine.delivery, "submit", in_place)
    s.run(r)
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert [tokens for tokens, *_ in s.fake.calls] == [4]


def test_other_errors_are_not_tried_again(make):
    s = make()
    s.fake.error = RuntimeError("out of registers")
    s.run(s.caller.request(1, inputs(4), [[2]] * 4, [[1.0]] * 4))
    assert isinstance(s.caller.outcomes[1], BackendFailedError)
    assert len(s.fake.calls) == 1


def test_lost_weights_end_the_engine_and_every_caller_may_go_elsewhere(make):
    """Also the one whose batch was computed from them: it did nothing wrong, and got no wrong answer."""
    ended, said = threading.Event(), []
    s = make(on_fault=lambda why: (said.append(why), ended.set()))
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.fake.error = ExpertsLostError("/cache/layer0: was overwritten while it was mapped")
    s.fake.gate.set()
    s.caller.wait(0, 1)
    for tag in (0, 1):
        assert isinstance(s.caller.outcomes[tag], DrainingError)
        assert s.caller.outcomes[tag].retryable
        assert "/cache/layer0: was overwritten while it was mapped" in str(s.caller.outcomes[tag])
    assert ended.wait(20)
    assert len(said) == 1
    assert said[0].startswith("cache: /cache/layer0: was overwritten while it was mapped (after a batch of 1 tokens on")
    assert s.engine.idle()


def test_counting_that_fails_does_not_end_the_computing(make):
    def broken(report):
        raise KeyError("no such series")

    s = make(observe=broken)
    for tag in (1, 2):
        s.run(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
        assert isinstance(s.caller.outcomes[tag], Answer)
