"""Tensors of a checkpoint that arrive one by one, in any order, and in parts: the same readers read them as from files.

    received = Received(checkpoint, {3: [0, 1, 2, 3]})      experts wanted, by layer
    received.put("model.layers.3.mlp.experts.0.up_proj.weight", "BF16", (768, 2048), 0, data)
    received.take()                                          a layer that is complete, as a source, or None

Of a base, tensors may come as differences, and those that do not come stay as they are there, once rest_of_base() was
called.

A layer is complete when each wanted expert has all of its tensors: either those that `checkpoint` has (the same names
and dtypes), or unquantized weights of each projection.  Its bytes lie in one anonymous file in memory, or each tensor's
where `place` puts it, and go with the source.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.delta import applied, require_checksum
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.in_memory import Bytes, MemoryFile
from expertd_kernels.checkpoint.kept import filled
from expertd_kernels.checkpoint.names import LayerTensors, Place, group_by_layer, place_of
from expertd_kernels.checkpoint.tensors import DTYPES, MAX_RANK, Stored

__all__ = ["Received"]

FLOATS = ("BF16", "F16", "F32")
"""Dtypes of unquantized weights, which are quantized here where the served weights are."""
_MOST_EXTENT = 1 << 40
_MOST_NAME = 1024
_IN_MEMORY = -1
"""Instead of the sum of bytes that are read where they lie."""
_LEAST_PART = 4096
"""Bytes of a part that is not the end of its tensor: what is kept of each part costs some 300."""

Room = Callable[[int], Tensor]
"""[n] u8 on the host for so many bytes.  Raises RuntimeError where there is no memory."""
_Key = tuple[int, str, str]
"""(expert, projection, suffix); expert -1 = a fused tensor of all experts."""


@dataclass(eq=False)
class _Arriving:
    """A tensor of which some bytes are there.  begins, ends: of its parts, ascending, none beside another; sha256: what
    it must be, empty = any."""

    stored: Stored
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sha256: bytes = b""

    def add(self, begin: int, end: int) -> None:
        """Neighbours become one part.  Raises CheckpointError where bytes came before."""
        at = bisect.bisect_left(self.begins, begin)
        for i in (at - 1, at):
            if 0 <= i < len(self.begins) and begin < self.ends[i] and self.begins[i] < end:
                there = f"{self.begins[i]} to {self.ends[i]}"
                raise CheckpointError(f"{self.stored.name}: bytes {begin} to {end} overlap {there}, which are here")
        if at and self.ends[at - 1] == begin:
            at -= 1
            begin = self.begins.pop(at)
            del self.ends[at]
        if at < len(self.begins) and self.begins[at] == end:
            end = self.ends.pop(at)
            del self.begins[at]
        self.begins.insert(at, begin)
        self.ends.insert(at, end)

    @property
    def whole(self) -> bool:
        return (self.begins, self.ends) == ([0], [self.stored.nbytes])


class _Layer:
    """One layer under way.  as_stored, plain: what each way of being complete lacks; exact: see Received."""

    def __init__(self, number: int, like: LayerTensors, experts: Collection[int], exact: bool) -> None:
        self._exact = exact
        self.memory = MemoryFile(f"layer-{number}")
        self.arriving: dict[str, _Arriving] = {}
        self.like: dict[_Key, Stored] = {}
        for e, found in like.apart.items():
            if e in experts:
                self.like |= {(e, p, s): t for p, suffixes in found.items() for s, t in suffixes.items()}
        self.like |= {(-1, p, s): t for p, suffixes in like.fused.items() for s, t in suffixes.items()}
        self.as_stored = set(self.like)
        fused = "weight" if any(e < 0 and s == "weight" for e, _, s in self.like) else ""
        self.plain = {(e, p, "weight" if e >= 0 else fused) for e, p, _ in self.like}
        self.plain |= {key for key in self.like if key[2] == "bias"}

    def check(self, key: _Key, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a tensor that no way of being complete has, or of another shape."""
        like = self.like.get(key)
        if like is None and key not in self.plain:
            raise CheckpointError(f"{name}: unknown name; {self._names(key)}")
        if like is not None and (dtype == like.dtype or (dtype in FLOATS and like.dtype in FLOATS)):
            if self._exact and dtype != like.dtype and key[2] != "bias":
                raise CheckpointError(
                    f"{name}: {dtype}, want {like.dtype}, in which it is served: only a server that quantizes converts"
                )
            if shape != like.shape:
                raise CheckpointError(f"{name}: shape {list(shape)}, want {list(like.shape)}")
            return
        if key in self.plain and dtype in FLOATS:
            return
        want = [] if like is None else [f"{like.dtype} as the served checkpoint has it"]
        want += [f"unquantized weights ({', '.join(FLOATS)})"] if key in self.plain else []
        raise CheckpointError(f"{name}: {dtype} {list(shape)}; want {', or '.join(want)}")

    def _names(self, key: _Key) -> str:
        """What the checkpoint calls the nearest thing."""
        near = min(self.like, key=lambda known: (known[0] != key[0], known[1] != key[1], known))
        own = self.like[near].name
        plain = f"{own.removesuffix(near[2])}weight"
        also = "" if near[2] == "weight" or near[0] < 0 else f" (unquantized: {plain})"
        return f"the served checkpoint has {own}{also}"

    def done(self, key: _Key, dtype: str) -> None:
        like = self.like.get(key)
        if like is not None and (dtype == like.dtype or (dtype in FLOATS and like.dtype in FLOATS)):
            self.as_stored.discard(key)
        if dtype in FLOATS:
            self.plain.discard(key)

    @property
    def complete(self) -> bool:
        return not self.as_stored or not self.plain

    @property
    def lacks(self) -> set[_Key]:
        """Of the way of being complete that lacks less."""
        return min(self.as_stored, self.plain, key=len)


class Received:
    """Thread-safe.

    kept_bytes     of tensors of wanted experts so far; waiting_bytes: of them, those of layers that were not taken
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: Mapping[int, Sequence[int]],
        base: Checkpoint | None = None,
        place: Room | None = None,
        exact: Collection[int] = (),
    ) -> None:
        """checkpoint: whose names the tensors have; base: of which differences may come, None = of none; place: makes
        room for a tensor's bytes, None = in an anonymous file; exact: layers whose unquantized weights are served as
        they come, so that their dtype must be that of the checkpoint."""
        self._checkpoint, self._base, self._rest = checkpoint if base is None else base, base, False
        self._place, self._exact = place, frozenset(exact)
        self._wanted = {n: tuple(e) for n, e in wanted.items()}
        self._layers: dict[int, _Layer] = {}
        self._ready: list[int] = []
        self._taken: set[int] = set()
        self._sums: dict[str, int] = {}
        self._lock = threading.Lock()
        self.kept_bytes = self.waiting_bytes = 0

    def put(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        offset: int,
        data: bytes,
        sha256: bytes = b"",
        encoding: str = "",
        checksum: str = "",
    ) -> bool:
        """Some bytes of a tensor, at least _LEAST_PART or its last ones; encoding: of `data` as a difference from the
        base, see delta.py; checksum: of the whole tensor there.  False: it is of no wanted expert.  Raises
        CheckpointError, OSError."""
        at = self._wanted_place(name)
        if at is None:
            return False
        nbytes = _check_header(name, dtype, tuple(shape))
        if encoding:
            data = self._whole(at, name, dtype, tuple(shape), data, encoding, checksum)
        if not 0 <= offset <= offset + len(data) <= nbytes:
            raise CheckpointError(
                f"{name}: bytes {offset} to {offset + len(data)}, but {dtype} {list(shape)} has {nbytes}"
            )
        if not data or (len(data) < _LEAST_PART and offset + len(data) < nbytes):
            raise CheckpointError(
                f"{name}: a part of {len(data)} bytes, want at least {_LEAST_PART}, or the end of the tensor"
            )
        with self._lock:
            self._put(at, name, dtype, tuple(shape), nbytes, offset, data, sha256)
        return True

    def put_memory(self, name: str, dtype: str, shape: Sequence[int], where: Room) -> bool:
        """A whole tensor that is read where it lies when its layer is taken.  where: gives its bytes, [n] u8 on any
        device.  False: it is of no wanted expert.  Raises CheckpointError, and what `where` raises."""
        at = self._wanted_place(name)
        if at is None:
            return False
        nbytes = _check_header(name, dtype, tuple(shape))
        memory = where(nbytes)
        if not nbytes or memory.numel() != nbytes:
            raise CheckpointError(f"{name}: {memory.numel()} bytes, but {dtype} {list(shape)} has {nbytes}")
        with self._lock:
            if not self._again(name, 0, _IN_MEMORY):
                tensor = self._arriving(at, name, dtype, tuple(shape), nbytes, memory)
                tensor.add(0, nbytes)
                self._came(at, tensor, 0, nbytes, _IN_MEMORY)
        return True

    def _wanted_place(self, name: str) -> Place | None:
        """None: of no wanted expert.  Raises CheckpointError."""
        if len(name) > _MOST_NAME:
            raise CheckpointError(f"a tensor's name: got {len(name)} characters, want at most {_MOST_NAME}")
        at = place_of(name, self._checkpoint.naming)
        if at is None or at.layer not in self._wanted:
            return None
        if at.expert is not None and at.expert not in self._wanted[at.layer]:
            return None
        return at

    def _whole(
        self, at: Place, name: str, dtype: str, shape: tuple[int, ...], data: bytes, encoding: str, checksum: str
    ) -> bytes:
        """The tensor of which `data` is the difference from the base.  Raises CheckpointError."""
        if self._base is None:
            raise CheckpointError(f"{name}: a difference, in an update that has no base to apply it to")
        before = self._stored(at)
        if before is None or (before.dtype, before.shape) != (dtype, shape):
            got = "none" if before is None else f"{before.dtype} {list(before.shape)}"
            raise CheckpointError(f"{name}: a difference of {dtype} {list(shape)}, and the base has {got}")
        base = np.frombuffer(before.head(before.nbytes), np.uint8)
        new = applied(name, base, data, encoding)
        require_checksum(name, new, checksum)
        return new.tobytes()

    def _stored(self, at: Place) -> Stored | None:
        """In the base."""
        assert self._base is not None
        try:
            layer = self._base.tensors(at.layer)
        except KeyError:
            return None
        of_expert = layer.fused if at.expert is None else layer.apart.get(at.expert, {})
        return of_expert.get(at.projection, {}).get(at.suffix)

    def rest_of_base(self) -> None:
        """No tensor comes any more: what did not is as the base has it.  Of an update with a base."""
        assert self._base is not None
        with self._lock:
            self._rest = True

    def _put(
        self,
        at: Place,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        offset: int,
        data: bytes,
        sha256: bytes,
    ) -> None:
        total = _sum_of(data)
        if self._again(name, offset, total):
            return
        tensor = self._arriving(at, name, dtype, shape, nbytes)
        tensor.add(offset, offset + len(data))
        tensor.sha256 = sha256 or tensor.sha256
        shard = tensor.stored.shard
        assert isinstance(shard, (Bytes, MemoryFile))
        shard.write(data, tensor.stored.offset + offset)
        self._came(at, tensor, offset, len(data), total)

    def _again(self, name: str, offset: int, total: int) -> bool:
        """Whether these bytes came before.  Raises CheckpointError where others did."""
        before = self._sums.get(f"{name} {offset}")
        if before is not None and before != total:
            raise CheckpointError(f"{name}: was put before with other bytes; want each tensor once in an update")
        return before is not None

    def _arriving(
        self, at: Place, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, memory: Tensor | None = None
    ) -> _Arriving:
        """The tensor under way, with room for it.  memory: where it lies already.  Raises CheckpointError."""
        if at.layer in self._taken or at.layer in self._ready:
            raise CheckpointError(
                f"{name}: layer {at.layer} was complete without it; want each tensor once in an update"
            )
        layer = self._layers.get(at.layer)
        if layer is None:
            layer = self._layers[at.layer] = self._begun(at.layer)
        tensor = layer.arriving.get(name)
        if tensor is None:
            layer.check(_key(at), name, dtype, shape)
            stored = self._stored_in(layer, name, dtype, shape, nbytes, memory)
            tensor = layer.arriving[name] = _Arriving(stored)
        elif (tensor.stored.dtype, tensor.stored.shape) != (dtype, shape):
            was = f"{tensor.stored.dtype} {list(tensor.stored.shape)}"
            raise CheckpointError(f"{name}: {dtype} {list(shape)}, but its first part was of {was}")
        return tensor

    def _begun(self, layer: int) -> _Layer:
        return _Layer(layer, self._checkpoint.tensors(layer), self._wanted[layer], layer in self._exact)

    def _stored_in(
        self, layer: _Layer, name: str, dtype: str, shape: tuple[int, ...], nbytes: int, memory: Tensor | None
    ) -> Stored:
        if memory is None and self._place is None:
            return Stored(name, dtype, shape, layer.memory, layer.memory.room(nbytes), nbytes)
        if memory is None:
            assert self._place is not None
            try:
                memory = self._place(nbytes)
            except RuntimeError as e:
                raise CheckpointError(f"{name}: no memory for {nbytes} bytes: {e}") from e
        return Stored(name, dtype, shape, Bytes(layer.memory.path, memory, layer.memory.counter), 0, nbytes)

    def _came(self, at: Place, tensor: _Arriving, offset: int, nbytes: int, total: int) -> None:
        """These bytes of a tensor are there."""
        self._sums[f"{tensor.stored.name} {offset}"] = total
        self.kept_bytes += nbytes
        self.waiting_bytes += nbytes
        if tensor.whole:
            _check_hash(tensor)
            layer = self._layers[at.layer]
            layer.done(_key(at), tensor.stored.dtype)
            if layer.complete:
                self._ready.append(at.layer)

    @property
    def ready(self) -> bool:
        """Whether take() has a layer."""
        return bool(self._ready) or (self._rest and len(self._taken) < len(self._wanted))

    def take(self) -> tuple[int, Checkpoint] | None:
        """The next layer that is complete, with a source of it alone; None: there is none."""
        with self._lock:
            if self._ready:
                number = self._ready.pop(0)
            elif self._rest and (left := sorted(set(self._wanted) - self._taken)):
                number = left[0]
                self._fill(number)
            else:
                return None
            layer = self._layers.pop(number)
            self._taken.add(number)
            self.waiting_bytes -= sum(t.stored.nbytes for t in layer.arriving.values())
        grouped = group_by_layer({n: t.stored for n, t in layer.arriving.items() if t.whole}, self._checkpoint.naming)
        return number, self._checkpoint.with_layer(filled(grouped[number], self._checkpoint))

    def _fill(self, number: int) -> None:
        """What a layer lacks, from the base."""
        layer = self._layers.setdefault(number, self._begun(number))
        for key in sorted(layer.as_stored):
            before = layer.like[key]
            if before.name in layer.arriving:
                continue
            stored = replace(before, shard=layer.memory, offset=layer.memory.room(before.nbytes))
            layer.memory.write(before.head(before.nbytes), stored.offset)
            layer.arriving[before.name] = _Arriving(stored, [0], [stored.nbytes])
            self.waiting_bytes += stored.nbytes

    def missing(self) -> list[str]:
        """Sentences, one for each wanted layer that is not complete."""
        with self._lock:
            out = []
            for number in sorted(set(self._wanted) - self._taken - set(self._ready)):
                layer = self._layers.get(number)
                if layer is None:
                    if self._base is None:
                        out.append(f"layer {number}: no tensor of it was put")
                    continue
                partly = next((t.stored.name for t in layer.arriving.values() if not t.whole), "")
                if partly:
                    out.append(f"{partly}: some of its bytes are missing")
                    continue
                if self._base is not None:
                    continue
                lacks = sorted(layer.lacks)
                e, projection, suffix = lacks[0]
                which = "the experts" if e < 0 else f"expert {e}"
                more = f", and {len(lacks) - 1} tensors more" if len(lacks) > 1 else ""
                out.append(f"layer {number}: {projection} {suffix or 'weights'} of {which} is missing{more}")
            return out


def _key(at: Place) -> _Key:
    return -1 if at.expert is None else at.expert, at.projection, at.suffix


def _sum_of(data: bytes) -> int:
    """Tells parts apart that a trainer put by mistake, at the speed of memory: the sum of 64-bit words, and a CRC of
    the first and of the last bytes."""
    ends = zlib.crc32(data[:_LEAST_PART]), zlib.crc32(data[-_LEAST_PART:])
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    return int(words.sum(dtype=np.uint64)) | ends[0] << 64 | ends[1] << 96


def _check_header(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of the tensor.  Raises CheckpointError."""
    known = DTYPES.get(dtype)
    if known is None:
        raise CheckpointError(f"{name}: dtype {dtype!r:.20}, want one of {', '.join(DTYPES)}")
    if len(shape) > MAX_RANK or math.prod(shape) > _MOST_EXTENT:
        raise CheckpointError(f"{name}: shape of {len(shape)} extents, want at most {MAX_RANK} and 2^40 elements")
    return math.prod(shape) * known[0]


def _check_hash(tensor: _Arriving) -> None:
    """Raises CheckpointError where the bytes are not those that the sender hashed."""
    if not tensor.sha256:
        return
    digest, stored = hashlib.sha256(), tensor.stored
    step = 1 << 20
    for begin in range(0, stored.nbytes, step):
        piece = np.empty(min(step, stored.nbytes - begin), np.uint8)
        stored.shard.fill(piece, stored.offset + begin, stored.name)
        digest.update(piece.data)
    if digest.digest() != tensor.sha256:
        raise CheckpointError(
            f"{stored.name}: SHA-256 {digest.hexdigest()[:16]}..., want {tensor.sha256.hex()[:16]}..."
        )
