"""Lazy, checked access to the tensors of safetensors files.

Nothing of a file is believed before it is checked: header length, JSON, dtypes, shapes, offsets (inside the file, no
overlap, no hole), index entries (no path outside the folder), links.  A tensor's bytes are read when they are asked
for, with pread into fresh memory: a file that shrinks meanwhile gives an error where a memory map would kill the
process, and resident memory is what was asked for, not what the kernel happens to map.

Layout of a file (safetensors): u64 little-endian header length, JSON header
{name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data; offsets count from its start.
"""

from __future__ import annotations

import math
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.files import inside, read_json_bytes

__all__ = ["DTYPES", "PAGE_BYTES", "PIECE_BYTES", "Counter", "Shard", "Stored", "prefetch"]

DTYPES: Mapping[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (1, torch.bool),
    "U8": (1, torch.uint8),
    "I8": (1, torch.int8),
    "F8_E4M3": (1, torch.float8_e4m3fn),
    "F8_E5M2": (1, torch.float8_e5m2),
    "F8_E8M0": (1, torch.uint8),  # the exponent's bits: canonical e8m0 scales are u8
    "U16": (2, None),
    "I16": (2, torch.int16),
    "F16": (2, torch.float16),
    "BF16": (2, torch.bfloat16),
    "U32": (4, None),
    "I32": (4, torch.int32),
    "F32": (4, torch.float32),
    "U64": (8, None),
    "I64": (8, torch.int64),
    "F64": (8, torch.float64),
    "C64": (8, None),
}
"""safetensors dtype -> (bytes, torch type it is read as; None = never part of an expert)."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

MAX_RANK = 8
"""Extents of a shape; an expert's tensors have at most four."""

PAGE_BYTES, SLOW_BYTES, PIECE_BYTES = 4096, 32, 256 << 10
"""A copy to a place less than SLOW_BYTES further into its page than the source takes three to four times as long: the
processor takes each load for one of the bytes that it has just stored, as it compares 12 bits of the addresses.
(Measured: a `read` of the page cache on an AMD EPYC of family 25.)  A detour in pieces that stay in the cache is
faster."""


class Counter:
    """Bytes read so far; shared by the shards of a checkpoint, safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes


Look = Callable[[NDArray[np.uint8]], None]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or the part of one below an index of its first dimension.

    dtype  safetensors name ("I32"); shape; offset in the file; nbytes of these elements
    whole  name of the tensor in the file that [index] was cut out of; "" and None for a whole one
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard = field(repr=False)
    offset: int
    nbytes: int
    whole: str = ""
    index: int | None = None

    @property
    def file(self) -> str:
        return self.shard.path.name

    def cut(self, index: int) -> Stored:
        """The tensor [index] of this [E, ...] tensor: same file, shape without the first dimension."""
        if not self.shape or not 0 <= index < self.shape[0]:
            raise CheckpointError(f"{self.name}: no element {index} in shape {list(self.shape)}")
        size = self.nbytes // self.shape[0]
        name, offset = f"{self.name}[{index}]", self.offset + index * size
        return Stored(name, self.dtype, self.shape[1:], self.shard, offset, size, self.name, index)

    def rows(self, start: int, stop: int) -> Stored:
        """The tensor [start:stop] of this one."""
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise CheckpointError(f"{self.name}: no rows {start} to {stop} in shape {list(self.shape)}")
        size = self.nbytes // max(self.shape[0], 1)
        shape = (stop - start, *self.shape[1:])
        name = f"{self.name}[{start}:{stop}]"
        return Stored(name, self.dtype, shape, self.shard, self.offset + start * size, size * (stop - start))

    @property
    def torch_dtype(self) -> torch.dtype:
        known = DTYPES.get(self.dtype)
        if known is None or known[1] is None:
            readable = ", ".join(n for n, (_, t) in DTYPES.items() if t is not None)
            raise CheckpointError(f"{self.name} in {self.file}: dtype {self.dtype}, want one of {readable}")
        return known[1]

    def read(self) -> Tensor:
        """The values, in fresh contiguous memory."""
        dtype, buffer = self.torch_dtype, np.empty(self.nbytes, np.uint8)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        self.shard.fill(buffer, self.offset, self.name)
        return torch.frombuffer(buffer, dtype=dtype).view(self.shape)

    def head(self, nbytes: int) -> bytes:
        """The first bytes, as they lie in the file."""
        out = np.empty(min(nbytes, self.nbytes), np.uint8)
        self.shard.fill(out, self.offset, self.name)
        return out.tobytes()

    def read_into(self, out: Tensor, look: Look | None = None) -> None:
        """Fill a contiguous tensor of the same number of bytes.  look: see Shard.fill."""
        if out.numel() * out.element_size() != self.nbytes or not out.is_contiguous():
            raise ValueError(f"{self.name}: {self.nbytes} bytes into {out.dtype} {tuple(out.shape)}")
        if self.nbytes:
            self.shard.fill(out.view(-1).view(torch.uint8).numpy(), self.offset, self.name, look)


class Shard:
    """One safetensors file: its checked header, and its data on demand."""

    def __init__(self, path: Path, root: Path, counter: Counter) -> None:
        self.path = path
        self.counter = counter
        real = inside(path, root)
        try:
            self.fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise CheckpointError(f"{path.name}: cannot be opened: {e.strerror}") from None
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name}: is no regular file")
        self.size = status.st_size
        self.tensors: dict[str, Stored] = self._parse()

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            os.close(fd)

    def fill(self, out: NDArray[np.uint8], offset: int, subject: str, look: Look | None = None) -> None:
        """Fill an array [bytes] from `offset` on.  look: shown each piece of it as soon as that is read."""
        if out.nbytes > PIECE_BYTES and 0 < (out.ctypes.data - offset) % PAGE_BYTES < SLOW_BYTES:
            self._fill_by_detour(out, offset, subject, look)
            return
        step = PIECE_BYTES if look is not None else max(1, out.nbytes)
        for begin in range(0, out.nbytes, step):
            piece = out[begin : begin + step]
            self._read(piece, offset + begin, subject)
            if look is not None:
                look(piece)

    def _read(self, out: NDArray[np.uint8], offset: int, subject: str) -> None:
        done, size = 0, out.nbytes
        while done < size:
            try:
                got = os.preadv(self.fd, [out.data[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"{subject}: reading {self.path.name} failed: {e.strerror}") from None
            if got == 0:
                raise CheckpointError(
                    f"{subject}: {self.path.name} ends {size - done} bytes early; it was cut off while being read"
                )
            done += got
        self.counter.add(done)

    def _fill_by_detour(self, out: NDArray[np.uint8], offset: int, subject: str, look: Look | None) -> None:
        """fill() by way of a buffer that stays in the cache, see SLOW_BYTES."""
        room = np.empty(PIECE_BYTES + PAGE_BYTES, np.uint8)
        first = (offset + PAGE_BYTES // 2 - room.ctypes.data) % PAGE_BYTES  # PIECE_BYTES is a multiple of a page
        for begin in range(0, out.nbytes, PIECE_BYTES):
            piece = out[begin : begin + PIECE_BYTES]
            buffer = room[first : first + piece.nbytes]
            self._read(buffer, offset + begin, subject)
            if look is not None:
                look(buffer)
            np.copyto(piece, buffer)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ask the kernel to have these (begin, end) bytes ready; a hint, no promise."""
        if not hasattr(os, "posix_fadvise"):  # not Linux
            return
        begin = end = 0
        for first, last in [*sorted(ranges), (self.size + 1, self.size + 1)]:
            if first > end:
                if end > begin:
                    os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
                begin = first
            end = max(end, last)

    def _parse(self) -> dict[str, Stored]:
        name = self.path.name
        if self.size < 8:
            raise CheckpointError(f"{name}: {self.size} bytes, want a safetensors file: truncated or not fetched")
        length = int.from_bytes(os.pread(self.fd, 8, 0), "little")
        if length > MAX_HEADER_BYTES or length > self.size - 8:
            raise CheckpointError(
                f"{name}: header of {length} bytes in a file of {self.size}: truncated, or no safetensors file"
            )
        header = read_json_bytes(os.pread(self.fd, length, 8), f"{name}: header")
        base = 8 + length
        tensors = {n: self._entry(n, e, base) for n, e in header.items() if n != "__metadata__"}
        self._check_cover(tensors, base)
        return tensors

    def _entry(self, tensor: str, entry: Any, base: int) -> Stored:
        """One header entry, with its offsets and its size checked."""
        where = f"{tensor} in {self.path.name}"
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise CheckpointError(f"{where}: header entry {entry!r:.80}, want dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry.get("shape"), entry.get("data_offsets")
        if isinstance(shape, list) and len(shape) > MAX_RANK:
            raise CheckpointError(f"{where}: shape has {len(shape)} extents, want at most {MAX_RANK}")
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(f"{where}: shape {shape!r:.80} and data_offsets {offsets!r:.80} make no tensor")
        begin, end = offsets
        if base + end > self.size:
            raise CheckpointError(
                f"{where}: bytes {begin} to {end} of the data, but the file holds {self.size - base}: truncated"
            )
        known = DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known[0] != end - begin:
            raise CheckpointError(
                f"{where}: {dtype} {shape} takes {math.prod(shape) * known[0]} bytes, the header gives {end - begin}"
            )
        return Stored(tensor, dtype, tuple(shape), self, base + begin, end - begin)

    def _check_cover(self, tensors: Mapping[str, Stored], base: int) -> None:
        """The tensors must lie side by side and fill the data: overlaps and holes both mean a broken writer."""
        at, last = base, "the header"
        for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if t.offset < at:
                raise CheckpointError(f"{t.name} in {self.path.name}: its bytes overlap those of {last}")
            if t.offset > at:
                raise CheckpointError(f"{t.name} in {self.path.name}: {t.offset - at} unused bytes before it")
            at, last = t.offset + t.nbytes, t.name
        if at != self.size:
            raise CheckpointError(f"{self.path.name}: {self.size - at} bytes after its last tensor ({last})")


def _naturals(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of integers >= 0 (booleans are none)."""
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def prefetch(tensors: Iterable[Stored]) -> None:
    """Ask the kernel to read these ahead, neighbours in one go."""
    ranges: dict[Shard, list[tuple[int, int]]] = {}
    for t in tensors:
        ranges.setdefault(t.shard, []).append((t.offset, t.offset + t.nbytes))
    for shard, found in ranges.items():
        shard.prefetch(found)
