"""A trainer's tensors as parts of a message: their names in safetensors files, their bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertd.errors import BadDtypeError
from expertd.v1 import weights_service_pb2 as pb

__all__ = ["dtype_of", "parts_of", "raw_of"]

_NUMPY = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
_TORCH = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}


def dtype_of(name: str, tensor: Any) -> str:
    """Of a torch tensor, as safetensors names it.  Raises BadDtypeError."""
    dtype = _TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise BadDtypeError.about(name, got=f"dtype {tensor.dtype}", want=", ".join(_TORCH))
    return dtype


def raw_of(name: str, tensor: Any) -> tuple[str, list[int], NDArray[np.uint8]]:
    """(dtype as safetensors names it, shape, bytes [n] u8 in host memory), copied where they do not lie there in order.
    tensor: numpy, or torch on any device; a DTensor is gathered.  Raises BadDtypeError."""
    whole = getattr(tensor, "full_tensor", None)
    if callable(whole):
        tensor = whole()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        host = tensor.detach().cpu().contiguous().reshape(-1)
        return dtype_of(name, tensor), list(tensor.shape), host.view(torch.uint8).numpy()
    array = np.asarray(tensor)
    dtype = _NUMPY.get(array.dtype)
    if dtype is None:
        raise BadDtypeError.about(name, got=f"dtype {array.dtype}", want=", ".join(map(str, _NUMPY)))
    return dtype, list(array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def parts_of(name: str, tensor: Any, most_bytes: int, sha256: bytes = b"") -> Iterator[pb.WeightPart]:
    """The tensor in pieces of at most most_bytes."""
    dtype, shape, raw = raw_of(name, tensor)
    for at in range(0, raw.nbytes, most_bytes):
        piece = raw[at : at + most_bytes].tobytes()
        yield pb.WeightPart(name=name, dtype=dtype, shape=shape, offset=at, data=piece, sha256=sha256)
