"""Packed weights on disk: packed once, mapped by every later start and by every process on the host.

One file an entry:

    8 bytes   magic
    4 + 4     length and CRC-32 of the header, little-endian
    header    JSON: key facts, meta, and for each tensor its dtype, shape, offset and checksum
    ...       tensors, each at a multiple of ALIGN bytes

Files are written beside their place and renamed, so a reader never sees half of one.  Tensors are mapped copy-on-write:
processes share the pages, and nobody can change the file through a tensor.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.protocol import Packed
from expertd_kernels.oracle import Backend
from expertd_kernels.problem import Problem
from expertd_kernels.serial import activation_to_json, scheme_to_json

__all__ = ["ALIGN", "CacheError", "PackedCache", "read_packed", "write_packed"]

MAGIC = b"expertd\x01"
ALIGN = 4096
"""A page: mapped tensors start on one, so kernels that want 64-byte or page alignment have it."""

CHUNK_BYTES = 1 << 20
"""Bytes that one checksum covers."""


class CacheError(Exception):
    """An entry that cannot be used; the text says which file and why."""


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


def write_packed(path: Path, packed: Packed, facts: Mapping[str, Any]) -> None:
    """Write `packed` to `path`, atomically.  facts: JSON-able, what the entry was made from."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in packed.tensors.items()}
    table: dict[str, Any] = {}
    offset = 0
    for name, t in tensors.items():
        table[name] = {
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "offset": offset,
            "checksum": checksum(t),
        }
        offset += -(-t.numel() * t.element_size() // ALIGN) * ALIGN
    header = json.dumps(
        {"backend": packed.backend, "facts": facts, "meta": packed.meta, "tensors": table, "data_bytes": offset}
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(MAGIC + struct.pack("<II", len(header), zlib.crc32(header)) + header)
            start = _data_start(len(header))
            for name, t in tensors.items():
                f.seek(start + table[name]["offset"])
                if t.numel():
                    f.write(t.reshape(-1).view(torch.uint8).numpy().data)
            f.truncate(start + offset)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _data_start(header_bytes: int) -> int:
    return -(-(16 + header_bytes) // ALIGN) * ALIGN


def read_packed(path: Path, facts: Mapping[str, Any] | None = None, verify: bool = True) -> Packed:
    """The entry at `path`, its tensors mapped.  CacheError when it is damaged, or was made from other `facts`.
    verify: compare the checksums, which reads every byte once."""
    try:
        with open(path, "rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise CacheError(f"{path}: cannot be mapped: {e}") from e
    if mapped[:8] != MAGIC:
        raise CacheError(f"{path}: is no cache entry of this version (first bytes {mapped[:8]!r})")
    size, crc = struct.unpack("<II", mapped[8:16])
    text = mapped[16 : 16 + size]
    if zlib.crc32(text) != crc:
        raise CacheError(f"{path}: damaged header")
    header = json.loads(text)
    table, start = header["tensors"], _data_start(size)
    if len(mapped) != start + header["data_bytes"]:
        raise CacheError(f"{path}: {len(mapped)} bytes, its header says {start + header['data_bytes']}")
    if facts is not None and header["facts"] != json.loads(json.dumps(facts)):
        changed = sorted(k for k in facts if header["facts"].get(k) != json.loads(json.dumps(facts[k])))
        raise CacheError(f"{path}: made from other facts: {', '.join(changed)}")
    tensors = {name: _mapped_tensor(mapped, start, row) for name, row in table.items()}
    if verify:
        for name, t in tensors.items():
            if checksum(t) != table[name]["checksum"]:
                raise CacheError(f"{path}: tensor {name} is damaged: its checksum differs")
    return Packed(header["backend"], tensors, header["meta"])


def _mapped_tensor(mapped: mmap.mmap, start: int, row: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, row["dtype"])
    count = 1
    for n in row["shape"]:
        count *= n
    if count == 0:
        return torch.empty(row["shape"], dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + row["offset"])
    return flat.view(row["shape"])


@dataclass(frozen=True)
class PackedCache:
    """A folder of entries.  A key is made of everything that the packed bytes depend on, so a stale entry is never
    found under it; a damaged one is reported, removed and made again."""

    folder: Path

    def facts(
        self, fingerprint: str, layer: int, experts: Sequence[int], backend: Backend, p: Problem
    ) -> dict[str, Any]:
        """What an entry is made from.  fingerprint: of the checkpoint; experts: global ids held."""
        return {
            "fingerprint": fingerprint,
            "layer": layer,
            "experts": list(experts),
            "backend": backend.name,
            "layout_version": backend.layout_version,
            "packages": {n: p.packages[n].version for n in sorted(backend.needs) if n in p.packages},
            "device": str(p.device),
            "features": sorted(p.device.features),
            "w13": scheme_to_json(p.w13),
            "w2": scheme_to_json(p.w2),
            "activation": activation_to_json(p.activation),
            "activation_quant": p.activation_quant.value,
            "compute_dtype": p.compute_dtype,
            "byte_order": sys.byteorder,
        }

    def path(self, facts: Mapping[str, Any]) -> Path:
        """Where the entry made from `facts` lies."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"layer{facts['layer']}-{facts['backend']}-{digest[:32]}.packed"

    def load(self, facts: Mapping[str, Any]) -> Packed | None:
        """The entry, or None when there is none.  A damaged one warns, is removed, and counts as none."""
        path = self.path(facts)
        if not path.is_file():
            return None
        try:
            return read_packed(path, facts)
        except CacheError as e:
            warnings.warn(f"cache: {e}; it is removed and made again", RuntimeWarning, stacklevel=2)
            path.unlink(missing_ok=True)
            return None

    def store(self, facts: Mapping[str, Any], packed: Packed) -> Path:
        """Write the entry; returns its path."""
        path = self.path(facts)
        write_packed(path, packed, facts)
        return path
