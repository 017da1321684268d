"""The file of one packed layer: written once, mapped by whoever computes from it.

    8 bytes   magic
    4 + 4     length and CRC-32 of the header, little-endian
    header    JSON: key facts, meta, and for each tensor its dtype, shape, offset, checksum and where it belongs
    ...       tensors, each at a multiple of ALIGN bytes

Beside the packed tensors stand those of the proof that the layer passed when the entry was made, so that the mapped
layer can be checked without canonical weights.  Files are written beside their place and renamed, so a reader never
sees half of one.  Tensors are mapped copy-on-write: processes share the pages, and nobody can change the file through
a tensor.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.atomic_file import replacing
from expertd_kernels.packed.proof import Proof
from expertd_kernels.protocol import Packed

__all__ = [
    "ALIGN",
    "CacheError",
    "Entry",
    "changed",
    "checksum",
    "map_entry",
    "read_entry",
    "read_packed",
    "write_packed",
]

MAGIC = b"expertd\x02"
ALIGN = 4096
"""A page: mapped tensors start on one, so kernels that want 64-byte or page alignment have it."""

CHUNK_BYTES = 1 << 20
"""Bytes that one checksum covers."""


class CacheError(Exception):
    """An entry that cannot be used; the text says which file and why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """What a file holds, mapped.  proof: None for an entry that was written without one."""

    packed: Packed
    proof: Proof | None


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


def write_packed(path: Path, packed: Packed, facts: Mapping[str, Any], proof: Proof | None = None) -> None:
    """Write `packed` to `path`, atomically.  facts: JSON-able, what the entry was made from.  Raises OSError."""
    parts = [("packed", packed.tensors), ("proof", proof.tensors() if proof is not None else {})]
    table: list[dict[str, Any]] = []
    tensors: list[Tensor] = []
    offset = 0
    for part, named in parts:
        for name, given in named.items():
            t = given.detach().cpu().contiguous()
            where = {"part": part, "name": name, "host": given.device.type == "cpu", "offset": offset}
            what = {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "checksum": checksum(t)}
            table.append({**where, **what})
            tensors.append(t)
            offset += _aligned(t.numel() * t.element_size())
    header = json.dumps(
        {"backend": packed.backend, "facts": facts, "meta": packed.meta, "tensors": table, "data_bytes": offset}
    ).encode()
    with replacing(path) as f:
        f.write(MAGIC + struct.pack("<II", len(header), zlib.crc32(header)) + header)
        start = _data_start(len(header))
        for row, t in zip(table, tensors, strict=True):
            f.seek(start + row["offset"])
            if t.numel():
                f.write(t.reshape(-1).view(torch.uint8).numpy().data)
        f.truncate(start + offset)


def _data_start(header_bytes: int) -> int:
    return _aligned(16 + header_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def read_packed(path: Path, facts: Mapping[str, Any] | None = None, verify: bool = True) -> Packed:
    """The packed layer of the entry at `path`; see read_entry."""
    return read_entry(path, facts, verify).packed


def read_entry(
    path: Path, facts: Mapping[str, Any] | None = None, verify: bool = True, device: torch.device | None = None
) -> Entry:
    """The entry at `path`, its tensors mapped.  CacheError when it is damaged, or was made from other `facts`.

    verify: compare the checksums, which reads every byte once.  device: where tensors go that were on an accelerator
    when they were packed; None = they stay mapped.
    """
    mapped, header, start = map_entry(path)
    if facts is not None and header["facts"] != json.loads(json.dumps(facts)):
        raise CacheError(f"{path}: made from other facts: {', '.join(changed(header['facts'], facts))}")
    parts: dict[str, dict[str, Tensor]] = {"packed": {}, "proof": {}}
    for row in header["tensors"]:
        t = _mapped_tensor(mapped, start, row)
        if verify and checksum(t) != row["checksum"]:
            raise CacheError(f"{path}: tensor {row['name']} is damaged: its checksum differs")
        parts[row["part"]][row["name"]] = t if row["host"] or device is None else t.to(device)
    proof = Proof.of(parts["proof"]) if parts["proof"] else None
    return Entry(Packed(header["backend"], parts["packed"], header["meta"]), proof)


def map_entry(path: Path) -> tuple[mmap.mmap, dict[str, Any], int]:
    """(the whole file, its header, where its data starts).  Raises CacheError."""
    try:
        with open(path, "rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise CacheError(f"{path}: cannot be mapped: {e}") from e
    if mapped[:8] != MAGIC:
        raise CacheError(f"{path}: is no cache entry of this version (first bytes {mapped[:8]!r})")
    if len(mapped) < 16:
        raise CacheError(f"{path}: ends before its header")
    size, crc = struct.unpack("<II", mapped[8:16])
    text = mapped[16 : 16 + size]
    if zlib.crc32(text) != crc:
        raise CacheError(f"{path}: damaged header")
    header: dict[str, Any] = json.loads(text)
    start = _data_start(size)
    if len(mapped) != start + header["data_bytes"]:
        raise CacheError(f"{path}: {len(mapped)} bytes, its header says {start + header['data_bytes']}")
    return mapped, header, start


def changed(made_from: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return sorted(k for k in facts if made_from.get(k) != json.loads(json.dumps(facts[k])))


def _mapped_tensor(mapped: mmap.mmap, start: int, row: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, row["dtype"])
    count = 1
    for n in row["shape"]:
        count *= n
    if count == 0:
        return torch.empty(row["shape"], dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + row["offset"])
    return flat.view(row["shape"])
