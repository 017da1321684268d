"""Arrays of the caller <-> tensors on the wire, without copies where the memory allows it.

    numpy    float32, float16, bfloat16 (ml_dtypes), int32, int64
    torch    the same dtypes, on any device; the answer goes back to the device of hidden_states
    Synthetic    nothing is sent: the server draws the values
    E4m3         hidden states that are quantized already (expertd_client.requests.e4m3)

A contiguous little-endian array in host memory is sent as it lies; anything else is copied once.  What comes back is a
view of the message that it came in, and may be written to: the client hands the message over and keeps nothing of it.
torch is never imported here: whoever passes a torch tensor has imported it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertd.codec import ScalesView, Spelling, TensorView
from expertd.common.dtypes import DTYPE_NAME, SCALED_COLUMNS, dtype_name, scales_at, scales_of_row
from expertd.errors import BadDtypeError, BadResponseError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3

__all__ = [
    "Synthetic",
    "are_few_bytes",
    "array_of",
    "bytes_of",
    "checked_dtype",
    "device_of",
    "from_host",
    "empty",
    "from_wire",
    "host_address",
    "keep_or",
    "numpy_dtype",
    "on_host",
    "over_buffer",
    "over_memory",
    "take",
    "to_wire",
    "torch_dtype",
    "wire_dtype",
]

_NUMPY: dict[int, np.dtype[Any]] = {
    pb.DATA_TYPE_F32: np.dtype("<f4"),
    pb.DATA_TYPE_F16: np.dtype("<f2"),
    pb.DATA_TYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    pb.DATA_TYPE_I32: np.dtype("<i4"),
    pb.DATA_TYPE_I64: np.dtype("<i8"),
}
_PLAIN = {**_NUMPY, pb.DATA_TYPE_BF16: np.dtype(np.int16)}
"""What torch.from_numpy takes."""
_BY_NUMPY = {dtype: number for number, dtype in _NUMPY.items()}
_BY_NAME = {DTYPE_NAME[number]: number for number in _NUMPY}
_TORCH_NAMES: dict[int, str] = {
    pb.DATA_TYPE_F32: "float32",
    pb.DATA_TYPE_F16: "float16",
    pb.DATA_TYPE_BF16: "bfloat16",
    pb.DATA_TYPE_I32: "int32",
    pb.DATA_TYPE_I64: "int64",
}

_FEW_BYTES = 32 << 10
"""Copied within a microsecond or two."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A tensor that the server draws: the same seed gives the same values.

    shape           of the tensor, e.g. [M, H]
    seed            any number below 2^64
    dtype           "bf16", "f16" or "f32" for hidden states and weights, "i32" or "i64" for ids
    zipf_exponent   ids only: popularity of the experts, 0 = uniform
    """

    shape: tuple[int, ...]
    seed: int
    dtype: str = "bf16"
    zipf_exponent: float = 0.0


def to_wire(x: Any, number: int) -> TensorView:
    """`x` as a tensor on the wire; number: its DataType, as checked_dtype found it."""
    if isinstance(x, np.ndarray):
        return _from_numpy(x, number)
    if isinstance(x, Synthetic):
        values = pb.SyntheticValues(seed=x.seed, zipf_exponent=x.zipf_exponent)
        return TensorView(number, x.shape, Spelling.SYNTHETIC, values)
    if isinstance(x, E4m3):
        host = x.on_host()
        scales = ScalesView(SCALED_COLUMNS, host.scales.reshape(-1).view(np.uint8))
        return TensorView.of_raw(number, x.shape, host.codes.reshape(-1), scales)
    return _from_torch(x, number)


def bytes_of(x: Any, number: int) -> Any:
    """The bytes of a numpy array or a torch tensor as they travel.  number: its DataType."""
    return x.tobytes() if are_few_bytes(x, number) else to_wire(x, number).data


def are_few_bytes(x: Any, number: int) -> bool:
    """Whether `x` is a numpy array that is better copied by tobytes() than viewed, as it travels."""
    return type(x) is np.ndarray and x.nbytes <= _FEW_BYTES and x.dtype == _NUMPY[number]


def checked_dtype(x: Any, name: str, allowed: Sequence[str]) -> int:
    """The DataType of `x`, which errors call `name`.  Raises BadDtypeError for a dtype that is not among `allowed`."""
    if isinstance(x, np.ndarray):
        number = _BY_NUMPY.get(x.dtype)
        if number is None:
            number = _number_of_numpy(x.dtype)
    elif _is_torch(x):
        number = _by_torch().get(x.dtype)
    elif isinstance(x, Synthetic):
        number = _BY_NAME.get(x.dtype)
    elif isinstance(x, E4m3):
        number = pb.DATA_TYPE_E4M3
    else:
        raise BadDtypeError.about(
            name,
            got=type(x).__name__,
            want="a numpy array, a torch tensor, Synthetic or E4m3",
            remedy="convert it with numpy.asarray(x, dtype=...)",
        )
    if number is None or DTYPE_NAME[number] not in allowed:
        raise BadDtypeError.about(
            name, got=f"dtype {x.dtype}", want="one of " + ", ".join(allowed), remedy="cast it before the call"
        )
    return number


def device_of(x: Any) -> Any:
    """The torch device of `x`; None = numpy, or values that the server draws."""
    return x.device if _is_torch(x) or isinstance(x, E4m3) else None


def take(x: Any, index: Any) -> Any:
    """Rows of an array or tensor: a slice of them, or those at the numbers, or at the true ones of the booleans, in a
    numpy array or torch tensor `index`."""
    if isinstance(index, slice):
        return x[index]
    if isinstance(x, E4m3):
        return E4m3(take(x.codes, index), take(x.scales, index))
    if _is_torch(x):
        return x[sys.modules["torch"].as_tensor(index, device=x.device)]
    rows = _on_host(index)
    return x[rows] if rows.dtype == bool else x.take(rows, axis=0)


def keep_or(x: Any, keep: Any, other: int) -> Any:
    """`x` where the booleans `keep` are true, `other` elsewhere; the dtype stays."""
    if _is_torch(x):
        return x.where(sys.modules["torch"].as_tensor(keep, device=x.device), other)
    return np.where(_on_host(keep), x, x.dtype.type(other))


def array_of(message: bytes, begin: int, end: int, dtype: int, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """The few bytes of a message from `begin` to `end` as an array of their own: copied, which is less work than a view
    that can be written to.  None: they are many, or not as many as `shape` has."""
    kind = _NUMPY.get(dtype)
    if end - begin > _FEW_BYTES or kind is None or math.prod(shape) * kind.itemsize != end - begin:
        return None
    array: NDArray[Any] = np.ndarray(shape, kind, bytearray(message[begin:end]))
    return array


def from_wire(view: TensorView, shape: tuple[int, ...], dtype: int, device: Any) -> Any:
    """The array behind `view`: numpy, or torch on `device` where it is not None; writable, and a view of the message
    where its elements are aligned.  Raises BadResponseError where it is not of `shape` and `dtype` (a DataType)."""
    empty = view.spelling == Spelling.NONE and 0 in view.shape  # no element, so no data need be sent
    if view.dtype != dtype or not (view.spelling == Spelling.RAW or empty):
        got = f"dtype {dtype_name(view.dtype)} as field {view.spelling}"
        raise BadResponseError.about("output", got=got, want=f"raw bytes of {dtype_name(dtype)}")
    if view.shape != shape:
        raise BadResponseError.about("output", got=f"shape {list(view.shape)}", want=list(shape))
    if dtype == pb.DATA_TYPE_E4M3:
        return _e4m3_from_wire(view, shape, device)
    elements = _NUMPY[dtype]
    array = _bytes_of(b"" if empty else view.raw, shape, elements.itemsize)
    return from_host(array.view(elements).reshape(shape), device)


def _e4m3_from_wire(view: TensorView, shape: tuple[int, ...], device: Any) -> E4m3:
    blocks = (shape[0], scales_of_row(shape[1]))
    raw: Any = view.raw if view.spelling == Spelling.RAW else b""
    scales: Any = b"" if view.scales is None else view.scales.raw
    if math.prod(blocks) and (view.scales is None or view.scales.block != SCALED_COLUMNS or view.scales.floats):
        raise BadResponseError.about("output", got="no such scales", want=f"raw ones for {SCALED_COLUMNS} columns each")
    codes = _bytes_of(raw, shape, 1).reshape(shape)
    f32 = _bytes_of(scales, blocks, 4).view(_NUMPY[pb.DATA_TYPE_F32]).reshape(blocks)
    return E4m3(from_host(codes, device), from_host(f32, device))


def _bytes_of(raw: Any, shape: tuple[int, ...], itemsize: int) -> NDArray[np.uint8]:
    """[n] u8, writable and aligned.  Raises BadResponseError where it is not of `shape`."""
    array = _writable(raw, itemsize)
    count = math.prod(shape) * itemsize
    if array.size != count:
        raise BadResponseError.about(f"output {list(shape)}", got=f"{array.size} bytes", want=count)
    return array


def on_host(x: Any) -> Any:
    """The values of an array or tensor as a numpy array, or E4m3 of numpy arrays: its own memory where that is the
    host's, else a copy."""
    if not _is_torch(x):
        return x.on_host() if isinstance(x, E4m3) else x
    torch = sys.modules["torch"]
    host = (x.detach() if x.requires_grad else x).cpu()
    if host.dtype == torch.bfloat16:  # numpy has it from ml_dtypes, which torch does not know
        return np.asarray(host.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(host.numpy())


def from_host(array: NDArray[Any], device: Any) -> Any:
    """The inverse: numpy where `device` is None, else a torch tensor there, without a copy on a host."""
    if device is None:
        return array
    torch = sys.modules["torch"]
    name = "uint8" if array.dtype == np.uint8 else _TORCH_NAMES[_BY_NUMPY[array.dtype]]
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, name), device=device)
    plain = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
    tensor = torch.from_numpy(plain).view(getattr(torch, name))
    return tensor if device.type == "cpu" else tensor.to(device)


def numpy_dtype(number: int) -> np.dtype[Any]:
    """That of a float or integer DataType."""
    return _NUMPY[number]


def host_address(x: Any, number: int) -> tuple[int, Any]:
    """(address of the elements of `x` in host memory, in order and little-endian; what must live as long as it is
    read).  number: its DataType; uint8 are codes of any."""
    if isinstance(x, np.ndarray):
        dtype = x.dtype
        if x.flags.c_contiguous and (dtype is _NUMPY.get(number) or dtype == np.uint8 or dtype == _NUMPY[number]):
            return x.__array_interface__["data"][0], x
    elif x.is_cpu and x.is_contiguous():
        return x.data_ptr(), x
    raw = np.frombuffer(to_wire(x, number).raw, np.uint8)
    return raw.__array_interface__["data"][0], raw


def empty(tokens: int, hidden_size: int, number: int) -> NDArray[Any]:
    """[tokens, hidden_size] of a DataType, uninitialized."""
    return np.empty((tokens, hidden_size), _NUMPY[number])


def over_memory(array: NDArray[np.uint8], number: int, shape: tuple[int, ...], device: Any) -> Any:
    """[n] u8 as `shape` of a DataType: numpy, or torch on `device` where it is not None; a view but on an
    accelerator.  E4M3: in one piece (expertd.common.dtypes.scales_at), as E4m3."""
    if number == pb.DATA_TYPE_E4M3:
        M, H = shape
        scales = array[scales_at(M, H) :].view(np.float32).reshape(M, scales_of_row(H))
        return E4m3(from_host(array[: M * H].reshape(shape), device), from_host(scales, device))
    if device is None:
        return array.view(_NUMPY[number]).reshape(shape)
    torch = sys.modules["torch"]
    plain = array.view(_PLAIN[number]).reshape(shape)
    tensor = torch.from_numpy(plain)
    if number == pb.DATA_TYPE_BF16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device.type == "cpu" else tensor.to(device)


def over_buffer(buffer: Any, number: int, shape: tuple[int, ...], device: Any) -> Any:
    """As over_memory() for numpy and torch's CPU: a view of a writable buffer that is aligned and as large as the
    tensor."""
    if number == pb.DATA_TYPE_E4M3:
        return over_memory(np.frombuffer(buffer, np.uint8), number, shape, device)
    if device is None:
        return np.ndarray(shape, _NUMPY[number], buffer)
    tensor = sys.modules["torch"].from_numpy(np.ndarray(shape, _PLAIN[number], buffer))
    return tensor.view(torch_dtype(number)) if number == pb.DATA_TYPE_BF16 else tensor


def wire_dtype(dtype: Any) -> int:
    """The DataType of a name ("bf16"), a numpy dtype or a torch dtype.  Raises BadDtypeError."""
    number: int | None = None
    if isinstance(dtype, str):
        number = _BY_NAME.get(dtype)
    torch = sys.modules.get("torch")
    if number is None and torch is not None and isinstance(dtype, torch.dtype):
        number = _by_torch().get(dtype)
    elif number is None:
        try:
            number = _BY_NUMPY.get(np.dtype(dtype))
        except TypeError:
            number = None
    if number is None:
        raise BadDtypeError.about("dtype", got=repr(dtype), want="one of " + ", ".join(_BY_NAME))
    return number


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _number_of_numpy(dtype: np.dtype[Any]) -> int | None:
    number = _BY_NUMPY.get(dtype)
    return _BY_NUMPY.get(dtype.newbyteorder("<")) if number is None else number


def _on_host(x: Any) -> NDArray[Any]:
    return np.asarray(x.cpu() if _is_torch(x) else x)


def _from_numpy(x: NDArray[Any], number: int) -> TensorView:
    shape = x.shape
    if x.dtype != _NUMPY[number]:  # big-endian
        x = x.astype(_NUMPY[number])
    return TensorView.of_raw(number, shape, np.ascontiguousarray(x).reshape(-1).view(np.uint8))


def _from_torch(x: Any, number: int) -> TensorView:
    torch = sys.modules["torch"]
    host = x.detach() if x.requires_grad else x
    if host.device.type != "cpu":
        host = host.cpu()
    flat = host.contiguous().view(-1).view(torch.uint8).numpy()
    return TensorView.of_raw(number, tuple(x.shape), flat)


@lru_cache
def torch_dtype(number: int) -> Any:
    """torch's of a DataType; torch has been imported."""
    return getattr(sys.modules["torch"], _TORCH_NAMES[number])


@lru_cache(maxsize=1)
def _by_torch() -> dict[Any, int]:
    torch = sys.modules["torch"]
    return {getattr(torch, name): number for number, name in _TORCH_NAMES.items()}


class _Memory:
    """Lends the bytes of a message to numpy as memory that may be written to.

    The message was made by the transport for this one answer, so nobody else can see the writes; that it is a `bytes`
    object is only what the transport's interface gives."""

    __slots__ = ("__array_interface__", "_message")

    def __init__(self, message: Any, address: int, size: int) -> None:
        self._message = message
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


def _writable(data: Any, itemsize: int) -> NDArray[np.uint8]:
    """[n] u8 over `data`; a copy where elements of `itemsize` bytes would not be aligned."""
    raw: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    if raw.flags.writeable or raw.size == 0:
        return raw if raw.size else np.empty(0, np.uint8)
    address: int = raw.__array_interface__["data"][0]
    return raw.copy() if address % itemsize else np.asarray(_Memory(data, address, raw.size))
