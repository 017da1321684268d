"""Packed weights on disk: packed once, mapped by every later start and by every process on the host.

One file an entry:

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

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from expertd_kernels.backends.protocol import Packed
from expertd_kernels.oracle import Backend
from expertd_kernels.problem import Problem
from expertd_kernels.proof import Proof
from expertd_kernels.serial import activation_to_json, scheme_to_json

__all__ = [
    "ALIGN",
    "CacheError",
    "Entry",
    "Found",
    "PackedCache",
    "code_digest",
    "read_entry",
    "read_packed",
    "replacing",
    "write_packed",
]

MAGIC = b"expertd\x02"
ALIGN = 4096
"""A page: mapped tensors start on one, so kernels that want 64-byte or page alignment have it."""

CHUNK_BYTES = 1 << 20
"""Bytes that one checksum covers."""

VERSIONS = ("code", "layout_version", "packages", "files")
"""Facts that change when software is upgraded or the checkpoint's files are replaced.  An entry that differs in these
alone is stale: nobody will ask for it again."""

ABANDONED_S = 3600.0
"""A file that was begun this long ago and never renamed was left by a process that died."""


class CacheError(Exception):
    """An entry that cannot be used; the text says which file and why."""


@dataclass(frozen=True, eq=False)
class Entry:
    """What a file holds, mapped.  proof: None for an entry that was written without one."""

    packed: Packed
    proof: Proof | None


@dataclass(frozen=True, eq=False)
class Found:
    """What looking for an entry gave.  outcome: "hit"; "miss"; "stale" and "damaged": one was there, and why says what
    is wrong with it.  entry: with a hit only."""

    outcome: str
    why: str = ""
    entry: Entry | None = None


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the body ends well, and is gone when it does not.  Its folder is made;
    its mode is what the umask leaves, so that servers of other users may share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as f:
            yield f
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
    mapped, header, start = _map(path)
    if facts is not None and header["facts"] != json.loads(json.dumps(facts)):
        raise CacheError(f"{path}: made from other facts: {', '.join(_changed(header['facts'], facts))}")
    parts: dict[str, dict[str, Tensor]] = {"packed": {}, "proof": {}}
    for row in header["tensors"]:
        t = _mapped_tensor(mapped, start, row)
        if verify and checksum(t) != row["checksum"]:
            raise CacheError(f"{path}: tensor {row['name']} is damaged: its checksum differs")
        parts[row["part"]][row["name"]] = t if row["host"] or device is None else t.to(device)
    proof = Proof.of(parts["proof"]) if parts["proof"] else None
    return Entry(Packed(header["backend"], parts["packed"], header["meta"]), proof)


def _map(path: Path) -> tuple[mmap.mmap, dict[str, Any], int]:
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


def _changed(made_from: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
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


@cache
def code_digest() -> str:
    """Hex digest of this package's own sources: what reads, quantizes and packs weights.  A version number would not
    tell two working trees of one version apart."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for suffix in ("py", "cpp", "h") for p in root.rglob(f"*.{suffix}")):
        if "bench" in path.relative_to(root).parts:
            continue  # measures, and packs nothing
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class PackedCache:
    """A folder of entries.

    A key is made of everything that the packed bytes depend on, so an entry made from something else is never taken.
    One that nobody will ask for again (another version, replaced checkpoint files) is found and removed when its
    successor is written; a damaged one is reported, removed and made again.
    """

    folder: Path

    def facts(
        self,
        fingerprint: str,
        layer: int,
        experts: Sequence[int],
        backend: Backend,
        p: Problem,
        files: str = "",
    ) -> dict[str, Any]:
        """What an entry is made from.  fingerprint: of the checkpoint; experts: global ids held; files: state of the
        checkpoint's files, which the fingerprint, made from headers, does not cover."""
        return {
            "fingerprint": fingerprint,
            "layer": layer,
            "experts": list(experts),
            "backend": backend.name,
            "device": str(p.device),
            "features": sorted(p.device.features),
            "w13": scheme_to_json(p.w13),
            "w2": scheme_to_json(p.w2),
            "top_k": p.top_k,
            "activation": activation_to_json(p.activation),
            "activation_quant": p.activation_quant.value,
            "compute_dtype": p.compute_dtype,
            "byte_order": sys.byteorder,
            "layout_version": backend.layout_version,
            "packages": {n: p.packages[n].version for n in sorted(backend.needs) if n in p.packages},
            "files": files,
            "code": code_digest(),
        }

    def path(self, facts: Mapping[str, Any]) -> Path:
        """Where the entry made from `facts` lies."""
        return self.folder / f"{_stem(facts)}{_digest({k: facts[k] for k in VERSIONS})}.packed"

    def load(self, facts: Mapping[str, Any], device: torch.device | None = None) -> Found:
        """The entry, if there is one that can be used.  device: see read_entry."""
        path = self.path(facts)
        if not path.is_file():
            old = next(iter(self._stale(facts)), None)
            return Found("miss") if old is None else Found("stale", _why_stale(old, facts))
        try:
            return Found("hit", entry=read_entry(path, facts, device=device))
        except CacheError as e:
            return Found("damaged", str(e))

    def store(self, facts: Mapping[str, Any], packed: Packed, proof: Proof | None = None, replace: bool = True) -> Path:
        """Write the entry and remove those that it supersedes; returns its path.  Raises OSError.

        replace: False keeps one that another process has written meanwhile, so that both map the same file.
        """
        path = self.path(facts)
        if replace or not path.is_file():
            write_packed(path, packed, facts, proof)
        for old in self._stale(facts):
            old.unlink(missing_ok=True)
        _sweep(self.folder)
        return path

    def _stale(self, facts: Mapping[str, Any]) -> list[Path]:
        """Entries of the same layer, experts and backend that were made with other VERSIONS."""
        path = self.path(facts)
        return [p for p in sorted(self.folder.glob(f"{_stem(facts)}*.packed")) if p != path]


def _sweep(folder: Path) -> None:
    """Remove files that were begun long ago and never finished."""
    for part in folder.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process may sweep, too, or finish its file just now
            if part.stat().st_mtime < time.time() - ABANDONED_S:
                part.unlink()


def _stem(facts: Mapping[str, Any]) -> str:
    """Beginning of the names of all entries for the layer, experts and backend of `facts`, whatever their version."""
    lasting = {k: v for k, v in facts.items() if k not in VERSIONS}
    return f"layer{facts['layer']}-{facts['backend']}-{_digest(lasting)}-"


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _why_stale(path: Path, facts: Mapping[str, Any]) -> str:
    try:
        changed = ", ".join(_changed(_map(path)[1]["facts"], facts))
    except CacheError as e:
        return str(e)
    return f"{path}: made with other {changed}"
