"""What batches take at each device, measured once for each kind of layer at the start, for `expertctl plan`."""

from __future__ import annotations

import ctypes as C
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import DirectExperts, Experts
from expertd_kernels.measure.surface import Point, batch_of, grid, measured_surface
from expertd_kernels.measure.timing import captured
from expertd_kernels.native.library import call_bytes
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.boot.prepare import Workshop

__all__ = ["surface_of"]

log = logging.getLogger(__name__)

_DIRECT = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.c_char_p)


def surface_of(
    experts: Experts,
    slots: Sequence[int],
    problem: Problem,
    workshop: Workshop,
    *,
    device: str,
    capturable: bool = False,
    measure: bool = True,
) -> tuple[Point, ...]:
    """Of a layer's experts, for batches that have routes to `slots` alone.

    problem     of those experts, with their number
    device      as in --device: measured once for each of them and each kind of layer
    capturable  whether a server replays calls from CUDA graphs
    measure     whether it may be measured now; else () where it was not before
    """
    key = (device, experts.backend, str(replace(problem, packages={})))
    if key not in workshop.surfaces and measure:
        timed = _Timed(experts, slots, problem, workshop, capturable)
        points = grid(len(slots), problem.top_k, workshop.max_tokens)
        try:
            with workshop.stage("surface"), torch.inference_mode():
                workshop.surfaces[key] = measured_surface(timed, points)
        except (RuntimeError, ValueError, MemoryError) as e:  # the layer is checked: it serves without a forecast
            log.warning("%s: what batches take cannot be measured: %s", device, e)
            workshop.surfaces[key] = ()
    return workshop.surfaces.get(key, ())


class _Timed:
    """timed(experts, routes, turn): seconds of such a batch, as the engine computes it."""

    def __init__(
        self, experts: Experts, slots: Sequence[int], problem: Problem, workshop: Workshop, capturable: bool
    ) -> None:
        self._experts, self._problem, self._workshop = experts, problem, workshop
        self._slots = torch.tensor(list(slots))
        self._graphs = capturable and workshop.device.type == "cuda" and torch.version.hip is None
        self._direct = experts.direct() if isinstance(experts, DirectExperts) else None

    def __call__(self, experts: int, routes: int, turn: int) -> float:
        p, device = self._problem, self._workshop.device
        ids, weights = batch_of(self._slots, experts, routes, p.top_k, turn)
        x = torch.randn(len(ids), p.hidden_size).to(COMPUTE_DTYPE[p.compute_dtype])
        batch = tuple(t.to(device) for t in (x, ids, weights))
        return float(self._workshop.call(functools.partial(self._seconds, batch)))

    def _seconds(self, batch: tuple[Tensor, ...]) -> float:
        x, ids, weights = batch
        out, device = torch.empty_like(x), self._workshop.device
        wait: Callable[[Any], Any] = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda _: None

        def call(_: int) -> object:
            return self._experts(x, ids, weights, out=out)

        run: Callable[[int], object] = captured(call, 1, device) if self._graphs else call
        wait(device)
        begin = time.perf_counter()
        if self._direct is None or not self._called(batch, out):
            begin = time.perf_counter()
            run(0)
            wait(device)
        return time.perf_counter() - begin

    def _called(self, batch: tuple[Tensor, ...], out: Tensor) -> bool:
        assert self._direct is not None
        x, ids, weights = batch
        wide = x.dtype is torch.float32
        addresses = (x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        call = call_bytes(*addresses, len(x), x.shape[1], ids.shape[1], wide, wide, False)
        function, context, experts = self._direct
        return int(_DIRECT(function)(context, experts, call)) == 0
