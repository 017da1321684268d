"""A load like a model that generates: one caller goes through the layers in turn, step after step, each layer behind
the answer of the one before it.

What it shows is the time between a layer's hidden states and its output as a model's author meets it: nothing overlaps,
nobody else's requests are joined, and the server sleeps between two calls or does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.common.percentiles import Durations, Summary
from expertd_client.clients.forwarder import Forwarder
from expertd_client.requests.request import Request

__all__ = ["Generation", "generate"]


@dataclass(frozen=True, slots=True)
class Generation:
    """Of one transport.

    step, layer   a whole turn; one call
    slowest       number of the layer whose median is the largest, and that median in seconds
    kernel_s      median of the server's time in the experts of a call
    """

    transport: str
    step: Summary
    layer: Summary
    slowest: tuple[int, float]
    kernel_s: float


def generate(client: Forwarder, transport: str, turn: Sequence[Request], steps: int, warmup: int = 2) -> Generation:
    """Sends the requests of `turn` one after the other, `warmup` + `steps` times.  Raises what forward() does."""
    step, layer = Durations(), Durations()
    seconds, kernels = np.zeros((steps, len(turn))), np.zeros((steps, len(turn)))
    for n in range(-warmup, steps):
        begin = before = time.perf_counter()
        for at, request in enumerate(turn):
            with client.forward_request(request) as answer:
                now = time.perf_counter()
                if n >= 0:
                    layer.add(now - before)
                    seconds[n, at], kernels[n, at] = now - before, answer.timing.kernel_ns * 1e-9
            before = time.perf_counter()
        if n >= 0:
            step.add(before - begin)
    medians = np.median(seconds, axis=0)
    worst = int(medians.argmax())
    slowest = (turn[worst].layer, float(medians[worst]))
    return Generation(transport, step.summary(), layer.summary(), slowest, float(np.median(kernels)))
