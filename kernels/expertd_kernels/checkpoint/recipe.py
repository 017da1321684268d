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
from expertd_kernels.weights.factors import takes_w2_factors
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme

__all__ = ["LayerRecipe", "MatrixRecipe", "experts_recipe", "layer_recipe"]


@dataclass(frozen=True)
class MatrixRecipe:
    """One of the two canonical matrices: its scheme and which optional tensors it has."""

    scheme: Scheme
    bias: bool
    columns: bool
    factors: bool


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
    units.require_alike()
    mixed_rows = _mixed_rows(model, quant, pieces)
    hidden, intermediate = _check_shapes(model, tensors, pieces)
    inputs = [tuple(_halves(p) for n, p in one.items() if n != "down") for one in pieces]
    parts13 = [h for one in inputs for pair in one for h in pair]
    widen13 = _unequal_orders(inputs) or _unequal_factors(parts13)
    w13, notes13 = _matrix("w13", parts13, widen13)
    w13, widen2, notes_f = _factors_of_w2(w13, pieces, activation)
    w2, notes2 = _matrix("w2", [(p["down"], p["down"].layout) for p in pieces], widen2)
    everything = [p for one in pieces for p in one.values()]
    rounding, notes_a = _activation_quant(everything)
    notes_a += notes_f
    notes_a += [] if model.top_k(tensors.layer) else ["config.json does not say how many experts a token takes"]
    _require_biases(model, w13, w2, pieces[0])
    top_k = _top_k(model, tensors.layer, units.num_experts)
    mixed = ["gate and up are stored as halves of alternating rows: put in order"] if mixed_rows else []
    return LayerRecipe(
        tensors.layer,
        units.num_experts,
        top_k,
        hidden,
        intermediate,
        activation,
        tuple(range(units.num_experts)),
        pieces,
        w13,
        w2,
        rounding,
        rounding.static,
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
    tools = tools if isinstance(tools, list) else [tools]
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


def _unequal_orders(inputs: list[tuple[tuple[tuple[Piece, Layout], ...], ...]]) -> str:
    """Where gate and up of an expert have different activation orders: why w13 is widened; else ""."""
    for one in inputs:
        orders = [layout.columns for pair in one for _, layout in pair]
        if not all(_same(order, orders[0]) for order in orders):
            return "gate and up have different activation orders"
    return ""


def _unequal_factors(parts: list[tuple[Piece, Layout]]) -> str:
    """Where projections of w13 have different factors of its one input: why it is widened; else ""."""
    first, _ = parts[0]
    for piece, layout in parts:
        if not _same(layout.factors, parts[0][1].factors):
            return f"the pre_quant_scale of {piece.unit.name} is not that of {first.unit.name}"
    return ""


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _factors_of_w2(
    w13: MatrixRecipe, pieces: tuple[Mapping[str, Piece], ...], activation: Activation
) -> tuple[MatrixRecipe, str, list[str]]:
    """(w13 as it can take the factors of w2's inputs, why w2 is widened or "", notes)."""
    if all(one["down"].layout.factors is None for one in pieces):
        return w13, "", []
    if w13.scheme.scale in (ScaleType.F16, ScaleType.BF16):
        w13 = replace(w13, scheme=w13.scheme.with_scale(ScaleType.F32))
    if why := takes_w2_factors(w13.scheme, activation):
        return w13, f"its pre_quant_scale cannot be multiplied into w13, because {why}", []
    return w13, "", ["pre_quant_scale of w2's inputs is multiplied into the scales of w13's up rows"]


def _matrix(name: str, parts: list[tuple[Piece, Layout]], widen: str) -> tuple[MatrixRecipe, list[str]]:
    """The recipe of one matrix and what the user should know of it.  widen: why it is held as f32, "" if it is not."""
    notes = []
    schemes = list(dict.fromkeys(layout.scheme for _, layout in parts))
    scheme = Scheme(Element.F32) if widen else common(schemes)
    factors = any(layout.factors is not None for _, layout in parts)
    if widen:
        times = 32 / max(s.element.bits for s in schemes)
        notes.append(f"{widen}: {name} is widened to f32, {times:g} times the memory of {schemes[0].name}")
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
    kept = factors and not widen and scheme.element.quantized
    if kept and name == "w13":
        notes.append("pre_quant_scale multiplies the hidden states before w13: once, it is the same for all experts")
    return MatrixRecipe(scheme, all(bias), columns, kept), notes


def _require_biases(model: ModelConfig, w13: MatrixRecipe, w2: MatrixRecipe, pieces: Mapping[str, Piece]) -> None:
    """CheckpointError where the family's experts have biases and the files do not."""
    for projection, piece in pieces.items():
        if model.family.bias and not (w2 if projection == "down" else w13).bias:
            unit = piece.unit
            name = unit.name.partition("[")[0] + ("_bias" if unit.fused else ".bias")
            raise CheckpointError(f"{name}: is missing; experts of {model.family.name} have biases")


def _top_k(model: ModelConfig, layer: int, num_experts: int) -> int:
    """Experts that a token takes; 1 where the config does not say."""
    top_k = model.top_k(layer)
    if top_k > num_experts:
        keys = " or ".join(model.family.top_k)
        raise CheckpointError(
            f"config.json: {keys} is {top_k}, want at most the {num_experts} experts of layer {layer}"
        )
    return top_k or 1


def _activation_quant(pieces: list[Piece]) -> tuple[ActivationQuant, list[str]]:
    """How the checkpoint wants activations rounded, notes.  Where that takes static scales, every piece has one."""
    asked = sorted({p.layout.activation for p in pieces}, key=lambda a: a.value)
    if len(asked) > 1:
        names = ", ".join(a.value for a in asked)
        return ActivationQuant.NONE, [f"projections ask for different rounding of activations ({names}): none"]
    return asked[0], []
