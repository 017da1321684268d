"""Tensors over memory that torch did not allocate, by DLPack: it takes the device as it is told, so the memory may lie
on another one, where CUDA's array interface looks where it lies and wants that."""

from __future__ import annotations

import ctypes as C
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

__all__ = ["CPU", "CUDA", "tensor_at"]


class _Device(C.Structure):
    _fields_ = [("type", C.c_int32), ("id", C.c_int32)]


class _Type(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class _Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("device", _Device),
        ("ndim", C.c_int32),
        ("dtype", _Type),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]


_Deleter = C.CFUNCTYPE(None, C.c_void_p)


class _Managed(C.Structure):
    _fields_ = [("tensor", _Tensor), ("context", C.c_void_p), ("deleter", _Deleter)]


_INT, _FLOAT, _BFLOAT = 0, 2, 4
_TYPES = {
    torch.int32: _Type(_INT, 32, 1),
    torch.float32: _Type(_FLOAT, 32, 1),
    torch.float16: _Type(_FLOAT, 16, 1),
    torch.bfloat16: _Type(_BFLOAT, 16, 1),
}
CPU, CUDA = 1, 2
"""Kinds of devices, as DLPack numbers them."""

_capsule = C.PYFUNCTYPE(C.py_object, C.c_void_p, C.c_char_p, C.c_void_p)(("PyCapsule_New", C.pythonapi))
"""One of our own: what is set on ctypes.pythonapi's is set for the whole process."""
_alive: dict[int, tuple[Any, ...]] = {}


def _forget(managed: int) -> None:
    _alive.pop(managed, None)


_let_go = _Deleter(_forget)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: int, kind: int = CUDA) -> Tensor:
    """A tensor [shape] over memory that device number `device` sees at `address`, and that somebody else owns."""
    extents = (C.c_int64 * len(shape))(*shape)
    managed = _Managed(
        _Tensor(address, _Device(kind, device), len(shape), _TYPES[dtype], extents, None, 0), None, _let_go
    )
    _alive[C.addressof(managed)] = (managed, extents)
    return from_dlpack(_capsule(C.addressof(managed), b"dltensor", None))
