"""What a layer's matrices will be, found from names, shapes, dtypes and the configuration: no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.families import ModelConfig
from expertd_kernels.checkpoint.fit import common, split_layout
from expertd_kernels.checkpoint.formats import Format, detect, reader_of
from expertd_kernels.checkpoint.names import LayerTensors
from expertd_kernels.checkpoint.quant_config import overrides_for
from expertd_kernels.checkpoint.readers.protocol import Layout, Reader, Unit
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.scheme import ActivationQuant, Element, Scheme

__all__ = ["LayerPlan", "MatrixPlan", "Piece", "plan_experts", "plan_layer"]


@dataclass(frozen=True)
class Piece:
    """A unit, who reads it, and what will come."""

    unit: Unit
    format: Format
    layout: Layout

    @property
    def reader(self) -> Reader:
        return reader_of(self.format)


@dataclass(frozen=True)
class MatrixPlan:
    """One of the two canonical matrices: its scheme and which optional tensors it has."""

    scheme: Scheme
    bias: bool
    columns: bool


@dataclass(frozen=True)
class LayerPlan:
    """How a layer will be read.

    num_experts  of the whole layer; experts: those that pieces are for, in order
    pieces       for each of these experts its pieces by projection
    mixed_rows   gate and up are the two halves of interleaved rows, see _mixed_rows
    input_scale  static activation scales come with every piece
    """

    layer: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    experts: tuple[int, ...]
    pieces: tuple[Mapping[str, Piece], ...]
    w13: MatrixPlan
    w2: MatrixPlan
    checkpoint_activation: ActivationQuant
    input_scale: bool
    mixed_rows: bool
    notes: tuple[str, ...]


def plan_layer(model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors) -> LayerPlan:
    """The plan of all experts.  CheckpointError names the first tensor that is missing, of an unknown format, or of a
    shape that does not fit."""
    activation = model.activation()
    units = _Units(model, quant, tensors)
    pieces = tuple(units.pieces(e) for e in range(units.num_experts))
    mixed_rows = _mixed_rows(model, quant, pieces)
    hidden, intermediate = _check_shapes(model, tensors, pieces)
    inputs = [tuple(_halves(p) for n, p in one.items() if n != "down") for one in pieces]
    w13, notes13 = _matrix("w13", [h for one in inputs for pair in one for h in pair], _one_order(inputs))
    w2, notes2 = _matrix("w2", [(p["down"], p["down"].layout) for p in pieces], True)
    everything = [p for one in pieces for p in one.values()]
    rounding, input_scale, notes_a = _activation_quant(everything)
    notes_a += [] if model.top_k(tensors.layer) else ["config.json does not say how many experts a token takes"]
    mixed = ["gate and up are stored as halves of alternating rows: put in order"] if mixed_rows else []
    return LayerPlan(
        tensors.layer,
        units.num_experts,
        model.top_k(tensors.layer) or 1,
        hidden,
        intermediate,
        activation,
        tuple(range(units.num_experts)),
        pieces,
        w13,
        w2,
        rounding,
        input_scale,
        mixed_rows,
        tuple(dict.fromkeys((*notes13, *notes2, *notes_a, *(n for p in everything for n in p.layout.notes), *mixed))),
    )


def plan_experts(
    whole: LayerPlan, model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors, experts: Sequence[int]
) -> LayerPlan:
    """The plan of some experts, in this order: what `whole` says of the layer, with their pieces."""
    units = _Units(model, quant, tensors)
    return replace(whole, experts=tuple(experts), pieces=tuple(units.pieces(e) for e in experts))


class _Units:
    """Makes the units of a layer and finds the format of each, once for all that look alike."""

    def __init__(self, model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors) -> None:
        self.model, self.quant, self.tensors = model, quant, tensors
        self.gated = model.activation().gated
        self.fused = _is_fused(tensors)
        self.num_experts = _count_experts(model, tensors, self.fused)
        self._seen: dict[object, tuple[Format, Layout]] = {}
        H, I = model.hidden_size(), model.intermediate_size(tensors.layer)
        self._sizes = {"gate": (I, H), "up": (I, H), "gate_up": (2 * I, H), "down": (H, I)}

    def pieces(self, expert: int) -> dict[str, Piece]:
        return {projection: self._piece(self._unit(expert, projection)) for projection in self._wanted()}

    def _wanted(self) -> tuple[str, ...]:
        if not self.gated:
            return ("up", "down")
        return ("gate_up", "down") if self.fused else ("gate", "up", "down")

    def _unit(self, expert: int, projection: str) -> Unit:
        t, family = self.tensors, self.model.family
        if self.fused:
            short = t.fused_names.get(projection, projection)
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
            self.fused and family.transposed,
            self.fused and family.interleaved and projection == "gate_up",
            self.quant,
            overrides_for(self.quant, name.partition("[")[0]),
        )

    def _short(self, projection: str) -> str:
        """What another expert's tensors call this projection: "up_proj", "w3"."""
        names = (name.rpartition(".")[2] for (_, p), name in self.tensors.names.items() if p == projection)
        return next(names, projection)

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
        known = self._seen.get(key)
        row = known[0] if known else detect(unit)
        reader = reader_of(row)
        layout = known[1] if known and not _own_order(reader, unit) else reader.layout(unit)
        self._seen[key] = (row, layout)
        unit.layout = layout
        return Piece(unit, row, layout)


def _own_order(reader: Reader, unit: Unit) -> bool:
    """Whether the unit's layout cannot be taken over from one that looks alike: it may have an order of its own."""
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


def _mixed_rows(model: ModelConfig, quant: Mapping[str, Any], pieces: tuple[Mapping[str, Piece], ...]) -> bool:
    """Whether `gate` and `up` are the first and second half of rows that alternate gate, up, gate, up.

    gptqmodel cuts gpt-oss's interleaved gate_up_proj in the middle and calls the halves gate_proj and up_proj
    (seen in 7.7.0; no later version that does otherwise is known).  Other tools de-interleave first, under the same
    names.  The marker is meta.quantizer in the quantization config.
    """
    meta = quant.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, Mapping) else None
    tools = [tools] if isinstance(tools, str) else tools or []
    if not model.family.interleaved or "gate" not in pieces[0] or not any("gptqmodel" in str(t) for t in tools):
        return False
    return any(p["gate"].unit.has("qweight") for p in pieces)


def _check_shapes(
    model: ModelConfig, tensors: LayerTensors, pieces: tuple[Mapping[str, Piece], ...]
) -> tuple[int, int]:
    """(H, I) by the tensors.  Every expert must agree with the first, and all with the config."""
    down = pieces[0]["down"].layout
    H, I = down.n, down.k
    want = {"gate": (I, H), "up": (I, H), "gate_up": (2 * I, H), "down": (H, I)}
    config_h, config_i = model.hidden_size(), model.intermediate_size(tensors.layer)
    for one in pieces:
        for projection, p in one.items():
            if (p.layout.n, p.layout.k) != want[projection]:
                raise p.unit.error(
                    f"{p.layout.n} rows and {p.layout.k} columns",
                    f"{want[projection][0]} and {want[projection][1]}, to fit {pieces[0]['down'].unit.name}"
                    f" ({H} x {I}); config.json says H {config_h or '-'}, I {config_i or '-'}",
                )
    if (config_h and config_h != H) or (config_i and config_i != I):
        raise CheckpointError(
            f"{pieces[0]['down'].unit.name}: {H} rows and {I} columns, config.json says hidden size"
            f" {config_h or '-'} and intermediate size {config_i or '-'}"
        )
    return H, I


def _halves(piece: Piece) -> tuple[tuple[Piece, Layout], ...]:
    """The layouts that a piece gives to w13: one, or two equal ones for gate_up."""
    if piece.unit.projection != "gate_up":
        return ((piece, piece.layout),)
    half = split_layout(piece.layout, piece.unit.interleaved)
    return ((piece, half), (piece, half))


def _one_order(inputs: list[tuple[tuple[tuple[Piece, Layout], ...], ...]]) -> bool:
    """Whether gate and up of every expert share one activation order."""
    for one in inputs:
        orders = [layout.columns for pair in one for _, layout in pair]
        first = orders[0]
        for other in orders[1:]:
            if (first is None) != (other is None) or (
                first is not None and other is not None and not torch.equal(first, other)
            ):
                return False
    return True


def _matrix(name: str, parts: list[tuple[Piece, Layout]], one_order: bool) -> tuple[MatrixPlan, list[str]]:
    """The plan of one matrix and what the user should know of it."""
    notes = []
    schemes = list(dict.fromkeys(layout.scheme for _, layout in parts))
    scheme = common(schemes) if one_order else Scheme(Element.F32)
    if not one_order:
        notes.append(f"gate and up have different activation orders: {name} is widened to f32")
    elif len(schemes) > 1:
        which: dict[str, str] = {}
        for piece, layout in parts:
            which.setdefault(layout.scheme.name, piece.unit.name)
        have = ", ".join(f"{unit} is {s}" for s, unit in which.items())
        notes.append(f"{name} is stored as {scheme.name}, which holds all of it exactly: {have}")
    bias = [piece.layout.bias for piece, _ in parts]
    if any(bias) and not all(bias):
        piece = next(piece for piece, _ in parts if not piece.layout.bias)
        raise piece.unit.error("its bias is missing", "one, as the other experts have")
    columns = scheme.element.quantized and any(layout.columns is not None for _, layout in parts)
    return MatrixPlan(scheme, all(bias), columns), notes


def _activation_quant(pieces: list[Piece]) -> tuple[ActivationQuant, bool, list[str]]:
    """How the checkpoint wants activations rounded, whether static scales come with it, notes."""
    asked = sorted({p.layout.activation for p in pieces}, key=lambda a: a.value)
    scaled = [p.layout.input_scale for p in pieces]
    if len(asked) > 1:
        names = ", ".join(a.value for a in asked)
        return ActivationQuant.NONE, False, [f"projections ask for different rounding of activations ({names}): none"]
    if any(scaled) and not all(scaled):
        missing = next(p.unit.name for p in pieces if not p.layout.input_scale)
        note = f"{missing} has no input_scale: static activation scales are left out, activations are not rounded"
        return ActivationQuant.NONE, False, [note]
    return asked[0], all(scaled), []
