"""`--quantize NAME`: a source whose unquantized layers are quantized as they are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.quantize import quantize, scheme_named
from expertd_kernels.weights.scheme import Scheme

__all__ = ["QuantizedSource"]


class QuantizedSource:
    """A source whose unquantized layers are quantized as they are loaded: `--quantize NAME`.

    Experts are read and rounded a few at a time, so that the peak is the quantized layer plus those few.
    """

    experts_at_a_time = 8

    def __init__(self, source: ExpertSource, scheme: Scheme | str) -> None:
        self.source = source
        self.scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
        self.family = source.family
        self.layers = source.layers
        self.fingerprint = hashlib.sha256(f"{source.fingerprint} quantized {self.scheme}".encode()).hexdigest()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from disk so far; 0 for a source that reads none."""
        return int(getattr(self.source, "bytes_read", 0))

    def info(self, layer: int) -> LayerInfo:
        """Facts of one layer; ValueError where it is quantized already."""
        base = self.source.info(layer)
        for name, s in (("w13", base.w13), ("w2", base.w2)):
            if s.element.quantized:
                raise ValueError(
                    f"{name} is {s.name} already; --quantize takes bf16, f16 or f32 weights: leave it away"
                )
        note = f"quantized at load from {base.w13.name} to {self.scheme.name}, round to nearest"
        return replace(base, w13=self.scheme, w2=self.scheme, notes=(*base.notes, note))

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        info = self.info(layer)
        ids = list(range(info.num_experts)) if experts is None else list(experts)
        parts: list[Weights] = []
        for first in range(0, len(ids), self.experts_at_a_time):
            few = ids[first : first + self.experts_at_a_time]
            try:
                parts.append(quantize(self.source.load(layer, few), self.scheme))
            except ValueError as error:
                raise ValueError(f"of the experts {few[0]} to {few[-1]}: {error}") from error
        return replace(parts[0], w13=_join([p.w13 for p in parts]), w2=_join([p.w2 for p in parts]))


def _join(parts: list[QuantTensor]) -> QuantTensor:
    """One matrix of all the parts' experts."""
    if len(parts) == 1:
        return parts[0]
    fields = {name: torch.cat([getattr(p, name) for p in parts]) for name, _ in parts[0].tensors()}
    E = sum(p.num_experts for p in parts)
    return replace(parts[0], shape=(E, *parts[0].shape[1:]), **fields)  # type: ignore[arg-type]
