"""Scratch memory: one block for each device and stream, for all layers, rows and sizes.

Calls on one stream follow each other, so they never use it at the same time.  A graph holds addresses, so a block is
never given back: `reserve` takes the largest before graphs are captured, and what is outgrown later stays for those.
A graph uses the scratch of the stream that it was captured on, so graphs of one stream are replayed one after another.

A layout's parts hold anything at first: whatever ran before has written there.  Its counters are zero when a call
begins and when it has ended, because nothing else lies where they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from expertd_kernels.backends.device import capturing, stream_of

# Why it is so: decision 68 in DECISIONS.md.
__all__ = ["COUNTERS", "Layout", "Scratch", "Shapes", "held_bytes", "reserve", "scratch_of", "settle_counters"]

ALIGNMENT = 256
FIRST_BYTES = 1 << 20
COUNTERS = 2048
"""int32 words of a stream's counters."""
STREAMS = 64
"""Streams whose counters are made together: torch gives out 32 of each priority, over and over."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the parts of a call's scratch lie: one object for each distinct layout.

    counters: name -> (first, end) of the words that are zero between calls.  Who makes one other than zero sets it back
    in the same call: its last kernel does, or the host where a launch failed."""

    shapes: Shapes
    counters: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """name -> (first byte, bytes), 256-byte aligned."""
        at, out = 0, {}
        for name, (shape, dtype) in self.shapes.items():
            size = dtype.itemsize
            for n in shape:
                size *= n
            out[name] = (at, size)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return out

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parts, rounded up to the alignment."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for _, size in self.places.values())

    def of(self, memory: Tensor, words: Tensor) -> dict[str, Tensor]:
        """The parts in `memory` [>= nbytes] u8 and the counters among `words` [COUNTERS] int32, by name."""
        out = {
            name: memory[at : at + size].view(dtype).view(shape)
            for (name, (at, size)), (shape, dtype) in zip(self.places.items(), self.shapes.values(), strict=True)
        }
        return out | {name: words[first:end] for name, (first, end) in self.counters.items()}


@dataclass(eq=False)
class Scratch:
    """The scratch of one device and stream.  Used by one thread at a time."""

    device: torch.device
    words: Tensor  # [COUNTERS] int32, zero between calls
    _blocks: list[Tensor] = field(default_factory=list)
    _kept: dict[Layout, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held, outgrown blocks included."""
        return sum(b.numel() for b in self._blocks)

    def memory(self, nbytes: int) -> Tensor:
        """[>= nbytes] u8, the same for every call until it has to grow, by doubling."""
        if not self._blocks or self._blocks[-1].numel() < nbytes:
            self.reserve(max(nbytes, 2 * self._blocks[-1].numel() if self._blocks else FIRST_BYTES))
        return self._blocks[-1]

    def reserve(self, nbytes: int) -> None:
        """Hold a block of so many bytes, no more, unless there is one as large."""
        if self._blocks and self._blocks[-1].numel() >= nbytes:
            return
        with torch.inference_mode(False):  # or nobody could write there outside of that mode
            self._blocks.append(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self._kept.clear()

    def parts(self, layout: Layout) -> dict[str, Tensor]:
        """The tensors of the layout, by name."""
        memory = self.memory(layout.nbytes)
        with torch.inference_mode(False):  # as in reserve()
            return layout.of(memory, self.words)

    def kept_parts(self, layout: Layout) -> Mapping[str, Tensor]:
        """As parts(), made once for each object: for those of which there are few."""
        found = self._kept.get(layout)
        if found is None:
            found = self.parts(layout)  # growing forgets what was kept
            self._kept[layout] = found
        return found


_all: dict[tuple[torch.device, int], Scratch] = {}
_spare: dict[torch.device, list[Tensor]] = {}
"""Counters that no stream has yet, zero since before anything could run there."""


def _indexed(device: torch.device) -> torch.device:
    """ "cuda" -> "cuda:0", where that is the current one."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, getattr(torch, device.type).current_device())


def settle_counters(device: torch.device) -> None:
    """Make counters for streams to come.  While a graph is captured it would be too late: setting them to zero would
    become a part of the graph."""
    device = _indexed(device)
    spare = _spare.setdefault(device, [])
    if spare:
        return
    with torch.inference_mode(False):
        words = torch.zeros((STREAMS, COUNTERS), dtype=torch.int32, device=device)
    if words.device.type != "cpu":
        getattr(torch, words.device.type).synchronize(device)  # streams to come do not wait for this one
    spare += words.unbind()


def scratch_of(device: torch.device) -> Scratch:
    """That of the current stream of `device`."""
    device = _indexed(device)
    key = (device, stream_of(device))
    found = _all.get(key)
    if found is None:
        if not _spare.get(device):
            if capturing(device):
                raise RuntimeError("scratch: the first call on this stream is being captured; call the layer before")
            settle_counters(device)
        found = _all[key] = Scratch(device, _spare[device].pop())
    return found


def reserve(device: torch.device, nbytes: int) -> None:
    """Hold scratch of so many bytes for the current stream of `device`, before graphs are captured there."""
    scratch_of(device).reserve(nbytes)


def held_bytes(device: torch.device) -> int:
    """Bytes of scratch that all streams of `device` hold."""
    device = _indexed(device)
    return sum(s.nbytes for (where, _), s in _all.items() if where == device)
