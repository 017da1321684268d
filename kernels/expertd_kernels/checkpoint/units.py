"""From a layer's tensors to units: one projection of one expert, with the format that it is in and what will come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.families import ModelConfig
from expertd_kernels.checkpoint.formats import Format, detect, reader_of
from expertd_kernels.checkpoint.names import LayerTensors
from expertd_kernels.checkpoint.quant_config import overrides_for
from expertd_kernels.checkpoint.readers.protocol import Layout, Reader, Unit
from expertd_kernels.checkpoint.tensors import Stored

__all__ = ["Piece", "Units"]


@dataclass(frozen=True)
class Piece:
    """A unit, who reads it, and what will come."""

    unit: Unit
    format: Format
    layout: Layout

    @property
    def reader(self) -> Reader:
        return reader_of(self.format)


class Units:
    """Makes the units of a layer and finds the format of each, once for all that look alike."""

    def __init__(self, model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors) -> None:
        self.model, self.quant, self.tensors = model, quant, tensors
        self.gated = model.activation().gated
        self.fused = _is_fused(tensors)
        self.num_experts = _count_experts(model, tensors, self.fused)
        self._seen: dict[object, tuple[Piece, int]] = {}
        H, I = model.hidden_size(), model.intermediate_size(tensors.layer)
        self._sizes = {"gate": (I, H), "up": (I, H), "gate_up": (2 * I, H), "down": (H, I)}
        self._input_first = self._fused_input_first()

    def pieces(self, expert: int) -> dict[str, Piece]:
        return {projection: self._piece(self._unit(expert, projection)) for projection in self._wanted()}

    def _wanted(self) -> tuple[str, ...]:
        if not self.gated:
            return ("up", "down")
        return ("gate_up", "down") if self.fused else ("gate", "up", "down")

    def _unit(self, expert: int, projection: str) -> Unit:
        t, family = self.tensors, self.model.family
        if self.fused:
            short = t.fused_names.get(projection) or self._fused_short(projection)
            name = f"{t.prefix}.{short}[{expert}]"
            found = {s: _cut(x, expert, self.num_experts) for s, x in t.fused.get(projection, {}).items()}
            siblings: dict[str, Stored] = {}
        else:
            name = t.names.get((expert, projection)) or f"{t.prefix}.{expert}.{self._short(projection)}"
            found = t.apart.get(expert, {}).get(projection, {})
            siblings = self._siblings(expert)
        if not found:
            raise CheckpointError(f"{name}: the projection is missing; layer {t.layer} has {self.num_experts} experts")
        n, k = self._sizes[projection]
        return Unit(
            name,
            t.layer,
            expert,
            projection,
            n,
            k,
            found,
            siblings,
            self.fused,
            self.fused and self._input_first,
            self.fused and family.interleaved and projection == "gate_up",
            self.quant,
            overrides_for(self.quant, name.partition("[")[0]),
        )

    def _fused_input_first(self) -> bool:
        """Whether fused matrices lie [E, K, N]: as the shape of one of them says, which holds for its square partner,
        too (whoever writes them turns both or neither); where no shape says it, as the family does."""
        for projection, found in self.tensors.fused.items():
            n, k = self._sizes[projection]
            stored = found.get("", found.get("weight"))
            if stored is not None and n != k and stored.shape[1:] in ((n, k), (k, n)):
                return stored.shape[1:] == (k, n)
        return self.model.family.transposed

    def _short(self, projection: str) -> str:
        """What another expert's tensors call this projection: "up_proj", "w3"."""
        names = (name.rpartition(".")[2] for (_, p), name in self.tensors.names.items() if p == projection)
        return next(names, projection)

    def _fused_short(self, projection: str) -> str:
        """What the family calls a fused projection whose partner is there."""
        present = set(self.tensors.fused_names.values())
        pair = next((pair for pair in self.model.family.fused if present & set(pair)), (projection, projection))
        return pair[projection == "down"]

    def _siblings(self, expert: int) -> dict[str, Stored]:
        t = self.tensors
        return {
            f"{t.fused_names[p]}_{s}".rstrip("_"): _cut(x, expert, self.num_experts)
            for p, found in t.fused.items()
            for s, x in found.items()
        }

    def _piece(self, unit: Unit) -> Piece:
        key = (
            unit.projection,
            tuple(sorted((s, t.dtype, t.shape) for s, t in unit.tensors.items())),
            repr(unit.overrides) if unit.overrides else "",
        )
        known, count = self._seen.get(key, (None, 0))
        row = known.format if known else detect(unit)
        reader = reader_of(row)
        layout = known.layout if known and not _own_layout(reader, unit) else reader.layout(unit)
        if unit.has("bias"):
            unit.expect("bias", (layout.n,), "F32", "BF16", "F16")
        unit.layout = layout
        piece = Piece(unit, row, layout)
        self._seen[key] = (known or piece, count + 1)
        return piece

    def require_alike(self) -> None:
        """Units of one format have tensors of the same names and types: what one has and others lack was lost, or does
        not belong there.  CheckpointError names the one that is in the minority, of as many the one that lacks it."""
        common: dict[str, Piece] = {}
        for piece, _ in sorted(self._seen.values(), key=lambda seen: (-seen[1], -len(seen[0].unit.tensors))):
            first = common.setdefault(piece.format.name, piece)
            _require_alike(piece, first.unit)


def _require_alike(piece: Piece, other: Unit) -> None:
    """piece: the odd one of the two.  Unquantized weights may be of several types: they are widened."""
    unit, free = piece.unit, {"weight", ""} if piece.format.reader == "plain" else set()
    for suffix, t in other.tensors.items():
        mine = unit.tensors.get(suffix)
        if mine is None:
            raise unit.error(f"tensor {suffix!r} is missing", f"one, as {other.name} has")
        if mine.dtype != t.dtype and suffix not in free:
            raise unit.error(f"dtype {mine.dtype}", f"{t.dtype}, as {t.name} is", suffix)
    extra = sorted(set(unit.tensors) - set(other.tensors))
    if extra:
        raise unit.error(f"has {extra[0]!r}", f"none, as {other.name} has none", extra[0])


def _own_layout(reader: Reader, unit: Unit) -> bool:
    """Whether the unit's layout cannot be taken over from one that looks alike: it may have an order or factors of its
    own."""
    if unit.has("pre_quant_scale"):
        return True
    if not any(s.endswith("g_idx") for s in unit.tensors):
        return False
    may: Callable[[Unit], bool] | None = getattr(reader, "may_be_ordered", None)
    return may is None or may(unit)


def _cut(t: Stored, expert: int, num_experts: int) -> Stored:
    """The expert's part of a fused tensor; numbers that belong to all experts stay as they are."""
    return t.cut(expert) if t.shape and t.shape[0] == num_experts and t.shape != (1,) else t


def _is_fused(tensors: LayerTensors) -> bool:
    """Whether the weights are [E, ...] tensors.  Both kinds at once are a broken file, scales apart from their weights
    are not (the fp8 hybrid: weights one by one, scales fused)."""
    weights = {"", "weight", "blocks", "weight_packed", "qweight"}
    fused = [t for found in tensors.fused.values() for s, t in found.items() if s in weights]
    if fused and tensors.apart:
        other = next(iter(tensors.names.values()))
        raise CheckpointError(f"{fused[0].name}: fused experts beside single ones ({other}); want one of the two")
    return not tensors.apart


def _count_experts(model: ModelConfig, tensors: LayerTensors, fused: bool) -> int:
    """E of the layer.  By the config where it says; the tensors must agree."""
    want = model.num_experts()
    if not fused:
        have = max(tensors.apart) + 1
        if want and have > want:
            name = next(iter(tensors.names[have - 1, p] for p in tensors.apart[have - 1]))
            raise CheckpointError(f"{name}: config.json says {want} experts (0 to {want - 1})")
        return want or have
    leading = {t.shape[0]: t for found in tensors.fused.values() for t in found.values() if len(t.shape) > 1}
    if not leading:
        raise CheckpointError(f"{tensors.prefix}: no [E, ...] tensor of weights there")
    for size, t in leading.items():
        if size != (want or max(leading)):
            raise CheckpointError(
                f"{t.name}: shape {list(t.shape)}, want {want or max(leading)} experts in its first dimension"
            )
    return want or max(leading)
