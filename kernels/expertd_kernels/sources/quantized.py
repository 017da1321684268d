"""`--quantize NAME`: a source whose unquantized layers are quantized as they are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.digest import expert_digests
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
    def device(self) -> torch.device | None:
        """Where load() makes weights; None: on the CPU, of what is read."""
        return getattr(self.source, "device", None)

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
        whole: Weights | None = None
        origin: list[torch.Tensor] = []
        for first in range(0, len(ids), self.experts_at_a_time):
            few = ids[first : first + self.experts_at_a_time]
            try:
                base = self.source.load(layer, few)
                part = quantize(base, self.scheme)
            except ValueError as error:
                raise ValueError(f"of the experts {few[0]} to {few[-1]}: {error}") from error
            origin.append(expert_digests(base))  # devices may choose another one of two scales that are as good
            del base
            if whole is None:
                whole = replace(part, w13=_room(part.w13, len(ids)), w2=_room(part.w2, len(ids)))
            for matrix, its in ((whole.w13, part.w13), (whole.w2, part.w2)):
                for name, t in its.tensors():
                    getattr(matrix, name)[first : first + len(few)] = t
        assert whole is not None, "no experts were asked for"
        return replace(whole, origin=torch.cat(origin))


def _room(q: QuantTensor, experts: int) -> QuantTensor:
    """A matrix like `q` of so many experts, to be filled: joining parts would take them twice."""
    fields = {name: t.new_empty((experts, *t.shape[1:])) for name, t in q.tensors()}
    return replace(q, shape=(experts, *q.shape[1:]), **fields)  # type: ignore[arg-type]
