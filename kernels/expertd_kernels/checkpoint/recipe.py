"""What a layer's matrices will be, found from names, shapes, dtypes and the configuration: no weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.families import ModelConfig
from expertd_kernels.checkpoint.fit import common, split_layout
from expertd_kernels.checkpoint.names import LayerTensors
from expertd_kernels.checkpoint.readers.protocol import Layout
from expertd_kernels.checkpoint.units import Piece, Units
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.scheme import ActivationQuant, Element, Scheme

__all__ = ["LayerRecipe", "MatrixRecipe", "experts_recipe", "layer_recipe"]


@dataclass(frozen=True)
class MatrixRecipe:
    """One of the two canonical matrices: its scheme and which optional tensors it has."""

    scheme: Scheme
    bias: bool
    columns: bool


@dataclass(frozen=True)
class LayerRecipe:
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
    w13: MatrixRecipe
    w2: MatrixRecipe
    checkpoint_activation: ActivationQuant
    input_scale: bool
    mixed_rows: bool
    notes: tuple[str, ...]


def layer_recipe(model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors) -> LayerRecipe:
    """The recipe of all experts.  CheckpointError names the first tensor that is missing, of an unknown format, or of a
    shape that does not fit."""
    activation = model.activation()
    units = Units(model, quant, tensors)
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
    return LayerRecipe(
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


def experts_recipe(
    whole: LayerRecipe, model: ModelConfig, quant: Mapping[str, Any], tensors: LayerTensors, experts: Sequence[int]
) -> LayerRecipe:
    """The recipe of some experts, in this order: what `whole` says of the layer, with their pieces."""
    units = Units(model, quant, tensors)
    return replace(whole, experts=tuple(experts), pieces=tuple(units.pieces(e) for e in experts))


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


def _matrix(name: str, parts: list[tuple[Piece, Layout]], one_order: bool) -> tuple[MatrixRecipe, list[str]]:
    """The recipe of one matrix and what the user should know of it."""
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
    return MatrixRecipe(scheme, all(bias), columns), notes


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
