"""Quantizing while loading on an accelerator: experts in buckets, the next ones copied while some are rounded; with a
CPU in place of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.sources import quantized
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.weights.canonical import Weights

CPU = torch.device("cpu")


class Watched:
    """A checkpoint of which is written down what is asked for; spoil: has a NaN put into what load_on() makes."""

    def __init__(self, checkpoint: Checkpoint, spoil: bool = False) -> None:
        self._checkpoint, self._spoil = checkpoint, spoil
        self.family, self.fingerprint, self.layers = checkpoint.family, checkpoint.fingerprint, checkpoint.layers
        self.info = checkpoint.info
        self.asked: list[tuple[int, ...]] = []

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        if self._spoil:
            raise ValueError("the tensor's name")
        return self._checkpoint.load(layer, experts)

    def load_on(self, device: torch.device, layer: int, experts: Sequence[int] | None = None) -> Weights:
        assert experts is not None
        self.asked.append(tuple(experts))
        out = self._checkpoint.load_on(device, layer, experts)
        if self._spoil:
            out.w13.codes[0, 0, 0] = float("nan")
        return out


def on_device(source: Watched) -> QuantizedSource:
    made = QuantizedSource(source, "int4_g32")  # type: ignore[arg-type]
    made.on = CPU
    return made


@pytest.fixture
def checkpoint(checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)  # which a CPU's has not
    return open_checkpoint(checkpoint_folder("bf16-sharded-qwen3moe1l"))


def test_bits_are_those_of_loading_where_they_are_read(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    info = checkpoint.info(0)
    monkeypatch.setattr(quantized, "BUCKET_BYTES", 3 * 2 * info.hidden_size * info.intermediate_size)  # of one expert
    source = Watched(checkpoint)
    found, want = on_device(source).load(0), QuantizedSource(checkpoint, "int4_g32").load(0)  # type: ignore[arg-type]
    assert source.asked == [(e,) for e in range(info.num_experts)]
    for matrix in ("w13", "w2"):
        pairs = zip(getattr(found, matrix).tensors(), getattr(want, matrix).tensors(), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert found.origin is not None
    assert want.origin is not None
    assert torch.equal(found.origin, want.origin)


def test_experts_are_in_buckets_of_so_many_bytes(checkpoint: Checkpoint) -> None:
    source = Watched(checkpoint)
    on_device(source).load(0, [3, 1])
    assert source.asked == [(3, 1)]


def test_what_is_not_finite_is_named_by_the_reader(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="of the experts 0 to 1: the tensor's name"):
        on_device(Watched(checkpoint, spoil=True)).load(0, [0, 1])
