"""One source tree's half of against.py: makes layers and times them as it is told, a line of JSON for each line.

It runs with the tree's packages first on the path and reaches them through `expertd_kernels.bench.cuda` and `.cpu`,
whose names have been the same since before the rooms of the kernels moved.  What a tree draws (weights, inputs, routes)
comes from torch's generators by seed, so both sides compute the same layer on the same tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

Call = Callable[[], object]
WEIGHT_ONLY, ROUNDED = 1e-2, 5e-2
"""Relative errors that a CPU row may have: of bf16 products, and with activations rounded to 8 bits."""


class Cuda:
    """A layer on the GPU.  A call is the replay of a CUDA graph of one layer call for each input set."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.bench = b = importlib.import_module("expertd_kernels.bench.cuda")
        self.timing = importlib.import_module("expertd_kernels.bench.cuda_timing")
        self.shape, self.scheme = b.shape_of(asked["shape"]), b.Scheme.parse(asked["scheme"])
        how = b.ActivationQuant(asked["activations"])
        self.tolerance = float(b.tolerance("bf16", how))
        self.weights = b._weights(self.shape, self.scheme)
        row = asked["backend"]
        found = b._candidates(self.weights, self.shape.top_k, [row] if row else [], how)
        if not found:
            raise RuntimeError("no row serves this layer here; its refusals are above")
        self.backend, self.experts = next(iter(found.items()))

    def warm(self, tokens: Sequence[int]) -> None:
        """One call of each size: what it compiles stays on disk for other processes."""
        s = self.shape
        for M in tokens:
            inputs = self.bench.random_inputs(M, s.hidden_size, s.num_experts, s.top_k, device="cuda")
            self.experts(*inputs)
        self.bench.torch.cuda.synchronize()

    def point(self, M: int) -> tuple[float, list[Call], int]:
        s, seg = self.shape, self.shape.activation.segments
        nbytes = self.scheme.nbytes(seg * s.intermediate_size, s.hidden_size, seg)
        nbytes += self.scheme.nbytes(s.hidden_size, s.intermediate_size)
        sets = self.bench.input_sets(s, M, nbytes, "uniform")
        error = float(self.bench._error(self.experts, self.weights, sets[0]))
        call = self.bench._caller(self.experts, sets)
        device = self.bench.torch.device("cuda", 0)
        each = partial(self.timing._each, call, len(sets))
        return error, [partial(self.timing.captured(each, 1, device), 0)], len(sets)

    def time(self, calls: Sequence[Call], sets: int, seconds: float) -> list[float]:
        self.timing._events(calls)  # the first after the other side's turn finds nothing in the caches
        once = self.timing._events(calls)[0]
        rounds = int(min(60, max(3, seconds * 1e6 / once)))
        return [us / sets for us in self.timing._events(list(calls) * rounds)]


class Cpu:
    """A layer on this machine's cores.  The last-level cache is filled with other bytes before each call."""

    def __init__(self, asked: dict[str, Any]) -> None:
        new = importlib.util.find_spec("expertd_kernels.bench.cpu_layer")
        self.bench = b = importlib.import_module("expertd_kernels.bench." + ("cpu_layer" if new else "cpu"))
        native = b.native if hasattr(b, "native") else b.cpu_native
        self.shape = s = b.shape_of(asked["shape"])
        scheme = b.Scheme.parse(asked["scheme"])
        how = b.ActivationQuant(asked["activations"])
        self.tolerance = WEIGHT_ONLY if how is b.ActivationQuant.NONE else ROUNDED
        threads = asked["threads"]
        b.torch.set_num_threads(len(native.physical_cpus()))
        self.weights = b.random_weights(
            scheme, s.num_experts, s.hidden_size, s.intermediate_size, activation=s.activation, bias=s.bias
        )
        problem = b.problem_of(self.weights, b.detect_device("cpu"), top_k=s.top_k)
        packed = b.cpu.pack(self.weights, problem)
        self.backend = asked["backend"] or "cpu"
        context = native.context(None, threads)
        self.experts = b.cpu.CpuExperts(packed, replace(problem, activation_quant=how), context, backend=self.backend)
        self.known = b._known(s)
        self.wanted = b.reference(self.weights, *self.known)
        b.torch.set_num_threads(threads)
        self.evict = b.Evictor()

    def warm(self, tokens: Sequence[int]) -> None:
        for M in tokens:
            self.experts(*self.bench._inputs(self.shape, M)[0])

    def point(self, M: int) -> tuple[float, list[Call], int]:
        sets = self.bench._inputs(self.shape, M)
        return self._error(sets[0]), self.bench._prepared(self.experts, sets), 1

    def _error(self, inputs: Sequence[Any]) -> float:
        """Of the known tokens, as the first of a whole batch: the number of rows decides which kernel computes."""
        torch, n = self.bench.torch, min(inputs[0].shape[0], self.known[0].shape[0])
        batch = [torch.cat((mine[:n], other[n:])) for mine, other in zip(self.known, inputs, strict=True)]
        out = torch.full_like(batch[0], float("nan"))
        self.experts(*batch, out=out)
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        return float(self.bench.relative_error(out[:n], self.wanted[:n]))

    def time(self, calls: Sequence[Call], sets: int, seconds: float) -> list[float]:
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < end:
            self.evict()
            time.sleep(self.bench.PAUSE_S)
            start = time.perf_counter()
            calls[len(taken) % len(calls)]()
            taken.append((time.perf_counter() - start) * 1e6 / sets)
        return taken


def machine(device: str) -> dict[str, str]:
    return dict(importlib.import_module(f"expertd_kernels.bench.{device}").machine())


class Side:
    """What a line may ask for: machine, layer, warm, point, time."""

    def __init__(self) -> None:
        self.layer: Cuda | Cpu | None = None
        self.calls: Sequence[Call] = ()
        self.sets = 1

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked["do"]
        if do == "machine":
            return machine(asked["device"])
        if do == "layer":
            self.layer, self.calls = None, ()  # what the layer before held is free while this one is made
            self.layer = Cuda(asked) if asked["device"] == "cuda" else Cpu(asked)
            return {"backend": self.layer.backend, "tolerance": self.layer.tolerance}
        assert self.layer is not None, "a layer comes first"
        if do == "warm":
            self.layer.warm(asked["tokens"])
            return {}
        if do == "point":
            self.calls = ()
            error, self.calls, self.sets = self.layer.point(asked["M"])
            return {"error": error}
        return {"us": self.layer.time(self.calls, self.sets, asked["seconds"])}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    side = Side()
    for line in sys.stdin:
        try:
            answer = side.answer(json.loads(line))
        except Exception as e:
            answer = {"fault": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
