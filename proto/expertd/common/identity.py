"""Whether two servers have the same weights: an identity of all experts of a model, from a few bytes of some tensors.

    names    = sampled(names of the expert tensors of a layer)      for each layer
    sample   = sample_of(dtype, shape, nbytes, read)                of each of these
    identity = sampled_identity({name: sample, ...})                "sampled:<hex>"

Whoever holds all tensors, a folder or a trainer, finds the same one, and reads no more than 64 KiB of a layer.  So a
difference between others of the tensors, or between the pieces, is not seen: where servers hold the same expert, the
digests of its weights tell that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

# Why it is so: decision 176 in DECISIONS.md.
__all__ = ["changed_identity", "comparable", "places", "sample_of", "sampled", "sampled_identity", "synthetic_identity"]

_NAMES = 16
"""Tensors of a layer that are looked at."""
_PIECES, _PIECE_BYTES = 4, 1024
"""What is read of each, evenly spread: of a tensor that has all experts of a layer the pieces are of several."""


def sampled(names: Sequence[str]) -> list[str]:
    """Which tensors of a layer to look at: the first, the last, and those between at even distances by name."""
    ordered = sorted(names)
    if len(ordered) <= _NAMES:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (_NAMES - 1)] for i in range(_NAMES)]


def places(nbytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the pieces of a tensor of so many bytes."""
    if nbytes <= _PIECES * _PIECE_BYTES:
        return [(0, nbytes)]
    last = nbytes - _PIECE_BYTES
    return [(i * last // (_PIECES - 1), _PIECE_BYTES) for i in range(_PIECES)]


def sample_of(dtype: str, shape: Sequence[int], nbytes: int, read: Callable[[int, int], bytes]) -> bytes:
    """SHA-256 of a tensor's facts and pieces.  dtype: as safetensors names it; read: offset and length -> those
    bytes of the tensor, little-endian and row-major."""
    digest = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    for offset, length in places(nbytes):
        digest.update(read(offset, length))
    return digest.digest()


def sampled_identity(samples: Mapping[str, bytes]) -> str:
    """Of samples by the tensors' names."""
    return _identity("sampled", samples)


def synthetic_identity(fingerprint: str) -> str:
    """Of weights that follow from what Model.fingerprint is made of."""
    return f"synthetic:{fingerprint}"


def changed_identity(base: str, changes: Mapping[str, bytes]) -> str:
    """Of `base` with changes, by the tensors' names; "" where the base's is not known."""
    return _identity("changes", changes, base) if base else ""


def comparable(one: str, other: str) -> bool:
    """Whether two identities tell if the weights are the same: both are known, and made from the same things."""
    return bool(one and other) and one.partition(":")[0] == other.partition(":")[0]


def _identity(kind: str, parts: Mapping[str, bytes], base: str = "") -> str:
    digest = hashlib.sha256(base.encode())
    for name, part in sorted(parts.items()):
        digest.update(f"\n{name}\n".encode())
        digest.update(hashlib.sha256(part).digest())
    return f"{kind}:{digest.hexdigest()}"
