"""From a layer's recipe to canonical weights: each part is read, checked, brought to the matrix's scheme, put in place.

The matrices are allocated once; beside them only the parts of one expert are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.finite import Watch, not_finite
from expertd_kernels.checkpoint.fit import convert, join_halves, split, split_layout
from expertd_kernels.checkpoint.memory import empty
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.checkpoint.recipe import LayerRecipe, MatrixRecipe
from expertd_kernels.checkpoint.repack import Repacked
from expertd_kernels.checkpoint.tensors import Stored, prefetch
from expertd_kernels.checkpoint.units import Piece
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, Weights
from expertd_kernels.weights.scheme import ScaleType

__all__ = ["assemble"]

MAX_WORKERS = 8
TASKS_PER_WORKER = 4
"""Enough that no worker waits long for the last, few enough that handing over costs nothing."""


def assemble(recipe: LayerRecipe) -> Weights:
    """Canonical weights of the recipe's experts, in its order.  CheckpointError names the tensor that is wrong."""
    seg, H, I = recipe.activation.segments, recipe.hidden_size, recipe.intermediate_size
    E = len(recipe.experts)
    w13 = _Filling("w13", recipe.w13, E, seg * I, H, seg)
    w2 = _Filling("w2", recipe.w2, E, H, I, 1)
    matrices = ((w13, ("gate", "up", "gate_up")), (w2, ("down",)))
    input_scales = torch.ones(E, 2) if recipe.input_scale else None
    prefetch(t for pieces in recipe.pieces for piece in pieces.values() for t in piece.unit.needed())

    def put(slot: int) -> None:
        parts = _parts(recipe, slot)
        finite = [w13.put(slot, segment, *part) for segment, part in enumerate(parts[:-1])]
        for all_finite, (matrix, projections) in zip((all(finite), w2.put(slot, 0, *parts[-1])), matrices, strict=True):
            if not all_finite:
                raise _weight_error(matrix, recipe, slot, projections)
        if input_scales is not None:
            input_scales[slot, 0] = torch.stack([_number(p.input_scale) for p, _ in parts[:-1]]).max()
            input_scales[slot, 1] = _number(parts[-1][0].input_scale)

    _run(put, E)
    for matrix, projections in matrices:
        _check_finite(matrix, recipe, projections)
    return Weights(w13.tensor(), w2.tensor(), recipe.activation, recipe.checkpoint_activation, input_scales)


def _run(put: Callable[[int], None], slots: int) -> None:
    """put(slot) for all slots, on several threads: reading waits for the disk, placing is bound by memory."""
    workers = min(MAX_WORKERS, torch.get_num_threads(), slots)
    if workers <= 1:
        for slot in range(slots):
            put(slot)
        return

    def run(part: range) -> None:
        for slot in part:
            put(slot)

    step = -(-slots // (workers * TASKS_PER_WORKER))
    with ThreadPoolExecutor(workers, "expertd-load") as pool:
        parts = [range(first, min(first + step, slots)) for first in range(0, slots, step)]
        list(pool.map(run, parts))  # raises the error of the first part that has one


def _parts(recipe: LayerRecipe, slot: int) -> list[tuple[Part, Layout]]:
    """(part, layout) of gate, up and down (up and down for an activation without mul)."""
    pieces = recipe.pieces[slot]
    read = {name: _read(piece) for name, piece in pieces.items()}
    down = (read["down"], pieces["down"].layout)
    if "gate_up" in pieces:
        whole, interleaved = pieces["gate_up"].layout, pieces["gate_up"].unit.interleaved
        half = split_layout(whole, interleaved)
        gate, up = split(read["gate_up"], whole, interleaved)
        return [(gate, half), (up, half), down]
    if recipe.mixed_rows:
        target, n, k = recipe.w13.scheme, recipe.intermediate_size, recipe.hidden_size
        first, second = (convert(read[p], pieces[p].layout.scheme, target, n, k) for p in ("gate", "up"))
        half = replace(pieces["gate"].layout, scheme=target)
        gate, up = split(join_halves(first, second), replace(half, n=2 * n), interleaved=True)
        return [(gate, half), (up, half), down]
    return [(read[n], pieces[n].layout) for n in ("gate", "up") if n in read] + [down]


def _read(piece: Piece) -> Part:
    """The part, with the shapes that its layout promised."""
    part, layout = piece.reader.read(piece.unit), piece.layout
    scheme, n, k = layout.scheme, layout.n, layout.k
    if scheme.element.quantized:
        want = scheme.scale_shape(n, k)
        for name, t, there in (("scales", part.scales, True), ("zeros", part.zeros, scheme.zeros)):
            if (t is not None) != there or (t is not None and tuple(t.shape) != want):
                got = "none" if t is None else list(t.shape)
                raise piece.unit.error(f"{name} {got}", f"{list(want) if there else 'none'} for {scheme.name} {n}x{k}")
    return part


def _number(t: Tensor | None) -> Tensor:
    assert t is not None, "the recipe promised an input scale"
    return t.reshape(()).float()


@dataclass
class _Filling:
    """A canonical matrix being filled."""

    name: str
    recipe: MatrixRecipe
    experts: int
    n: int
    k: int
    segments: int
    exact: bool = False
    t: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, E, n, k = self.recipe.scheme, self.experts, self.n, self.k
        scale_shape = (E, *s.scale_shape(n, k, self.segments))
        codes = CODE_DTYPE[s.element]
        self.t["codes"] = empty((E, n, -(-k // 2) if s.element.packed else k), codes)
        if s.scale is not ScaleType.NONE:
            self.t["scales"] = empty(scale_shape, SCALE_DTYPE[s.scale])
        if s.zeros:
            self.t["zeros"] = empty(scale_shape, codes)
        if s.global_scale:
            self.t["global_exact"] = torch.empty(E, self.segments, dtype=torch.float64)
        if self.recipe.factors:
            self.t["factors"] = torch.ones(E, k)
        if self.recipe.columns:
            self.t["columns"] = torch.arange(k, dtype=torch.int32).repeat(E, 1)
        if self.recipe.bias:
            self.t["bias"] = torch.empty(E, n)

    def put(self, slot: int, segment: int, part: Part, layout: Layout) -> bool:
        """Copy one projection of one expert to its rows.  Whether its weights are finite; quantized ones with scales
        are told by their scales."""
        part = convert(part, layout.scheme, self.recipe.scheme, layout.n, layout.k)
        finite = self._put_codes(self._rows("codes", slot, segment), part.codes)
        for name, value in (("scales", part.scales), ("zeros", part.zeros), ("bias", part.bias)):
            if name in self.t:
                assert value is not None
                _copy(self._rows(name, slot, segment), value)
        if "global_exact" in self.t:
            assert part.global_scale is not None
            self.exact |= part.global_scale.dtype is torch.float64
            self.t["global_exact"][slot, segment] = part.global_scale.reshape(()).double()
        if "factors" in self.t and part.factors is not None:
            self.t["factors"][slot] = part.factors
        if part.columns is not None:
            if "columns" not in self.t:
                raise CheckpointError(
                    f"{self.name}: an activation order came up that the recipe does not know; open anew"
                )
            self.t["columns"][slot] = part.columns
        return finite

    def _rows(self, name: str, slot: int, segment: int) -> Tensor:
        whole = self.t[name][slot]
        rows = whole.shape[0] // self.segments
        return whole[segment * rows : (segment + 1) * rows]

    @staticmethod
    def _put_codes(out: Tensor, codes: Tensor | Stored | Repacked) -> bool:
        """Whether they are finite as numbers of out's dtype."""
        watch = Watch.of(out.dtype)
        if isinstance(codes, Stored):
            codes.read_into(out, None if watch is None else watch.look)
        elif isinstance(codes, Repacked):
            assert watch is None, "only integers are repacked"
            codes.read_into(out)
        else:
            same = codes.element_size() == out.element_size()
            _copy(out if same else out.view(codes.dtype), codes.view(out.dtype) if same else codes)
            if watch is not None:
                watch.look(out.view(-1).view(torch.uint8).numpy())
        return watch is None or not watch.seen

    def tensor(self) -> QuantTensor:
        fields = dict(self.t)
        exact = fields.pop("global_exact", None)
        if exact is not None:
            fields["global_scales"] = exact.float()
            if self.exact:
                fields["global_exact"] = exact
        return QuantTensor(self.recipe.scheme, (self.experts, self.n, self.k), segments=self.segments, **fields)


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy(out: Tensor, t: Tensor) -> None:
    """out.copy_(t) in this thread alone: torch would start threads of its own in each of the workers."""
    if t.dtype == out.dtype:
        word = _WORD[out.element_size()]
        np.copyto(out.view(word).numpy(), t.view(word).numpy())
    else:
        out.copy_(t)


def _check_finite(matrix: _Filling, recipe: LayerRecipe, projections: tuple[str, ...]) -> None:
    """No scale, bias or second-level scale may be NaN or infinite."""
    for name in ("scales", "global_exact", "bias"):
        t = matrix.t.get(name)
        if t is None:
            continue
        bad = not_finite(t.float() if name == "global_exact" else t, matrix.recipe.scheme.scale)
        if bad is not None:
            slot, row = (int(i) for i in bad.nonzero()[0][:2])
            unit = _unit_of(recipe, slot, projections, row, t.shape[1])
            word = "bias" if name == "bias" else "scale"
            fused = [(s, x) for s, x in unit.siblings.items() if ("down" in s) == ("down" in projections)]
            tensors = [x.name for s, x in sorted((*unit.tensors.items(), *fused)) if word in s] or [unit.name]
            raise CheckpointError(f"{' or '.join(tensors)}: a {word} is NaN or infinite; want finite numbers")


def _weight_error(matrix: _Filling, recipe: LayerRecipe, slot: int, projections: tuple[str, ...]) -> CheckpointError:
    """Says which weight of an expert is not finite."""
    codes = matrix.t["codes"][slot]
    bad = not_finite(codes)
    assert bad is not None, "called where one was seen"
    row, column = (int(i) for i in bad.nonzero()[0])
    unit = _unit_of(recipe, slot, projections, row, len(codes))
    return unit.error(
        f"a weight (or its scale) is NaN or infinite: row {row}, column {column} of {matrix.name}", "finite numbers"
    )


def _unit_of(recipe: LayerRecipe, slot: int, projections: tuple[str, ...], row: int, rows: int) -> Unit:
    """Whose row of a matrix it is."""
    pieces = recipe.pieces[slot]
    names = [p for p in projections if p in pieces]
    return pieces[names[min(len(names) - 1, row * len(names) // rows)]].unit
