"""Small changes of a checkpoint, one at a time: what a broken download, a half-finished tool or an edited config makes.

    raw = Raw.of(folder)                            every tensor as (dtype, shape, bytes), every JSON file
    for m in tensor_mutations(raw, experts): ...    one tensor gone, of another dtype or shape, swapped, holding NaN
    for m in config_mutations(raw): ...             one key of the configuration gone, or with another value
    m.change(copy := raw.copy()); copy.write(folder)

Knows safetensors and JSON, and nothing of the readers that it tests.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Mutation", "Raw", "Tensor", "config_mutations", "tensor_mutations"]

WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "F32": 4, "I64": 8, "F64": 8,
}  # fmt: skip
NUMPY: Mapping[str, Any] = {
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "I32": np.int32,
    "I64": np.int64, "U8": np.uint8, "I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")
NOT_NUMBERS = {
    "F16": {"NaN": b"\x00\x7e", "inf": b"\x00\x7c", "-inf": b"\x00\xfc"},
    "BF16": {"NaN": b"\xc0\x7f", "inf": b"\x80\x7f", "-inf": b"\x80\xff"},
    "F32": {"NaN": b"\x00\x00\xc0\x7f", "inf": b"\x00\x00\x80\x7f", "-inf": b"\x00\x00\x80\xff"},
    "F64": {"NaN": struct.pack("<d", math.nan), "inf": struct.pack("<d", math.inf)},
    "F8_E4M3": {"NaN": b"\x7f", "-NaN": b"\xff"},
    "F8_E8M0": {"NaN": b"\xff"},
    "U8": {"NaN": b"\xff"},  # of a scale: its exponent's NaN
}
"""What makes a number of a dtype no finite one, little-endian."""


@dataclass(frozen=True)
class Tensor:
    """dtype: safetensors name; data: its bytes, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


def stored(values: np.ndarray[Any, Any], dtype: str) -> Tensor:
    """An array's values as a tensor of `dtype`."""
    return Tensor(dtype, values.shape, np.ascontiguousarray(values.astype(NUMPY[dtype])).tobytes())


@dataclass
class Raw:
    """A checkpoint in memory.  json: file name -> value, "config.json" among them."""

    tensors: dict[str, Tensor]
    json: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Raw:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            if file.name == "expected.safetensors":
                continue
            data = file.read_bytes()
            length = struct.unpack("<Q", data[:8])[0]
            for name, e in json.loads(data[8 : 8 + length]).items():
                if name != "__metadata__":
                    begin, end = (8 + length + offset for offset in e["data_offsets"])
                    tensors[name] = Tensor(e["dtype"], tuple(e["shape"]), data[begin:end])
        names = ("config", "hf_quant_config", "quantize_config", "quantization_config", "quant_config")
        files = [f for name in names if (f := folder / f"{name}.json").exists()]
        return cls(tensors, {f.name: json.loads(f.read_text()) for f in files})

    def copy(self) -> Raw:
        return Raw(dict(self.tensors), copy.deepcopy(self.json))

    def write(self, folder: Path) -> None:
        """As one file of weights, in place of what `folder` holds."""
        header, offset = {}, 0
        for name, t in self.tensors.items():
            header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, offset + len(t.data)]}
            offset += len(t.data)
        text = json.dumps(header).encode()
        data = b"".join(t.data for t in self.tensors.values())
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        for name, value in self.json.items():
            (folder / name).write_text(json.dumps(value))


@dataclass(frozen=True)
class Mutation:
    """kind: "remove", "dtype", ...; subject: the tensor's name or the key's path; detail: which of several; names: one
    of these must stand in the error."""

    kind: str
    subject: str
    detail: str
    change: Callable[[Raw], None]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}{f' ({self.detail})' if self.detail else ''}"


def _module(name: str) -> tuple[str, str]:
    """("model.layers.0.mlp.experts.0.up_proj", ".weight_scale"), or fused (".../experts.gate_up_proj", "_blocks")."""
    head, dot, last = name.rpartition(".")
    projection, proj, rest = last.partition("_proj")
    return (f"{head}.{projection}{proj}", rest) if proj else (head, dot + last)


def tensor_mutations(raw: Raw, experts: Sequence[str], victims: Sequence[str]) -> Iterator[Mutation]:
    """Of the tensors `victims`; experts: all tensors of experts, among which swaps look for partners."""
    for name in victims:
        t = raw.tensors[name]
        yield _mutation("remove", name, "", lambda r, n=name: r.tensors.pop(n))
        for kind, found in (("dtype", _dtypes(t)), ("shape", _shapes(t)), ("value", _values(name, t))):
            for detail, other in found:
                yield _mutation(kind, name, detail, lambda r, n=name, o=other: r.tensors.update({n: o}))
        for other_name in _partners(name, experts):
            other = raw.tensors[other_name]
            if other != t:
                short = other_name.removeprefix(_common(name, other_name))
                yield _mutation("swap", name, short, _swap(name, other_name), _module(other_name)[0])
    for module in dict.fromkeys(_module(name)[0] for name in victims):
        for suffix, extra in _strangers(raw, module):
            if f"{module}{suffix}" not in raw.tensors:
                yield _mutation(
                    "add", f"{module}{suffix}", "", lambda r, n=f"{module}{suffix}", o=extra: r.tensors.update({n: o})
                )


def _mutation(kind: str, name: str, detail: str, change: Callable[..., object], *others: str) -> Mutation:
    """others: more words that name the subject."""

    def run(raw: Raw) -> None:
        change(raw)

    return Mutation(kind, name, detail, run, (_module(name)[0], name.rpartition(".")[2], *others))


def _swap(a: str, b: str) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw.tensors[a], raw.tensors[b] = raw.tensors[b], raw.tensors[a]

    return change


def _common(a: str, b: str) -> str:
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[: a.rfind(".", 0, end) + 1]


def _dtypes(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same bytes under another name, and the same values in another type."""
    for dtype, width in WIDTH.items():
        if width == WIDTH[t.dtype] and dtype != t.dtype:
            yield f"called {dtype}", replace(t, dtype=dtype)
    for dtype in FLOATS if t.dtype in FLOATS else ("I32", "I64") if t.dtype in ("I32", "I64") else ():
        if dtype != t.dtype:
            yield f"as {dtype}", stored(t.array(), dtype)


def _shapes(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    shape, size = t.shape, len(t.data) // max(1, math.prod(t.shape))
    other = {"flat": (math.prod(shape),), "one more": (1, *shape), "turned": shape[::-1], "no dimension": ()}
    for detail, new in other.items():
        if new != shape and math.prod(new) == math.prod(shape):
            yield f"{detail} {list(new)}", replace(t, shape=new)
    for dim, extent in enumerate(shape):
        if extent > 1:
            cut = np.frombuffer(t.data, np.dtype(f"V{size}")).reshape(shape).take(range(extent - 1), axis=dim)
            yield f"{list(cut.shape)}", Tensor(t.dtype, cut.shape, np.ascontiguousarray(cut).tobytes())


def _values(name: str, t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One number that is none, at the first and at the last place; an integer that points elsewhere."""
    size = WIDTH[t.dtype]
    is_scale = "scale" in name
    if t.dtype != "U8" or is_scale:
        for what, pattern in NOT_NUMBERS.get(t.dtype, {}).items():
            yield f"first {what}", replace(t, data=pattern + t.data[size:])
            yield f"last {what}", replace(t, data=t.data[:-size] + pattern)
    if name.endswith(("g_idx", "weight_shape")):
        values = t.array().copy()
        for what, number in (("-1", -1), ("too large", 10**6), ("the next", int(values.flat[0]) + 1)):
            values.flat[0] = number
            yield f"first {what}", stored(values, t.dtype)
    if "zero" in name:
        yield "one bit", replace(t, data=bytes([t.data[0] ^ 1]) + t.data[1:])
    if is_scale and t.dtype in FLOATS:
        values = t.array().copy()
        values.flat[0] = 0
        yield "first 0", stored(values, t.dtype)


def _partners(name: str, experts: Sequence[str]) -> Iterator[str]:
    """Others to change places with: beside it, of the next projection, of the next expert."""
    module, suffix = _module(name)
    yield from (o for o in experts if o != name and _module(o)[0] == module)
    same = [o for o in experts if _module(o)[1] == suffix]
    at = same.index(name)
    for step in (1, 3):
        if len(same) > step:
            yield same[(at + step) % len(same)]


def _strangers(raw: Raw, module: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that some format has and this module has not, all ones."""
    codes = next(t for n, t in raw.tensors.items() if n.startswith(module) and t.shape)
    rows, columns = codes.shape[0], codes.shape[-1]
    one = stored(np.ones((), np.float32), "F32")
    join = "." if any(n.startswith(f"{module}.") for n in raw.tensors) else "_"
    for suffix in (
        "input_scale",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "weight_scale_inv",
        "k_scale",
    ):
        yield f"{join}{suffix}", one
    for suffix in ("bias", "pre_quant_scale"):
        yield f"{join}{suffix}", stored(np.ones(rows if suffix == "bias" else columns, np.float32), "F32")
    for suffix in ("g_idx", "weight_g_idx"):
        yield f"{join}{suffix}", stored(np.zeros(columns, np.int32), "I32")
    yield f"{join}weight", stored(np.ones((rows, columns), np.float32), "BF16")


MODEL_KEYS = (
    "model_type", "hidden_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "intermediate_size", "num_hidden_layers", "hidden_act", "swiglu_limit", "swiglu_alpha",
    "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "quantization_config",
)  # fmt: skip
"""Keys of config.json that can mean something to experts."""


def config_mutations(raw: Raw) -> Iterator[Mutation]:
    """One key gone, of another type or of another value, in config.json and in the files beside it."""
    for file, value in raw.json.items():
        for path in _paths(value):
            if file == "config.json" and path[0] not in MODEL_KEYS:
                continue
            old = _at(value, path)
            for detail, new in [("gone", _GONE), *((f"{old!r:.24} -> {v!r:.24}", v) for v in _others(old))]:
                subject = f"{file}: {'.'.join(map(str, path))}"
                names = (next(p for p in reversed(path) if isinstance(p, str)), "experts.")  # or whoever says otherwise
                yield Mutation("config", subject, detail, _edit(file, path, new), names)


_GONE = object()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every leaf and of every branch but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _edit(file: str, path: tuple[Any, ...], new: object) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        inner = _at(raw.json[file], path[:-1])
        if new is _GONE:
            del inner[path[-1]]
        else:
            inner[path[-1]] = new

    return change


def _others(old: Any) -> Iterator[Any]:
    """Other values, of the same and of another type."""
    if isinstance(old, bool):
        yield from (not old, None, "x")
    elif isinstance(old, int):
        yield from (old + 1, max(1, old // 2), old * 2, 0, -2, 10**6, str(old), None, float(old), [old])
    elif isinstance(old, float):
        yield from (old * 2, -old, 0.0, None, str(old), math.inf)
    elif isinstance(old, str):
        yield from ("nonsense", "", None, 7)
    elif isinstance(old, list):
        yield from ([], [[]], None, "x", 7)
    elif isinstance(old, dict):
        yield from ({}, None, "x", [])
    else:
        yield from (True, 4, "group", [], {})
