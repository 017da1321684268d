"""What is needed of the CUDA driver, by ctypes and found at run time: nothing depends on CUDA until it is called."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["Cuda", "CudaError", "cuda", "device_refusal", "device_uuid"]

_NEEDED = (
    (102, "virtual memory management"),
    (103, "memory that is shared by a descriptor"),
    (91, "host memory at the host's own addresses"),
)
"""Attributes of a device that must not be 0, and what is missing where one is."""


class CudaError(OSError):
    """A call of the driver failed, or there is no driver."""


class Cuda:
    """The driver.  `driver("cuMemRelease", handle)` raises CudaError unless the call succeeds."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self("cuInit", C.c_uint(0))

    def __call__(self, name: str, *arguments: Any) -> None:
        function = getattr(self.library, name, None)
        if function is None:
            raise CudaError(f"{name}: the driver does not have it; it is too old")
        code = function(*arguments)
        if code:
            text = C.c_char_p()
            self.library.cuGetErrorName(code, C.byref(text))
            raise CudaError(f"{name}: {text.value.decode() if text.value else code}")

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Inside, the device's primary context, which is also torch's, is this thread's."""
        context, before = C.c_void_p(), C.c_void_p()
        self("cuDevicePrimaryCtxRetain", C.byref(context), C.c_int(device))
        try:
            self("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self("cuCtxPopCurrent_v2", C.byref(before))
        finally:
            self("cuDevicePrimaryCtxRelease_v2", C.c_int(device))


@cache
def cuda() -> Cuda:
    """Raises CudaError where there is no driver."""
    try:
        return Cuda(C.CDLL("libcuda.so.1"))
    except OSError as e:
        raise CudaError(f"the CUDA driver cannot be used: {e}") from e


def device_refusal(device: int) -> str:
    """ "" where the device's memory can be shared and it reads words of the host, else what is missing."""
    try:
        driver, value = cuda(), C.c_int()
        for number, what in _NEEDED:
            driver("cuDeviceGetAttribute", C.byref(value), C.c_int(number), C.c_int(device))
            if not value.value:
                return f"the GPU or its driver has no {what}"
    except CudaError as e:
        return str(e)
    return ""


def device_uuid(device: int) -> bytes:
    """16 bytes, the same for one GPU in every process.  Raises CudaError."""
    uuid = (C.c_uint8 * 16)()
    cuda()("cuDeviceGetUuid_v2", C.byref(uuid), C.c_int(device))
    return bytes(uuid)
