"""Tensors of some experts of a checkpoint, kept in a folder: a safetensors file for each layer.

write_layer(folder, source.tensors(3), held)      what Received took, or any checkpoint has
kept = open_kept(folder, checkpoint, {3: held})   reads like a checkpoint of the same model
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.names import LayerTensors, group_by_layer
from expertd_kernels.checkpoint.tensors import Counter, Shard, Stored
from expertd_kernels.common.atomic_file import replacing

__all__ = ["filled", "open_kept", "stored_of", "write_layer"]

_PIECE = 16 << 20
_ALIGNMENT = 8


def stored_of(layer: LayerTensors, experts: Collection[int]) -> list[Stored]:
    """The tensors of these experts, and fused ones, which have all."""
    apart = [t for e in experts for found in layer.apart.get(e, {}).values() for t in found.values()]
    return apart + [t for found in layer.fused.values() for t in found.values()]


def write_layer(folder: Path, layer: LayerTensors, experts: Collection[int]) -> None:
    """Raises OSError, and then there is no such file."""
    tensors = {t.name: t for t in stored_of(layer, experts)}
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    with replacing(folder / _file(layer.layer)) as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for t in tensors.values():
            for begin in range(0, t.nbytes, _PIECE):
                piece = np.empty(min(_PIECE, t.nbytes - begin), np.uint8)
                t.shard.fill(piece, t.offset + begin, t.name)
                out.write(piece.data)
        out.flush()
        os.fsync(out.fileno())


def open_kept(folder: Path, like: Checkpoint, held: Mapping[int, Collection[int]]) -> Checkpoint:
    """like: the checkpoint of the model; held: experts that are there, by layer.  Raises CheckpointError."""
    layers: dict[int, LayerTensors] = {}
    counter = Counter()
    for number, experts in held.items():
        shard = Shard(folder / _file(number), folder, counter)
        layer = group_by_layer(shard.tensors, like.naming).get(number)
        lacks = set(experts) - set(layer.apart) if layer is not None and layer.apart else set()
        if layer is None or lacks:
            which = f"expert {min(lacks)}" if lacks else "its experts"
            raise CheckpointError(f"{folder / _file(number)}: layer {number} lacks {which}")
        layers[number] = filled(layer, like)
    return like.with_layers(layers, folder)


def filled(layer: LayerTensors, like: Checkpoint) -> LayerTensors:
    """With every expert of the model: those that are not there are shown by the headers of one that is, and are never
    read."""
    if layer.apart:
        first = layer.apart[min(layer.apart)]
        for e in like.tensors(layer.layer).apart:
            layer.apart.setdefault(e, first)
    return layer


def _file(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"
