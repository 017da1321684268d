"""The header of a packed layer's file: JSON that nobody may trust.  Pure, but for torch's names of dtypes.

    {"backend": str, "facts": {}, "meta": {}, "data_bytes": int, "tensors": [
        {"part": "packed" | "proof", "name": str, "host": bool, "offset": int, "dtype": str, "shape": [int],
         "checksum": str}]}

Whatever does not fit (another type, an offset outside the data, tensors that overlap) is a HeaderError with one
sentence, so that the entry is made again; nothing here ends in a traceback, and nothing is allocated by its word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from expertd_kernels.packed.integrity import IntegrityRecord

__all__ = ["ALIGN", "Header", "HeaderError", "TensorPlace", "aligned"]

ALIGN = 4096
"""A page: mapped tensors start on one, so kernels that want 64-byte or page alignment have it."""

PARTS = ("packed", "proof")
MAX_RANK = 16
MOST_ROWS = 1 << 40
"""Of any extent of a tensor: far beyond every layer, far below where products of extents stop being cheap."""


class HeaderError(ValueError):
    """The header is not one; the text says what is wrong with it."""


def aligned(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies.  part: "packed" or "proof"; host: it was in host memory when the layer was packed; offset:
    in bytes, from where the data starts; dtype: a name in torch."""

    part: str
    name: str
    host: bool
    offset: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises HeaderError where torch has no such dtype."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise HeaderError(f"tensor {self.name}: dtype {self.dtype!r}, which torch does not have")
        return found

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Header:
    """backend: that packed the layer; facts: what it was made from; meta: of Packed; data_bytes: behind the header."""

    backend: str
    facts: Mapping[str, Any]
    meta: Mapping[str, Any]
    tensors: Sequence[TensorPlace]
    data_bytes: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, text: bytes) -> Header:
        """The inverse of to_bytes.  Raises HeaderError."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise HeaderError(f"its header is no JSON: {e}") from None
        kinds: dict[str, type] = {"backend": str, "facts": dict, "meta": dict, "tensors": list, "data_bytes": int}
        fields = _fields("its header", found, kinds)
        tensors = tuple(_place(t) for t in fields["tensors"])
        header = cls(fields["backend"], fields["facts"], fields["meta"], tensors, fields["data_bytes"])
        header._check()
        return header

    def _check(self) -> None:
        """Tensors lie on pages inside the data, apart from each other, each name once; those of the proof are all or
        none of a proof's."""
        end = 0
        for t in sorted((t for t in self.tensors if t.nbytes), key=lambda t: t.offset):
            if t.offset < end or t.offset % ALIGN or t.offset + t.nbytes > self.data_bytes:
                raise HeaderError(
                    f"tensor {t.name}: {t.nbytes} bytes at {t.offset}, want a multiple of {ALIGN} from {end} on, inside"
                    f" {self.data_bytes} bytes"
                )
            end = t.offset + t.nbytes
        names = [(t.part, t.name) for t in self.tensors]
        if len(set(names)) != len(names):
            raise HeaderError(f"tensor {next(n for n in names if names.count(n) > 1)[1]} stands there twice")
        proof = {name for part, name in names if part == "proof"}
        if proof and not IntegrityRecord.NEEDED <= proof <= IntegrityRecord.NEEDED | IntegrityRecord.OPTIONAL:
            raise HeaderError(
                f"its proof has {', '.join(sorted(proof))}, want {', '.join(sorted(IntegrityRecord.NEEDED))}"
            )


def _place(found: Any) -> TensorPlace:
    kinds: dict[str, type] = {"part": str, "name": str, "host": bool, "offset": int, "dtype": str, "shape": list}
    f = _fields("a tensor of its header", found, kinds | {"checksum": str})
    if f["part"] not in PARTS:
        raise HeaderError(f"tensor {f['name']}: belongs to {f['part']!r}, want one of {', '.join(PARTS)}")
    if len(f["shape"]) > MAX_RANK:
        raise HeaderError(f"tensor {f['name']}: a shape of {len(f['shape'])} extents, want at most {MAX_RANK}")
    if not all(type(n) is int and 0 <= n < MOST_ROWS for n in f["shape"]):
        raise HeaderError(f"tensor {f['name']}: shape {f['shape']}, want numbers from 0 to {MOST_ROWS}")
    place = TensorPlace(**{**f, "shape": tuple(f["shape"])})
    if place.offset < 0 or place.nbytes < 0:
        raise HeaderError(f"tensor {place.name}: offset {place.offset}, want 0 or more")
    return place


def _fields(what: str, found: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The values of `kinds` in a JSON object, each of its exact type."""
    if not isinstance(found, dict):
        raise HeaderError(f"{what} is a {type(found).__name__}, want an object")
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise HeaderError(f"{what}: {name} is {found.get(name)!r:.80}, want {kind.__name__}")
    return {name: found[name] for name in kinds}
