"""Whether servers have the same weights (expertd.common.identity): what a source says of that.

Of a checkpoint, 64 KiB of each layer are read at most, whichever experts are held: 3 MiB of Qwen3-30B-A3B's 57 GB.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from expertd.common.identity import places, sample_of, sampled, sampled_identity, synthetic_identity
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.kept import stored_of
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.sources.source import ExpertSource
from expertd_server.updates.sources import checkpoint_of

__all__ = ["identity_of", "sampled_names"]


def sampled_names(checkpoint: Checkpoint) -> list[str]:
    """Of the tensors that identity_of() looks at, ascending."""
    return sorted(_sampled(checkpoint))


def identity_of(source: ExpertSource | Checkpoint) -> str:
    """Of all weights of a source.  Raises CheckpointError where files cannot be read."""
    checkpoint = checkpoint_of(source)
    if checkpoint is None:
        return synthetic_identity(source.fingerprint)
    stored = _sampled(checkpoint)
    for t in stored.values():
        t.shard.prefetch((t.offset + at, t.offset + at + n) for at, n in places(t.nbytes))
    samples = {name: sample_of(t.dtype, t.shape, t.nbytes, _reader(t)) for name, t in stored.items()}
    return sampled_identity(samples)


def _sampled(checkpoint: Checkpoint) -> dict[str, Stored]:
    """By name."""
    out: dict[str, Stored] = {}
    for number in checkpoint.layers:
        layer = checkpoint.tensors(number)
        there = {t.name: t for t in stored_of(layer, layer.apart)}
        out.update((name, there[name]) for name in sampled(list(there)))
    return out


def _reader(t: Stored) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        piece = np.empty(length, np.uint8)
        t.shard.fill(piece, t.offset + offset, t.name)
        return piece.tobytes()

    return read
