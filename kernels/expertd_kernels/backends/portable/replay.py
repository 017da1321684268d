"""A layer's launches, remembered.  Triton spends about 100 us of the host on each launch with this many constants; a
call of a kind that was seen before (sizes, strides, alignments, plan, stream) launches the compiled kernels directly.

`compiled[grid](*arguments)` takes all arguments in the order of the kernel's signature, constants included.  That is
Triton's inside, so each layer's first recording has to prove itself: replayed, it must give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Why it is so: decision 30 in DECISIONS.md.
__all__ = ["MOST_RECORDINGS", "MOST_TOKENS", "Recording", "kind_of", "proves"]

log = logging.getLogger(__name__)

MOST_TOKENS = 1024
"""Beyond, a layer computes for longer than its launches take."""
MOST_RECORDINGS = 64


@dataclass(frozen=True)
class _Launch:
    """arguments with holes: (position, which of the call's tensors)."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]
    holes: tuple[tuple[int, int], ...]


@dataclass
class Recording:
    """Launches of one call.  converted: scratch for x where x has to be rounded to bf16 first, else None."""

    converted: Tensor | None = None
    launches: list[_Launch] = field(default_factory=list)

    def add(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        names: Sequence[str],
        args: Sequence[Any],
        constants: dict[str, Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """names: of the kernel's parameters; args: the first of them; tensors: x, ids, weights, out of this call."""
        arguments = [*args, *(constants[n] for n in names[len(args) :])]
        holes = tuple((i, j) for i, a in enumerate(arguments) for j, t in enumerate(tensors) if a is t)
        for i, _ in holes:
            arguments[i] = None  # the caller's tensors are not kept
        x, y, z = (*grid, 1, 1)[:3]
        self.launches.append(_Launch(compiled, (x, y, z), arguments, holes))

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        if self.converted is not None:
            x = self.converted.copy_(x)
        tensors = (x, ids, weights, out)
        for launch in self.launches:
            arguments = launch.arguments.copy()
            for position, which in launch.holes:
                arguments[position] = tensors[which]
            launch.compiled[launch.grid](*arguments)


def kind_of(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, *rest: Any) -> tuple[Any, ...]:
    """What compiled kernels depend on: equal for two calls, the same launches serve both."""
    aligned = [t.data_ptr() % 16 == 0 for t in (x, ids, weights, out)]
    return (x.dtype, x.stride(), ids.shape, out.dtype, out.stride(), *aligned, *rest)


def proves(recording: Recording, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> bool:
    """Whether the replay of the call that gave `out` gives the same bits.  Waits for the device; logs why not."""
    again = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).fill_(float("nan"))
    try:
        recording.run(x, ids, weights, again)
    except Exception as e:  # whatever another version of Triton raises: the ordinary launches still work
        log.warning("remembered launches do not work with this Triton, launching as usual: %s: %s", type(e).__name__, e)
        return False
    same = bool(((out == again) | (out.isnan() & again.isnan())).all())
    if not same:
        log.warning("remembered launches gave another result with this Triton, launching as usual")
    return same
