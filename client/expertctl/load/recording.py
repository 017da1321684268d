"""Recordings: which layers were called when, with how many tokens, and where their routes went.

Neither hidden states nor weights are in one.  Routes and times tell something of the text all the same: treat a file
as what it was recorded from.

A file is NumPy's .npz (never pickled):

    header      JSON: format, fingerprint, hidden_size, num_experts by layer
    at_us       [R] i64, microseconds after the first request at which each came
    layer       [R] i32
    tokens      [R] i32
    top_k       [R] i32
    topk_ids    [sum of tokens x top_k] i32, row-major, request after request; -1: a route that nobody computes, -2: it
                was left to the server to draw, and nobody knows
"""

from __future__ import annotations

import json
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.lib.format as npy
from numpy.typing import NDArray

from expertctl.common.workload import LayerShape, routes
from expertd.common.ranges import LIMIT
from expertd.errors import printable
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request

__all__ = ["DRAWN", "MOST_BYTES", "Recording", "bytes_of", "replayed", "routes_of"]

FORMAT = 1
DRAWN = -2
_ARRAYS = ("at_us", "layer", "tokens", "top_k", "topk_ids")
_BROKEN = (
    *(OSError, EOFError, LookupError, TypeError, ValueError, MemoryError, RuntimeError, ArithmeticError, SyntaxError),
    *(AttributeError, struct.error, tokenize.TokenError, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)
"""What zipfile, numpy and json raise for bytes that nobody wrote."""
_MOST_US = 366 * 86_400 * 1_000_000
"""A year: what is later would be waited for."""
_MOST_TOKENS, _MOST_TOP_K, _MOST_HIDDEN = 1 << 15, 1 << 8, 1 << 17
"""Of a request: what is replayed draws hidden states and weights of the largest."""
MOST_BYTES = 1 << 30
"""Of all arrays of a file, when they are unpacked."""
_HEAD_BYTES = 20
"""Of a request, beside its routes."""


@dataclass(frozen=True)
class Recording:
    """As in the file; num_experts: by layer; name: the file's, of errors."""

    at_us: NDArray[np.int64]
    layer: NDArray[np.int32]
    tokens: NDArray[np.int32]
    top_k: NDArray[np.int32]
    topk_ids: NDArray[np.int32]
    fingerprint: str
    hidden_size: int
    num_experts: Mapping[int, int]
    name: str = "recording"

    def __len__(self) -> int:
        return len(self.at_us)

    def ids(self, n: int) -> NDArray[np.int32]:
        """[tokens, top_k] of request n."""
        begin = self._begins[n]
        return self.topk_ids[begin : begin + self.tokens[n] * self.top_k[n]].reshape(self.tokens[n], self.top_k[n])

    @property
    def _begins(self) -> NDArray[np.int64]:
        if "begins" not in self.__dict__:
            sizes = self.tokens.astype(np.int64) * self.top_k
            self.__dict__["begins"] = np.concatenate(([0], np.cumsum(sizes)))
        found: NDArray[np.int64] = self.__dict__["begins"]
        return found

    def save(self, path: Path) -> None:
        header = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "hidden_size": self.hidden_size,
            "num_experts": {str(n): e for n, e in self.num_experts.items()},
        }
        with path.open("wb") as file:
            np.savez_compressed(file, header=json.dumps(header), **{name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Raises ValueError."""
        try:
            if path.exists() and not (path.is_file() and zipfile.is_zipfile(path)):
                raise ValueError("it is no .npz file")  # numpy would try to unpickle it; a pipe would be waited for
            _check_sizes(path)
            with np.load(path, allow_pickle=False) as found:
                header: dict[str, Any] = json.loads(str(found["header"][()]))
                if header["format"] != FORMAT:
                    raise ValueError(f"got format {header['format']}, want {FORMAT}")
                arrays = {name: found[name] for name in _ARRAYS}
            kinds = {"num_experts": dict, "hidden_size": int, "fingerprint": str}
            if any(not isinstance(header[name], kind) for name, kind in kinds.items()):
                raise ValueError("header: want the experts of each layer, a hidden size and a fingerprint")
            experts = {int(n): int(e) for n, e in header["num_experts"].items()}
            made = cls(**arrays, fingerprint=header["fingerprint"], hidden_size=header["hidden_size"],
                       num_experts=experts, name=str(path))  # fmt: skip
            made.check()
        except _BROKEN as e:
            why = printable(str(e) or type(e).__name__, 300)
            text = f"{path}: cannot be read as a recording: {why}; want what expertctl record wrote"
            raise ValueError(text) from None
        return made

    def check(self) -> None:
        """Raises ValueError."""
        for name in _ARRAYS:
            array, kind = getattr(self, name), np.int64 if name == "at_us" else np.int32
            if array.ndim != 1 or array.dtype != kind:
                raise ValueError(f"{name}: got {array.dtype} {array.shape}, want one dimension of {np.dtype(kind)}")
        R = len(self.at_us)
        for name, most in (("layer", LIMIT), ("tokens", _MOST_TOKENS), ("top_k", _MOST_TOP_K)):
            array = getattr(self, name)
            if array.shape != (R,) or (array < 0).any() or (array > most).any():
                raise ValueError(f"{name}: got {array.shape}, want {R} numbers from 0 to {most}")
        if (np.diff(self.at_us) < 0).any():
            raise ValueError("at_us: want ascending numbers")
        if R and not 0 <= self.at_us[0] <= self.at_us[-1] <= _MOST_US:
            raise ValueError(f"at_us: got {self.at_us[0]} to {self.at_us[-1]}, want 0 to {_MOST_US}")
        if not 0 < self.hidden_size <= _MOST_HIDDEN:
            raise ValueError(f"hidden_size: got {self.hidden_size}, want 1 to {_MOST_HIDDEN}")
        if self.topk_ids.shape != (self._begins[-1],) or (self.topk_ids < DRAWN).any():
            raise ValueError(f"topk_ids: got {self.topk_ids.shape}, want {self._begins[-1]} ids >= {DRAWN}")
        for layer in np.unique(self.layer).tolist():
            if layer not in self.num_experts:
                raise ValueError(f"num_experts: got none of layer {layer}, want all layers that were called")


def bytes_of(layer: int, tokens: int, top_k: int) -> int:
    """What a request takes of a file, unpacked; 0: no file has such a one."""
    if layer > LIMIT or tokens > _MOST_TOKENS or top_k > _MOST_TOP_K:
        return 0
    return _HEAD_BYTES + 4 * tokens * top_k


def _check_sizes(path: Path) -> None:
    """Before numpy makes room for what a file says that it holds.  Raises ValueError, OSError, zipfile.BadZipFile."""
    left = MOST_BYTES
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
            left -= max(member.file_size, math.prod(shape) * dtype.itemsize)
            if left < 0:
                raise ValueError(f"got more than {MOST_BYTES} bytes, want fewer")


def routes_of(recording: Recording, shape: LayerShape, tokens: int) -> Iterator[NDArray[np.int32]]:
    """[tokens, top_k] after [tokens, top_k] of the routes that a layer had, over and over, in their order; requests
    with another top_k are left out.  Raises ValueError where there are none."""
    mine = [n for n in range(len(recording)) if recording.layer[n] == shape.layer and recording.top_k[n] == shape.top_k]
    rows = [ids for n in mine if len(ids := recording.ids(n)) and (ids != DRAWN).all()]
    if not rows:
        raise ValueError(f"{recording.name}: got no routes of layer {shape.layer} with top-{shape.top_k}, want some")
    pool = np.concatenate(rows)
    if pool.max() >= shape.num_experts:
        raise ValueError(f"{recording.name}: got expert {pool.max()}, want fewer than {shape.num_experts}, the layer's")
    return (pool[(n * tokens + np.arange(tokens)) % len(pool)] for n in count())


def replayed(recording: Recording, described: pb.DescribeResponse, seed: int, **options: Any) -> Iterator[Request]:
    """The requests of a recording, in their order: recorded ids, drawn hidden states and weights.  Raises ValueError
    where the server's model has other sizes."""
    H, layers = described.model.hidden_size, {x.layer: x for x in described.layers}
    _check_model(recording, H, {n: x.num_experts for n, x in layers.items()})
    rng = np.random.default_rng(seed)
    most = max(1, int(recording.tokens.max(initial=1)))
    hidden = rng.standard_normal((most, H), dtype=np.float32).astype(ml_dtypes.bfloat16)
    weights = np.abs(rng.standard_normal((most, max(1, int(recording.top_k.max(initial=1)))), dtype=np.float32)) + 0.1

    def one(n: int) -> Request:
        M, layer, ids = int(recording.tokens[n]), int(recording.layer[n]), recording.ids(n)
        if ids.size and (ids == DRAWN).any():
            ids = routes(rng, M, LayerShape(layer, H, layers[layer].num_experts, ids.shape[1]), 0.0)
        some = weights[:M, : ids.shape[1]]
        return Request(layer, hidden[:M], ids, some / some.sum(axis=1, keepdims=True), **options)

    return (one(n) for n in range(len(recording)))


def _check_model(recording: Recording, hidden_size: int, num_experts: Mapping[int, int]) -> None:
    if hidden_size != recording.hidden_size:
        raise ValueError(f"{recording.name}: got hidden size {recording.hidden_size}, want {hidden_size}, the server's")
    wrong: Sequence[int] = [
        n for n in np.unique(recording.layer).tolist() if num_experts.get(n) != recording.num_experts[n]
    ]
    if wrong:
        got = {n: recording.num_experts[n] for n in wrong}
        want = {n: num_experts.get(n, "none") for n in wrong}
        raise ValueError(f"{recording.name}: got experts by layer {got}, want {want}, the server's")
