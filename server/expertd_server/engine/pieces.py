"""Which pieces of a batch are captured as CUDA graphs, which there are, and how many there may be.

The plan of memory counts the graphs of numbers of routes that are known at the boot: each layer's top-k and
--warm-up-routes (sizes.graph_count).  Callers may send any number of routes, router weights on the input, and rows that
lie on the device already: those pieces are captured as they come, MOST_OTHERS of them, and beyond that such batches are
launched one by one.  None is given up for another: a caller who varies them would have the device capture all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

from expertd_server.engine import core as c
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import MOST_OTHERS, STREAMED_ROWS, WHOLE_ROWS

__all__ = ["Piece", "Pieces", "Ran", "collecting"]

_WORTH = 2
"""A size is captured when it has come this often."""
_MOST_SEEN = 1 << 16


class Ran(Protocol):
    """Of core.Run, what tells one batch's graphs from another's.  whole: all its rows lie on the device."""

    batch_slot: int
    top_k: int
    router_weight_on_input: int
    whole: int


class Piece(NamedTuple):
    """generation: of the layer that it belongs to, 0 = of all of a hidden size.  part: core.WHOLE and so on.  last:
    whether router weights go on the input, or the hidden size."""

    generation: int
    part: int
    batch_slot: int
    rows: int
    top_k: int
    last: int


def collecting(layer: ServedLayer) -> tuple[int, int]:
    """The parts that bring a batch of `layer`: of themselves, and where copy engines have brought the hidden states."""
    return (c.COLLECT_E4M3, c.COLLECT_STAGED) if layer.takes_e4m3 else (c.COLLECT, c.COLLECT_ROUTES)


class Pieces:
    """For the engine's thread.  warm_routes: numbers of routes a token that the plan counts, besides each layer's."""

    def __init__(self, warm_routes: Iterable[int] = (), most_others: int = MOST_OTHERS) -> None:
        self._warm, self._most_others = frozenset(warm_routes), most_others
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._kept: dict[Piece, Any] = {}
        self._nbytes: dict[Piece, int] = {}
        self._others: set[Piece] = set()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Device memory that they took, of those that are kept."""
        return sum(self._nbytes.values())

    @property
    def others(self) -> int:
        """How many there are that the plan does not count."""
        return len(self._others)

    @property
    def full(self) -> bool:
        """Whether no more of them are captured."""
        return self.others >= self._most_others

    def wanted(self, layer: ServedLayer, run: Ran, rows: int) -> list[Piece]:
        """What is to be captured of a batch of this size, which has just run: nothing the first time."""
        flag, k = int(run.router_weight_on_input), int(run.top_k)
        size = (layer.generation, run.batch_slot, rows, k, flag)
        planned = not flag and self._known(layer, k)
        if not planned and self.full:
            return []
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        self._seen[size] += 1
        if self._seen[size] < _WORTH:
            return []
        own, batch_slot, H = layer.generation, int(run.batch_slot), layer.hidden_size
        bring, streamed = collecting(layer)
        pieces = [
            Piece(own, c.EXPERTS, batch_slot, rows, k, flag),
            Piece(0, bring, batch_slot, rows, k, H),
            Piece(0, c.DELIVER, batch_slot, rows, 0, H),
        ]
        if rows >= STREAMED_ROWS:
            pieces.append(Piece(0, streamed, batch_slot, rows, k, H))
        if rows <= WHOLE_ROWS or (run.whole and not self.full):
            pieces.append(Piece(own, c.WHOLE, batch_slot, rows, k, flag))
        return [p for p in pieces if p not in self._kept]

    def like(self, layer: ServedLayer, generation: int) -> list[Piece]:
        """What the layer of this generation has and `layer`, of the same sizes, has not."""
        own = [p._replace(generation=layer.generation) for p in self._kept if p.generation == generation]
        return [p for p in own if p not in self._kept and (self._counted(layer, p) or not self.full)]

    def of(self, generation: int) -> dict[Piece, Any]:
        """The graphs of a layer."""
        return {p: graph for p, graph in self._kept.items() if p.generation == generation}

    def add(self, layer: ServedLayer, piece: Piece, graph: Any, nbytes: int) -> None:
        """It was captured, and took so much of the device's memory."""
        self._kept[piece], self._nbytes[piece] = graph, nbytes
        if not self._counted(layer, piece):
            self._others.add(piece)

    def _known(self, layer: ServedLayer, top_k: int) -> bool:
        return top_k == layer.top_k or top_k in self._warm

    def _counted(self, layer: ServedLayer, p: Piece) -> bool:
        """Whether sizes.graph_count counts it."""
        if p.part == c.DELIVER:
            return True
        if p.part in collecting(layer):
            return self._known(layer, p.top_k)
        return self._known(layer, p.top_k) and not p.last and (p.part == c.EXPERTS or p.rows <= WHOLE_ROWS)

    def forget(self, generations: Collection[int]) -> list[Any]:
        """The graphs of these layers, which are kept no more."""
        gone = [p for p in self._kept if p.generation in generations]
        self._others.difference_update(gone)
        for size in [size for size in self._seen if size[0] in generations]:
            del self._seen[size]
        for p in gone:
            del self._nbytes[p]
        return [self._kept.pop(p) for p in gone]

    def clear(self) -> list[Any]:
        """All graphs, which are kept no more."""
        graphs = list(self._kept.values())
        self._kept.clear()
        self._nbytes.clear()
        self._others.clear()
        return graphs
