"""Times of calls on a CUDA GPU: by events, by the replay of graphs, and the ceilings that bound them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from expertd_kernels.measure.timing import captured
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["Ceilings", "ceilings", "graph_times"]


@dataclass(frozen=True)
class Ceilings:
    """Measured on this GPU in this run: GB/s of a plain read, TFLOP/s of 8192 ** 3 products in bf16 and in e4m3 (0.0
    where torch has no such product here)."""

    read_gb_s: float
    bf16_tflop_s: float
    e4m3_tflop_s: float = 0.0

    def tflop_s(self, activations: ActivationQuant) -> float:
        """The peak of the tensor cores that multiply activations rounded like this."""
        eight_bits = activations is not ActivationQuant.NONE and self.e4m3_tflop_s > 0
        return self.e4m3_tflop_s if eight_bits else self.bf16_tflop_s


def _events(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Microseconds of each call on the current stream; the stream never runs empty between them."""
    marks = []
    for call in calls:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in marks]


def ceilings() -> Ceilings:
    """The two rates that bound a layer, measured here: medians of 15."""
    from expertd_kernels.bench.cuda_read import read_all

    data = torch.randn(1 << 30, device="cuda")
    read = statistics.median(_events([partial(read_all, data)] * 18)[3:])
    gb_s = data.numel() * 4 / read / 1e3
    del data
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    product = statistics.median(_events([partial(torch.mm, a, b, out=c)] * 18)[3:])
    return Ceilings(gb_s, 2 * 8192**3 / product / 1e6, _e4m3_tflop_s(a, b))


def _e4m3_tflop_s(a: Tensor, b: Tensor) -> float:
    """TFLOP/s of a product of e4m3 matrices like `a` and `b`; 0.0 where this torch or GPU has none."""
    if torch.cuda.get_device_capability() < (8, 9):
        return 0.0
    x, y = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=a.device)
    call = partial(
        torch.ops.aten._scaled_mm.default, x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    try:
        us = statistics.median(_events([call] * 18)[3:])
    except RuntimeError as e:
        print(f"no ceiling for e4m3 products: {e}", file=sys.stderr)
        return 0.0
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] / us / 1e6


def graph_times(backends: Sequence[Callable[[int], object]], sets: int, budget_ms: float = 40.0) -> list[float]:
    """Median microseconds a call for each backend, call(i) on input set i, their graphs replayed in turns.  NaN for one
    that no graph can hold; its exception goes to stderr."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = {}
    for place, call in enumerate(backends):
        try:
            graphs[place] = partial(captured(partial(_each, call, sets), 1, device), 0)
        except Exception as e:
            print(f"no graph: {type(e).__name__}: {e}", file=sys.stderr)
    medians = dict.fromkeys(range(len(backends)), math.nan)
    if graphs:
        replays = list(graphs.values())
        _events(replays)  # a graph's first replay uploads it
        once = sum(_events(replays))
        rounds = int(min(60, max(7, budget_ms * 1e3 * len(replays) / once)))
        times = _events(replays * (rounds + 1))[len(replays) :]
        medians |= {p: statistics.median(times[b :: len(replays)]) / sets for b, p in enumerate(graphs)}
    return list(medians.values())


def _each(call: Callable[[int], object], sets: int, _: int) -> None:
    """call(0), ..., call(sets - 1): one graph holds them all."""
    for i in range(sets):
        call(i)
