"""Hidden states and outputs as e4m3 with an f32 scale for 128 columns of a row: 0.516 of bf16's bytes on the wire.

    scale = max(largest magnitude of the block / 448, 1e-12)
    code  = value * (1 / scale), to the nearest e4m3, ties to even

So each finite value comes back within max(2^-4 * |value|, 2^-10 * scale) of what it was (and some 2^-23 of it), and
the widening to bf16 on the server adds 2^-9 of it at most.  Kernels of the server that round activations to e4m3 by the
same rule find the same codes again, the next ones being 2^-4 away or more: so such a layer rounds once, not twice.  A
block with NaN or infinity becomes NaN, which spoils its own row, as it would have.

An output is quantized on the server by the same rule, from the bf16 (or f32) that it would have been.

Three twins give the same bits: C++ (expertd.e4m3), numpy where that is not built, and torch on an accelerator.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from expertd.common.dtypes import SCALED_COLUMNS, scales_of_row
from expertd.e4m3 import quantizer, widener
from expertd.errors import BadDtypeError, BadShapeError
from expertd.v1 import expert_service_pb2 as pb

# Why it is so: decision 118 in DECISIONS.md.
__all__ = ["E4m3", "asked_for", "quantize", "quantize_numpy", "quantize_torch", "taken", "widen_numpy"]

_MOST, _LEAST_SCALE = 448.0, 1e-12
_ELEMENTS = ("uint8", "float8_e4m3fn")


@dataclass(frozen=True, slots=True, eq=False)
class E4m3:
    """Rows that are quantized already: value = code * scale of its block.

    codes    [M, H] e4m3, or uint8 with their bits: numpy (ml_dtypes) or torch on any device; kept as uint8
    scales   [M, ceil(H / 128)] f32, of the same kind and device

    Raises BadDtypeError and BadShapeError."""

    codes: Any
    scales: Any

    def __post_init__(self) -> None:
        codes, scales = _name(self.codes), _name(self.scales)
        if codes not in _ELEMENTS or scales != "float32" or _is_torch(self.codes) != _is_torch(self.scales):
            raise BadDtypeError.about(
                "e4m3", got=f"codes of {codes}, scales of {scales}", want="e4m3 or uint8, and float32, both of one kind"
            )
        shape = tuple(self.codes.shape)
        if len(shape) != 2 or tuple(self.scales.shape) != (shape[0], scales_of_row(shape[1])):
            want = f"[M, H] and [M, ceil(H / {SCALED_COLUMNS})]"
            raise BadShapeError.about("e4m3", got=f"codes {list(shape)}, scales {list(self.scales.shape)}", want=want)
        if codes != "uint8":
            bits = self.codes.view(sys.modules["torch"].uint8 if _is_torch(self.codes) else np.uint8)
            object.__setattr__(self, "codes", bits)

    @property
    def shape(self) -> tuple[int, ...]:
        """[M, H]."""
        return tuple(self.codes.shape)

    @property
    def dtype(self) -> str:
        return "e4m3"

    @property
    def device(self) -> Any:
        """Of torch, which answers go to; None = numpy."""
        return self.codes.device if _is_torch(self.codes) else None

    def __getitem__(self, rows: Any) -> E4m3:
        """Some rows: a slice, or an index of the kind that codes and scales take."""
        return E4m3(self.codes[rows], self.scales[rows])

    def take(self, rows: Any, axis: int = 0) -> E4m3:
        """As numpy's, of arrays, by rows."""
        return E4m3(self.codes.take(rows, axis), self.scales.take(rows, axis))

    def on_host(self) -> E4m3:
        """With contiguous numpy arrays: the same memory where it lies so already."""
        codes, scales = self.codes, self.scales
        if _is_torch(codes):
            codes, scales = codes.cpu().numpy(), scales.detach().cpu().numpy()
        elif codes.flags.c_contiguous and scales.flags.c_contiguous:
            return self
        return E4m3(np.ascontiguousarray(codes), np.ascontiguousarray(scales))

    def widened(self) -> Any:
        """[M, H] f32, code * scale: of the same kind and on the same device."""
        if _is_torch(self.codes):
            torch = sys.modules["torch"]
            wide = self.codes.view(torch.float8_e4m3fn).float()
            return wide.mul_(self.scales.repeat_interleave(SCALED_COLUMNS, 1)[:, : wide.shape[1]])
        host, widen = self.on_host(), widener()
        if widen is None:
            return widen_numpy(host)
        M, H = host.shape
        out = np.empty((M, H), np.float32)
        widen(_at(host.codes), _at(host.scales), M, H, _at(out), _KINDS["float32"])
        return out


def asked_for(wire_dtype: str | None) -> bool:
    """Of a client's option: whether it asks for e4m3.  Raises BadDtypeError for anything but "e4m3" and None."""
    if wire_dtype not in (None, "e4m3"):
        raise BadDtypeError.about("wire_dtype", got=repr(wire_dtype), want="'e4m3', or None: as they are given")
    return wire_dtype is not None


def taken(described: pb.DescribeResponse) -> bool:
    """Whether a server takes it."""
    return pb.DATA_TYPE_E4M3 in described.input_dtypes


def quantize(x: Any) -> E4m3:
    """[M, H] f32, f16 or bf16, numpy or torch -> the same rows in e4m3, of the same kind and on the same device."""
    native = quantizer()
    if _is_torch(x):
        x = x.detach()
        if x.device.type != "cpu" or native is None:
            return quantize_torch(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        empty, address = x.new_empty, x.data_ptr()
        kinds = sys.modules["torch"]
        out = E4m3(empty(x.shape, dtype=kinds.uint8), empty((len(x), scales_of_row(x.shape[1])), dtype=kinds.float32))
        stride, to = x.stride(0) * x.element_size(), (out.codes.data_ptr(), out.scales.data_ptr())
    else:
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
        if native is None:
            return quantize_numpy(x)
        x = x if x.strides[1] == x.itemsize and x.strides[0] >= 0 else np.ascontiguousarray(x)
        out = E4m3(np.empty(x.shape, np.uint8), np.empty((len(x), scales_of_row(x.shape[1])), np.float32))
        stride, address = x.strides[0], _at(x)
        to = (_at(out.codes), _at(out.scales))
    M, H = x.shape
    native(address, _KINDS[_name(x)], M, H, stride, *to)
    return out


_KINDS = {"float32": 1, "float16": 2, "bfloat16": 3}
"""DataTypes of what the C++ twin reads."""


def quantize_numpy(x: NDArray[Any]) -> E4m3:
    """quantize() of an array without its C++ twin: the same bits, 15 times slower."""
    M, H = x.shape
    padded = np.zeros((M, scales_of_row(H) * SCALED_COLUMNS), np.float32)
    padded[:, :H] = x
    blocks = padded.reshape(M, scales_of_row(H), SCALED_COLUMNS)
    scales = np.abs(blocks).max(axis=2, initial=0) / np.float32(_MOST)
    scales = np.maximum(scales, np.float32(_LEAST_SCALE))
    finite = np.isfinite(scales)
    scales[~finite] = np.nan
    with np.errstate(invalid="ignore"):
        scaled = blocks * (np.float32(1) / scales)[..., None]
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[~finite] = 0
    return E4m3(np.ascontiguousarray(codes.reshape(padded.shape)[:, :H]), scales)


def widen_numpy(x: E4m3) -> NDArray[np.float32]:
    """E4m3.widened() of arrays without its C++ twin: the same bits."""
    wide: NDArray[np.float32] = x.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wide *= x.scales.repeat(SCALED_COLUMNS, axis=1)[:, : x.shape[1]]
    return wide


def quantize_torch(x: Any) -> E4m3:
    """quantize() of a tensor by torch's own operations, on its device: the same bits."""
    torch = sys.modules["torch"]
    M, H = x.shape
    padded = torch.zeros((M, scales_of_row(H) * SCALED_COLUMNS), dtype=torch.float32, device=x.device)
    padded[:, :H] = x
    blocks = padded.view(M, scales_of_row(H), SCALED_COLUMNS)
    most = torch.tensor(_MOST, device=x.device)  # by a number of Python's CUDA multiplies with its inverse: another bit
    scales = (blocks.abs().amax(2) / most).clamp_min(_LEAST_SCALE) if blocks.numel() else blocks[..., 0]
    finite = scales.isfinite()
    scales = scales.where(finite, torch.nan)
    codes = (blocks * (1 / scales)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.where(finite[..., None], 0)
    return E4m3(codes.view(padded.shape)[:, :H].contiguous(), scales)


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _name(x: Any) -> str:
    """ "float32": of a numpy or torch dtype; the type of anything else."""
    return str(x.dtype).removeprefix("torch.") if hasattr(x, "dtype") else type(x).__name__


def _at(array: NDArray[Any]) -> int:
    """Its address."""
    address: int = array.__array_interface__["data"][0]
    return address
