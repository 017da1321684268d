"""Tensors in files: .npy, and .safetensors, whose library the client does not need."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["load_array", "load_tensors", "save_array"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit for its JSON header."""


def load_array(path: Path) -> NDArray[Any]:
    """The array of a .npy file.  numpy writes bfloat16 as two opaque bytes ("V2"); they are read back as bfloat16."""
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read as a .npy file: {error}") from None
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Writes a .npy file that every reader of the format understands: bfloat16 as float32, which holds it exactly."""
    np.save(path, array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)


def load_tensors(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The tensors `names` of a .safetensors file: 8 bytes little-endian header size, JSON header, data.  Raises
    ValueError for a file that is not what it says."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    size = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else _MAX_HEADER_BYTES + 1
    if size > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"{path}: got {len(data)} bytes with no whole header, want a .safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
        missing = [name for name in names if name not in header]
        if missing:
            held = ", ".join(sorted(set(header) - {"__metadata__"}))
            raise ValueError(f"{path}: got no tensor {', '.join(missing)}, want {', '.join(names)}; it holds {held}")
        return {name: _tensor(path, name, header[name], memoryview(data)[8 + size :]) for name in names}
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: its header is no safetensors header: {type(error).__name__}: {error}") from None


def _tensor(path: Path, name: str, entry: dict[str, Any], data: memoryview) -> NDArray[Any]:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{path}: {name}: got dtype {entry['dtype']}, want one of {', '.join(_DTYPES)}")
    want = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not 0 <= begin <= end <= len(data) or end - begin != want:
        raise ValueError(f"{path}: {name}: got bytes {begin} to {end} of {len(data)}, want {want} for {list(shape)}")
    return np.frombuffer(data[begin:end], dtype).reshape(shape)
