"""Tensors that lie in memory: in an anonymous file, in memory that an accelerator copies from, or on the accelerator.

load_on(recipe, device)   canonical weights on `device`, without a copy on the host where the tensors need no reader
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.readers import plain
from expertd_kernels.checkpoint.recipe import LayerRecipe
from expertd_kernels.checkpoint.tensors import PIECE_BYTES, Counter, Look, Shard, Stored
from expertd_kernels.checkpoint.units import Piece
from expertd_kernels.weights.canonical import CODE_DTYPE, QuantTensor, Weights

__all__ = ["Bytes", "MemoryFile", "load_on"]

_ALIGNMENT = 64


class MemoryFile(Shard):
    """Tensors in an anonymous file: a shard without a header."""

    def __init__(self, name: str) -> None:
        self.path, self.counter, self.size = Path(name), Counter(), 0
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self.tensors = {}

    def room(self, nbytes: int) -> int:
        """Where so many bytes may be written."""
        at = self.size
        self.size = -(-(at + nbytes) // _ALIGNMENT) * _ALIGNMENT
        try:
            os.ftruncate(self.fd, self.size)
        except OSError as e:
            raise CheckpointError(f"{self.path}: got tensors of {self.size} bytes: {e.strerror}") from e
        return at

    def write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view, offset)
            view, offset = view[done:], offset + done


class Bytes(Shard):
    """The bytes of one tensor: `memory` [n] u8, on an accelerator or on the host, pinned where one copies from it."""

    def __init__(self, path: Path, memory: Tensor, counter: Counter) -> None:
        """path, counter: what others of its layer have, too."""
        self.path, self.counter, self.size = path, counter, memory.numel()
        self.fd, self.tensors, self.memory = -1, {}, memory

    def write(self, data: bytes, offset: int) -> None:
        np.copyto(self.memory[offset : offset + len(data)].numpy(), np.frombuffer(data, np.uint8))

    def fill(self, out: NDArray[np.uint8], offset: int, subject: str, look: Look | None = None) -> None:
        """See Shard."""
        if offset + out.nbytes > self.size:
            raise CheckpointError(f"{subject}: bytes {offset} to {offset + out.nbytes} of {self.size}")
        torch.from_numpy(out).copy_(self.memory[offset : offset + out.nbytes])
        for begin in range(0, out.nbytes, PIECE_BYTES) if look is not None else ():
            assert look is not None
            look(out[begin : begin + PIECE_BYTES])

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """It is there."""


def load_on(recipe: LayerRecipe, device: torch.device) -> Weights | None:
    """Canonical weights of the recipe's experts in its order, on `device`; None where assemble() has to read them: they
    are quantized, or turned, or lie in files.  Copies are under way on the current stream when it returns, and whether
    weights are finite was not looked at."""
    seg, H, I, E = recipe.activation.segments, recipe.hidden_size, recipe.intermediate_size, len(recipe.experts)
    if recipe.mixed_rows or recipe.input_scale or recipe.w13.columns or recipe.w13.factors or recipe.w2.factors:
        return None
    found = [{name: _bytes_of(piece) for name, piece in pieces.items()} for pieces in recipe.pieces]
    if not all(t is not None and dtype is _dtype(recipe, name) for one in found for name, (t, dtype) in one.items()):
        return None
    w13 = torch.empty(E, seg * I, H, dtype=CODE_DTYPE[recipe.w13.scheme.element], device=device)
    w2 = torch.empty(E, H, I, dtype=CODE_DTYPE[recipe.w2.scheme.element], device=device)
    for slot, one in enumerate(found):
        at = 0
        for name, (t, _) in one.items():
            assert t is not None
            out = w2[slot] if name == "down" else w13[slot].view(-1, H)[at : at + t.numel() // w13.itemsize // H]
            out.view(-1).view(torch.uint8).copy_(t, non_blocking=True)
            at += 0 if name == "down" else out.shape[0]
    return Weights(
        QuantTensor(recipe.w13.scheme, (E, seg * I, H), w13, segments=seg),
        QuantTensor(recipe.w2.scheme, (E, H, I), w2),
        recipe.activation,
        recipe.checkpoint_activation,
    )


def _dtype(recipe: LayerRecipe, projection: str) -> torch.dtype:
    return CODE_DTYPE[(recipe.w2 if projection == "down" else recipe.w13).scheme.element]


def _bytes_of(piece: Piece) -> tuple[Tensor | None, torch.dtype | None]:
    """[n] u8 of a projection of one expert as canonical weights have it, and its dtype; None: it needs its reader."""
    if piece.format.reader != "plain" or piece.unit.interleaved or piece.layout.bias:
        return None, None
    codes = plain.read(piece.unit).codes if not plain.turned(piece.unit) else None
    if not isinstance(codes, Stored) or not isinstance(codes.shard, Bytes):
        return None, None
    return codes.shard.memory[codes.offset : codes.offset + codes.nbytes], codes.torch_dtype
