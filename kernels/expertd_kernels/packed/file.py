"""The file of one packed layer: written once, mapped by whoever computes from it.

    8 bytes   magic
    4 + 4     length and CRC-32 of the header, little-endian
    header    JSON: key facts, meta, and for each tensor its dtype, shape, offset, checksum and where it belongs
    ...       tensors, each at a multiple of ALIGN bytes

Beside the packed tensors stand those of the proof that the layer passed when the entry was made, so that the mapped
layer can be checked without canonical weights.  Files are written beside their place, made read-only and renamed, so a
reader never sees half of one, and a careless `cp` over one fails (not root's).  Tensors are mapped copy-on-write:
processes share the pages, and nobody can change the file through a tensor.  mapping.py has what a change of the file
does to those who have it mapped; header.py what a header must be.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.common.atomic_file import replacing
from expertd_kernels.common.protocol import Packed
from expertd_kernels.packed.header import ALIGN, Header, HeaderError, TensorPlace, aligned
from expertd_kernels.packed.integrity import IntegrityRecord
from expertd_kernels.packed.mapping import CacheError, EntryFile

__all__ = [
    "ALIGN",
    "CacheError",
    "Entry",
    "changed",
    "checksum",
    "read_entry",
    "read_header",
    "read_packed",
    "write_packed",
]

MAGIC = b"expertd\x02"
PREFIX_BYTES = 16
"""Magic, length and checksum of the header."""
MOST_HEADER_BYTES = 64 << 20

CHUNK_BYTES = 1 << 20
"""Bytes that one checksum covers."""


@dataclass(frozen=True, eq=False)
class Entry:
    """What a file holds.  proof: None for an entry that was written without one; file: whose mapping the tensors are,
    None where they are memory of their own."""

    packed: Packed
    proof: IntegrityRecord | None
    file: EntryFile | None = None


def checksum(t: Tensor) -> str:
    """Hex digest of a contiguous CPU tensor's bytes at the speed of memory: each chunk's 64-bit words are added modulo
    2 ** 64 (any single changed word changes its sum), and the sums are hashed with SHA-256."""
    raw = t.reshape(-1).view(torch.uint8)
    h = hashlib.sha256(str(raw.numel()).encode())
    whole = raw.numel() // CHUNK_BYTES * CHUNK_BYTES
    if whole:
        sums = raw[:whole].view(torch.int64).view(-1, CHUNK_BYTES // 8).sum(dim=1)
        h.update(sums.numpy().tobytes())
    h.update(raw[whole:].numpy().tobytes())
    return h.hexdigest()


def write_packed(
    path: Path, packed: Packed, facts: Mapping[str, Any], proof: IntegrityRecord | None = None, keep: bool = False
) -> None:
    """Write `packed` to `path`, whole or not at all.  facts: JSON-able, what the entry was made from; keep: what stands
    there by then stays.  Raises OSError."""
    parts = [("packed", packed.tensors), ("proof", proof.tensors() if proof is not None else {})]
    places: list[TensorPlace] = []
    tensors: list[Tensor] = []
    offset = 0
    for part, named in parts:
        for name, given in named.items():
            t = given.detach().cpu().contiguous()
            dtype = str(t.dtype).removeprefix("torch.")
            host = given.device.type == "cpu"
            places.append(TensorPlace(part, name, host, offset, dtype, tuple(t.shape), checksum(t)))
            tensors.append(t)
            offset += aligned(places[-1].nbytes)
    header = Header(packed.backend, facts, packed.meta, places, offset).to_bytes()
    with replacing(path, keep) as f:
        f.write(MAGIC + struct.pack("<II", len(header), zlib.crc32(header)) + header)
        start = aligned(PREFIX_BYTES + len(header))
        for place, t in zip(places, tensors, strict=True):
            f.seek(start + place.offset)
            if t.numel():
                f.write(t.reshape(-1).view(torch.uint8).numpy().data)
        f.truncate(start + offset)
        os.fchmod(f.fileno(), stat.S_IMODE(os.fstat(f.fileno()).st_mode) & ~0o222)


def read_packed(path: Path, facts: Mapping[str, Any] | None = None, verify: bool = True) -> Packed:
    """The packed layer of the entry at `path`; see read_entry."""
    return read_entry(path, facts, verify).packed


def read_entry(
    path: Path, facts: Mapping[str, Any] | None = None, verify: bool = True, device: torch.device | None = None
) -> Entry:
    """The entry at `path`.  CacheError when it is damaged, was made from other `facts`, or changes while it is read.

    verify: compare the checksums, which reads every byte once.  device: where tensors go that were on an accelerator
    when they were packed, and then nothing stays mapped; None or a CPU: all tensors are the file's mapping, which is to
    be watched (Entry.file) while they are in use.
    """
    away = device is not None and device.type != "cpu"
    file = EntryFile(path, lasting=not away)
    try:
        header, start = _header(file.data)
    except HeaderError as e:
        raise CacheError(f"{path}: {e}") from None
    if facts is not None and header.facts != json.loads(json.dumps(facts)):
        raise CacheError(f"{path}: made from other facts: {', '.join(changed(header.facts, facts))}")
    found = [_tensor(file.data, start, place) for place in header.tensors]

    def damaged() -> str:
        return _damaged(header.tensors, found)

    if verify and (what := damaged()):
        raise CacheError(f"{path}: {what}")
    kept = found
    if away:
        kept = [t.clone() if p.host else t.to(device) for p, t in zip(header.tensors, found, strict=True)]
    file.settle(damaged)
    parts: dict[str, dict[str, Tensor]] = {"packed": {}, "proof": {}}
    for place, t in zip(header.tensors, kept, strict=True):
        parts[place.part][place.name] = t
    proof = IntegrityRecord.of(parts["proof"]) if parts["proof"] else None
    served = None if away or not file.mapped else file
    return Entry(Packed(header.backend, parts["packed"], header.meta), proof, served)


def read_header(path: Path) -> Header:
    """The header alone.  Raises CacheError."""
    try:
        return _header(EntryFile(path, lasting=False).data)[0]
    except HeaderError as e:
        raise CacheError(f"{path}: {e}") from None


def _header(data: mmap.mmap) -> tuple[Header, int]:
    """(the header, where the tensors' data starts).  Raises HeaderError."""
    if data[:8] != MAGIC:
        raise HeaderError(f"is no cache entry of this version (first bytes {data[:8]!r})")
    if len(data) < PREFIX_BYTES:
        raise HeaderError("ends before its header")
    size, crc = struct.unpack("<II", data[8:PREFIX_BYTES])
    if size > min(MOST_HEADER_BYTES, len(data) - PREFIX_BYTES):
        raise HeaderError(f"a header of {size} bytes in a file of {len(data)}")
    text = data[PREFIX_BYTES : PREFIX_BYTES + size]
    if zlib.crc32(text) != crc:
        raise HeaderError("damaged header")
    header, start = Header.of(text), aligned(PREFIX_BYTES + size)
    if len(data) != start + header.data_bytes:
        raise HeaderError(f"{len(data)} bytes, its header says {start + header.data_bytes}")
    return header, start


def _damaged(places: Sequence[TensorPlace], tensors: Sequence[Tensor]) -> str:
    """What differs from its checksum; "" if nothing does.  Reads every byte."""
    for place, t in zip(places, tensors, strict=True):
        if checksum(t) != place.checksum:
            return f"tensor {place.name} is damaged: its checksum differs"
    return ""


def changed(made_from: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return sorted(k for k in facts if made_from.get(k) != json.loads(json.dumps(facts[k])))


def _tensor(data: mmap.mmap, start: int, place: TensorPlace) -> Tensor:
    """A view of the data; not of it where it has no elements."""
    if not place.nbytes:
        return torch.empty(place.shape, dtype=place.torch_dtype)
    count = place.nbytes // place.torch_dtype.itemsize
    flat = torch.frombuffer(data, dtype=place.torch_dtype, count=count, offset=start + place.offset)
    return flat.view(place.shape)
