"""Tensors that are told as differences from the tensors of a base: what changed of their bytes, compressed by zstd.

    xor         base ^ new, byte by byte
    overwrite   u32 n, then n u32 places of bytes that changed, ascending, then n new bytes; all little-endian

These are the encodings of slime's delta folders (slime/utils/disk_delta.py), so what such a folder holds can be sent as
it is.  A checksum is of the whole new tensor, "algorithm:hex digits".
"""

from __future__ import annotations

import hashlib
import zlib
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from expertd_kernels.checkpoint.errors import CheckpointError

__all__ = ["ENCODINGS", "applied", "delta_of", "require_checksum"]

ENCODINGS = ("xor", "overwrite")
_UNKNOWN_SIZE = (1 << 64) - 1
_PLACE = np.dtype("<u4")


def applied(name: str, base: NDArray[np.uint8], data: bytes, encoding: str) -> NDArray[np.uint8]:
    """The new tensor's bytes [n] u8.  base: [n] u8 of the same tensor before.  Raises CheckpointError where `data`
    is no such difference from it."""
    most = base.nbytes if encoding == "xor" else _PLACE.itemsize + base.nbytes * (_PLACE.itemsize + 1)
    diff = np.frombuffer(_decompressed(name, data, most), np.uint8)
    if encoding == "xor":
        if diff.nbytes != base.nbytes:
            raise CheckpointError(f"{name}: a difference of {diff.nbytes} bytes, want {base.nbytes}, as the base has")
        new: NDArray[np.uint8] = base ^ diff
        return new
    if encoding != "overwrite":
        raise CheckpointError(f"{name}: encoding {encoding!r}, want one of {', '.join(ENCODINGS)}")
    count = int(diff[: _PLACE.itemsize].view(_PLACE)[0]) if diff.nbytes >= _PLACE.itemsize else 0
    if diff.nbytes != _PLACE.itemsize + count * (_PLACE.itemsize + 1):
        raise CheckpointError(f"{name}: {diff.nbytes} bytes for {count} places and as many bytes")
    places = diff[_PLACE.itemsize : _PLACE.itemsize * (1 + count)].view(_PLACE)
    if count and int(places.max()) >= base.nbytes:
        raise CheckpointError(f"{name}: place {int(places.max())} of a tensor of {base.nbytes} bytes")
    out: NDArray[np.uint8] = base.copy()
    out[places] = diff[_PLACE.itemsize * (1 + count) :]
    return out


def delta_of(base: NDArray[np.uint8], new: NDArray[np.uint8], encoding: str) -> bytes:
    """The inverse of applied(): what changed from `base` [n] u8 to `new` [n] u8.  Raises CheckpointError where
    zstandard is not installed."""
    if encoding == "xor":
        diff = base ^ new
    else:
        changed = base != new
        places = np.flatnonzero(changed).astype(_PLACE)
        head = np.array([places.size], _PLACE).view(np.uint8)
        diff = np.concatenate([head, places.view(np.uint8), new[changed]])
    out: bytes = _zstd("a delta").ZstdCompressor(level=1).compress(diff.tobytes())
    return out


def require_checksum(name: str, data: NDArray[np.uint8], checksum: str) -> None:
    """checksum: of the bytes, "sha256:...", "xxh3-128:..." or "adler32:..." in hex; "" = not checked.  Raises
    CheckpointError."""
    algorithm, _, want = checksum.partition(":")
    if not checksum:
        return
    if algorithm == "sha256":
        got = hashlib.sha256(data.data).hexdigest()
    elif algorithm == "adler32":
        got = f"{zlib.adler32(data.data):08x}"
    elif algorithm == "xxh3-128":
        got = _module("xxhash", f"{name}: its checksum").xxh3_128_hexdigest(data)
    else:
        raise CheckpointError(f"{name}: checksum of {algorithm!r:.20}, want sha256, xxh3-128 or adler32")
    if got != want.lower():
        raise CheckpointError(f"{name}: {algorithm} {got[:16]}, want {want[:16]}")


def _decompressed(name: str, data: bytes, most: int) -> bytes:
    """Of a zstd frame with at most so many bytes."""
    zstd = _zstd(f"{name}: a delta")
    try:
        size = zstd.get_frame_parameters(data).content_size
        if size != _UNKNOWN_SIZE and size > most:
            raise CheckpointError(f"{name}: a difference of {size} bytes, want at most {most}")
        with zstd.ZstdDecompressor().stream_reader(data) as reader:
            out: bytes = reader.read(most + 1)
    except zstd.ZstdError as e:
        raise CheckpointError(f"{name}: no zstd frame: {e}") from e
    if len(out) > most:
        raise CheckpointError(f"{name}: a difference of more than {most} bytes")
    return out


def _zstd(what: str) -> ModuleType:
    return _module("zstandard", what)


def _module(name: str, what: str) -> ModuleType:
    """Of the extra `deltas`.  Raises CheckpointError."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as e:
        raise CheckpointError(f"{what} needs {name}: pip install 'expertd[deltas]'") from e
