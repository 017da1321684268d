"""Threads that stand apart: the serving context is never theirs."""

from __future__ import annotations

import threading

import pytest
import torch

from expertd_kernels import decide, detect_device
from expertd_kernels.native import library as native
from expertd_kernels.packed.builder import experts_of, pack, problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.quantize import quantize

pytestmark = pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error())


class _Recording:
    """The library, with the context of each call."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.contexts: list[tuple[str, int | None]] = []
        self._real = native.library()
        for name in names:
            setattr(self, name, self._recorded(name))

    def _recorded(self, name: str):
        def call(context, *rest):
            self.contexts.append((name, context.value))
            return getattr(self._real, name)(context, *rest)

        return call

    def __getattr__(self, name: str):
        return getattr(self._real, name)


def _on_a_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_that_stands_apart_packs_and_computes_on_a_context_that_serves_no_requests(monkeypatch):
    weights = quantize(random_weights("bf16", 2, 256, 128, seed=1), "int4_g128")
    problem = problem_of(weights, detect_device("cpu"), top_k=2)
    backend = decide(problem).require()
    recording = _Recording(("expertd_cpu_pack", "expertd_cpu_forward"))
    monkeypatch.setattr(native, "library", lambda: recording)
    batch = random_inputs(3, 256, 2, 2, dtype=torch.bfloat16, seed=2)
    packed = pack(backend, weights, problem)
    experts = experts_of(backend, packed, problem)
    want = experts(*batch)
    serving = {context for _, context in recording.contexts}
    assert serving == {native.context().handle.value}

    recording.contexts.clear()
    found = []

    def apart() -> None:
        native.stand_apart()
        again = experts_of(backend, pack(backend, weights, problem), problem)
        found.extend([again, again(*batch)])

    _on_a_thread(apart)
    again, got = found
    assert {name for name, _ in recording.contexts} == {"expertd_cpu_pack", "expertd_cpu_forward"}
    assert not serving & {context for _, context in recording.contexts}
    assert torch.equal(got, want)
    assert torch.equal(again.packed.tensors["w13.stream"], packed.tensors["w13.stream"])

    recording.contexts.clear()
    assert again.context.handle.value in serving  # as the engine calls it, on a thread that never asked for another
    assert torch.equal(again(*batch), want)  # of a layer that was made apart, on a thread that serves
    assert {context for _, context in recording.contexts} == serving


def test_the_other_context_has_as_many_threads_and_is_made_once():
    found = []

    def apart() -> None:
        native.stand_apart()
        found.extend([native.context().here, native.context().here])

    _on_a_thread(apart)
    usual = native.context()
    assert found[0] is found[1] is not usual
    assert (found[0].threads, found[0].level) == (usual.threads, usual.level)
    assert usual.here is usual
