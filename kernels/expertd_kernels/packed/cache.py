"""A folder of packed layers: packed once, mapped by every later start and by every process on the host.

A key is made of everything that the packed bytes depend on: the checkpoint, the experts held, the backend, the device,
and the code that read and packed them.  file.py has the file of one entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.oracle.backend import Backend
from expertd_kernels.packed.file import (
    ALIGN,
    CacheError,
    Entry,
    changed,
    read_entry,
    read_header,
    read_packed,
    write_packed,
)
from expertd_kernels.packed.integrity import IntegrityRecord
from expertd_kernels.weights.serial import activation_to_json, scheme_to_json

# Why it is so: decision 35 in DECISIONS.md.
__all__ = [
    "ALIGN",
    "CacheError",
    "Entry",
    "Found",
    "PackedCache",
    "code_digest",
    "read_entry",
    "read_packed",
    "write_packed",
]

VERSIONS = ("code", "packages", "files")
"""Facts that change when software is upgraded or the checkpoint's files are replaced.  An entry that differs in these
alone is stale: nobody will ask for it again."""

ABANDONED_S = 3600.0
"""A file that was begun this long ago and never renamed was left by a process that died."""


@dataclass(frozen=True, eq=False)
class Found:
    """What looking for an entry gave.  outcome: "hit"; "miss"; "stale" and "damaged": one was there, and why says what
    is wrong with it.  entry: with a hit only."""

    outcome: str
    why: str = ""
    entry: Entry | None = None


@cache
def code_digest() -> str:
    """Hex digest of this package's own sources: what reads, quantizes and packs weights.  A version number would not
    tell two working trees of one version apart."""
    root = Path(__file__).parents[1]
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
            "packages": {n: p.packages[n].version for n in sorted(backend.needs) if n in p.packages},
            "files": files,
            "code": code_digest(),
        }

    def path(self, facts: Mapping[str, Any]) -> Path:
        """Where the entry made from `facts` lies."""
        return self.folder / f"{_stem(facts)}{_digest({k: facts[k] for k in VERSIONS})}.packed"

    def find(self, facts: Mapping[str, Any], device: torch.device | None = None) -> Found:
        """The entry, if there is one that can be used.  device: see read_entry."""
        path = self.path(facts)
        if not path.is_file():
            old = next(iter(self._stale(facts)), None)
            return Found("miss") if old is None else Found("stale", _why_stale(old, facts))
        try:
            return Found("hit", entry=read_entry(path, facts, device=device))
        except CacheError as e:
            return Found("damaged", str(e))

    def store(
        self, facts: Mapping[str, Any], packed: Packed, proof: IntegrityRecord | None = None, replace: bool = True
    ) -> Path:
        """Write the entry and remove those that it supersedes; returns its path.  Raises OSError.

        replace: False keeps one that another process has written meanwhile, so that both map the same file.
        """
        path = self.path(facts)
        if replace or not path.is_file():
            write_packed(path, packed, facts, proof, keep=not replace)
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
        names = ", ".join(changed(read_header(path).facts, facts))
    except CacheError as e:
        return str(e)
    return f"{path}: made with other {names}"
