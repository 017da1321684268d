"""What is held: layers that are ready to compute, and the set of them at one moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from expertd_kernels.common.protocol import Experts

# Why it is so: decision 84 in DECISIONS.md.
__all__ = ["Holding", "ServedLayer"]

_generations = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ServedLayer:
    """A layer that is ready to compute.

    num_experts   of the whole model; held: global ids of the experts here, in the order of their slots
    experts       the backend's; backend: its name, "a+b" where two share the work
    capturable    whether its calls may be captured in a CUDA graph
    in_place      whether the output may lie where the hidden states do
    takes_e4m3    whether a GPU's batches are brought to the experts as e4m3 with a scale for 128 columns
    plan          (tokens up to, backend), the last without a bound; empty: `backend` computes every batch
    measured      (tokens, routes a token, nanoseconds) of batches that were computed before it was served
    generation    different for every ServedLayer of this process, also of the same layer: what is kept for it (a queue,
                  graphs) is kept by this number
    """

    layer: int
    num_experts: int
    held: Sequence[int]
    top_k: int
    hidden_size: int
    intermediate_size: int
    experts: Experts
    backend: str
    capturable: bool = False
    in_place: bool = False
    takes_e4m3: bool = False
    plan: tuple[tuple[int | None, str], ...] = ()
    measured: tuple[tuple[int, int, int], ...] = ()
    generation: int = field(init=False, default_factory=_generations.__next__)
    slot_of: NDArray[np.int32] = field(init=False, repr=False)
    """[num_experts + 1] int32: slot of each global id, -1 = not here; the last entry answers for the id -1."""

    def __post_init__(self) -> None:
        table = np.full(self.num_experts + 1, -1, dtype=np.int32)
        table[np.asarray(self.held, dtype=np.int64)] = np.arange(len(self.held), dtype=np.int32)
        object.__setattr__(self, "slot_of", table)

    def backend_at(self, tokens: int) -> str:
        """The backend that computes a batch of `tokens`."""
        return next((name for most, name in self.plan if most is None or tokens <= most), self.backend)


class Holding(Mapping[int, ServedLayer]):
    """The layers held at one moment, by index, ascending; never changes.  A later moment has another Holding.

    version   of their weights, 0 = they have none
    others    versions of layers that are of another one, by index: while an update rolls
    before    what they replaced, for requests that ask for its version; None = it is not held any more
    """

    def __init__(
        self,
        layers: Iterable[ServedLayer] = (),
        version: int = 0,
        before: Holding | None = None,
        others: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._layers = {s.layer: s for s in sorted(layers, key=lambda s: s.layer)}
        self.version, self.before, self.others = version, before, others

    def version_of(self, index: int) -> int:
        """Of the weights that a layer is served with."""
        return self.others.get(index, self.version)

    def versions(self, index: int) -> list[int]:
        """Of a layer's weights that requests can ask for, the one that is served first."""
        return [h.version_of(index) for h in (self, self.before) if h is not None and index in h]

    def find(self, index: int, version: int = 0) -> ServedLayer | None:
        """version: of its weights, 0 = whichever is served.  None: that layer is not held, or not of that version."""
        if version and version != self.version_of(index):
            before = self.before
            return None if before is None or version != before.version_of(index) else before.find(index)
        return self._layers.get(index)

    def __getitem__(self, index: int) -> ServedLayer:
        return self._layers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
