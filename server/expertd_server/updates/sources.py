"""Where the layers of a new version come from: quantized as the served ones are, and refused where they are others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_server.boot.assignment import Assignment, BootError

if TYPE_CHECKING:
    import torch

    from expertd_kernels.weights.canonical import Weights

__all__ = ["GoneSource", "alike", "checkpoint_of", "require_alike"]

_SAME = ("num_experts", "top_k", "hidden_size", "intermediate_size", "w13", "w2", "activation", "bias")


class GoneSource:
    """Facts of a source whose weights were not kept: its layers cannot be loaded once more."""

    def __init__(self, facts: ExpertSource, why: str) -> None:
        self._facts, self._why = facts, why
        self.family, self.fingerprint, self.layers = facts.family, facts.fingerprint, facts.layers

    def info(self, layer: int) -> LayerInfo:
        return self._facts.info(layer)

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        """Raises ValueError."""
        raise ValueError(self._why)


class _Alike(QuantizedSource):
    """Quantized as `served`, whose activations are rounded as the served checkpoint asks, where that takes no scales of
    its own."""

    def __init__(self, source: ExpertSource, served: LayerInfo, on: torch.device | None) -> None:
        super().__init__(source, served.w13, on)
        self._rounding = ActivationQuant.NONE if served.static_scales else served.checkpoint_activation

    def info(self, layer: int) -> LayerInfo:
        return replace(super().info(layer), checkpoint_activation=self._rounding)

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        return replace(super().load(layer, experts), checkpoint_activation=self._rounding)


def checkpoint_of(source: ExpertSource | Checkpoint) -> Checkpoint | None:
    """The checkpoint behind a source; None: a synthetic model, which has no names of tensors."""
    while isinstance(source, (QuantizedSource, GoneSource)):
        source = source.source if isinstance(source, QuantizedSource) else source._facts
    return source if isinstance(source, Checkpoint) else None


def alike(source: Checkpoint, layer: int, served: LayerInfo, on: torch.device | None = None) -> ExpertSource:
    """`source` with the layer in the scheme that is served: quantized while it is read, if it is not yet.  on: the
    accelerator where it is.  Raises BootError where that cannot be."""
    found = source.info(layer)
    plain = cast("ExpertSource", source)
    if (found.w13, found.w2) == (served.w13, served.w2) or not served.quantized:
        return plain
    if found.quantized:
        return plain  # of another scheme: require_alike() says so
    if served.w13 != served.w2:
        raise BootError(
            f"layer {layer}: got unquantized weights, but {served.w13.name} and {served.w2.name} are served of its two"
            " matrices; send them quantized, as the served checkpoint has them"
        )
    try:
        return _Alike(plain, served, on)
    except ValueError as e:
        raise BootError(f"layer {layer}: {e}") from e


def require_alike(new: Assignment, served: Assignment) -> None:
    """Raises BootError where a layer of a new version is not of the kind that is served."""
    layer = served.info.layer
    for name in _SAME:
        got, want = getattr(new.info, name), getattr(served.info, name)
        if got != want:
            got, want = (getattr(x, "name", x) for x in (got, want))
            raise BootError(f"layer {layer}: {name} of the new weights is {got}, want {want}, which is served")
    rounding = new.decision.problem.activation_quant
    if rounding is not served.decision.problem.activation_quant:
        raise BootError(
            f"layer {layer}: activations of the new weights are {rounding.value}, want"
            f" {served.decision.problem.activation_quant.value}, which is served; send tensors as the served checkpoint"
            " has them"
        )
    if new.decision.chosen is None:
        why = "; ".join(r for v in new.decision.verdicts for r in v.refusals[:1])
        raise BootError(f"layer {layer}: no backend serves the new weights: {why}")
