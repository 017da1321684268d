"""`--quantize NAME`: a source whose unquantized layers are quantized as they are loaded."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.digest import digests_of, expert_totals
from expertd_kernels.weights.quantize import quantize, scheme_named
from expertd_kernels.weights.scheme import Scheme

__all__ = ["BUCKET_BYTES", "LoadsOn", "QuantizedSource"]

BUCKET_BYTES = 128 << 20
"""Of bf16 weights that are copied to an accelerator at a time."""


@runtime_checkable
class LoadsOn(Protocol):
    """A source that can make weights on an accelerator without a copy on the host."""

    def load_on(self, device: torch.device, layer: int, experts: Sequence[int] | None = None) -> Weights:
        """Copies may be under way on the current stream; whether weights are finite was not looked at."""
        ...


class QuantizedSource:
    """A source whose unquantized layers are quantized as they are loaded: `--quantize NAME`.

    Experts are read and rounded a few at a time, so that the peak is the quantized layer plus those few.

    on: an accelerator where they are rounded, with the bits of a CPU: while some are, the next ones are copied there,
    so two times BUCKET_BYTES of unquantized weights are there beside the quantized ones.  None: where they are read.
    """

    experts_at_a_time = 8

    def __init__(self, source: ExpertSource, scheme: Scheme | str, on: torch.device | None = None) -> None:
        self.source, self.on = source, None if on is None or on.type == "cpu" else on
        self.scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
        self.family = source.family
        self.layers = source.layers
        self.fingerprint = hashlib.sha256(f"{source.fingerprint} quantized {self.scheme}".encode()).hexdigest()

    @property
    def device(self) -> torch.device | None:
        """Where load() makes weights; None: on the CPU, of what is read."""
        return self.on or getattr(self.source, "device", None)

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
        step = self._experts_at_a_time(info)
        some = [ids[first : first + step] for first in range(0, len(ids), step)]
        whole: Weights | None = None
        origin: list[torch.Tensor] = []
        at = 0
        for few, base in zip(some, self._ahead(layer, some), strict=True):
            try:
                part = quantize(base, self.scheme)
            except ValueError as error:
                self._name_tensor(layer, few)
                raise ValueError(f"of the experts {few[0]} to {few[-1]}: {error}") from error
            origin.append(expert_totals(base))  # devices may choose another one of two scales that are as good
            del base
            if whole is None:
                whole = replace(part, w13=_room(part.w13, len(ids)), w2=_room(part.w2, len(ids)))
            for matrix, its in ((whole.w13, part.w13), (whole.w2, part.w2)):
                for name, t in its.tensors():
                    getattr(matrix, name)[at : at + len(few)] = t
            at += len(few)
        assert whole is not None, "no experts were asked for"
        return replace(whole, origin=digests_of(torch.cat(origin)))

    def _experts_at_a_time(self, info: LayerInfo) -> int:
        if self.on is None:
            return self.experts_at_a_time
        rows = info.activation.segments + 1
        each = rows * info.hidden_size * info.intermediate_size * 4  # f32 at most
        return max(1, 2 * BUCKET_BYTES // each)

    def _ahead(self, layer: int, some: Sequence[Sequence[int]]) -> Iterator[Weights]:
        """Weights of these experts; on an accelerator the next ones are copied while some are used."""
        if self.on is None:
            for few in some:
                yield self._read(lambda few=few: self.source.load(layer, few), few)  # type: ignore[misc]
            return
        device, api = self.on, getattr(torch, self.on.type)
        using, copying = api.current_stream(device), _copy_stream(device)
        copying.wait_stream(using)

        def copied(few: Sequence[int]) -> tuple[Weights, Any]:
            with api.stream(copying):
                base = self._read(lambda: self._on_device(device, layer, few), few)
                return base, copying.record_event()

        following = copied(some[0])
        for i in range(len(some)):
            base, there = following
            if i + 1 < len(some):
                following = copied(some[i + 1])
            using.wait_event(there)
            for matrix in (base.w13, base.w2):
                for _, t in matrix.tensors():
                    t.record_stream(using)
            yield base
            del base

    def _on_device(self, device: torch.device, layer: int, few: Sequence[int]) -> Weights:
        if isinstance(self.source, LoadsOn):
            return self.source.load_on(device, layer, few)
        return self.source.load(layer, few).to(device)

    def _read(self, read: Callable[[], Weights], few: Sequence[int]) -> Weights:
        try:
            return read()
        except ValueError as error:
            raise ValueError(f"of the experts {few[0]} to {few[-1]}: {error}") from error

    def _name_tensor(self, layer: int, few: Sequence[int]) -> None:
        """Raises the reader's ValueError, which names the tensor that is wrong, where weights were not looked at."""
        if self.on is not None:
            self._read(lambda: self.source.load(layer, few), few)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return getattr(torch, device.type).Stream(device)


def _room(q: QuantTensor, experts: int) -> QuantTensor:
    """A matrix like `q` of so many experts, to be filled: joining parts would take them twice."""
    fields = {name: t.new_empty((experts, *t.shape[1:])) for name, t in q.tensors()}
    return replace(q, shape=(experts, *q.shape[1:]), **fields)  # type: ignore[arg-type]
