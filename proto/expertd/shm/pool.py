"""Memory on a GPU that a server and a client of one host share: made by the server on its own GPU, sent to the client
as a descriptor over a Unix socket, mapped by the client for its GPU.

It is the driver's own allocation, none of a framework's allocator: it goes when the last process that maps it lets go,
however the other one ends.
"""

from __future__ import annotations

import ctypes as C
import os
import socket
import struct
from contextlib import ExitStack

from expertd.shm.cuda import Cuda, CudaError, cuda, device_refusal, device_uuid

__all__ = ["Pool", "PoolError"]

_HEADER = struct.Struct("<8sQ16s")
_MAGIC = b"expgpu01"
_PINNED, _ON_DEVICE, _POSIX, _READ_WRITE = 1, 1, 1, 3
_NONE = C.c_uint64(0)


class PoolError(Exception):
    """Memory cannot be shared between these GPUs, or what came over the socket is no such memory."""


class _Location(C.Structure):
    _fields_ = [("type", C.c_int), ("id", C.c_int)]


class _Properties(C.Structure):
    _fields_ = [
        ("type", C.c_int),
        ("handle_types", C.c_int),
        ("location", _Location),
        ("windows", C.c_void_p),
        ("flags", C.c_ubyte * 8),
    ]


class _Access(C.Structure):
    _fields_ = [("location", _Location), ("flags", C.c_int)]


class Pool:
    """address: of its mapping for `device` in this process; bytes: of it; uuid: of the GPU on which it lies."""

    def __init__(self, address: int, nbytes: int, device: int, uuid: bytes, fd: int = -1) -> None:
        self.address, self.bytes, self.device, self.uuid = address, nbytes, device, uuid
        self._fd = fd

    @classmethod
    def create(cls, device: int, nbytes: int) -> Pool:
        """The server's: on its own GPU.  Raises PoolError with what is missing."""
        refusal = device_refusal(device)
        if refusal:
            raise PoolError(refusal)
        properties, step, handle, fd = (
            _Properties(_PINNED, _POSIX, _Location(_ON_DEVICE, device)),
            C.c_size_t(),
            C.c_uint64(),
            C.c_int(-1),
        )
        driver = cuda()
        try:
            with ExitStack() as undo:
                undo.enter_context(driver.current(device))
                driver("cuMemGetAllocationGranularity", C.byref(step), C.byref(properties), C.c_int(0))
                size = -(-nbytes // step.value) * step.value
                driver("cuMemCreate", C.byref(handle), C.c_size_t(size), C.byref(properties), _NONE)
                undo.callback(driver, "cuMemRelease", handle)  # its mapping holds it
                driver("cuMemExportToShareableHandle", C.byref(fd), handle, C.c_int(_POSIX), _NONE)
                return cls(_map(driver, handle, size, device), size, device, device_uuid(device), fd.value)
        except CudaError as e:
            if fd.value >= 0:
                os.close(fd.value)
            raise PoolError(f"{nbytes} bytes of the GPU's memory cannot be shared: {e}") from e

    def send(self, to: socket.socket) -> None:
        """The client's half, once: the descriptor is closed here."""
        socket.send_fds(to, [_HEADER.pack(_MAGIC, self.bytes, self.uuid)], [self._fd])
        self._forget_fd()

    @classmethod
    def receive(cls, source: socket.socket, device: int) -> Pool:
        """What `send` sent, mapped for this process's `device`.  Raises PoolError, and OSError where the socket
        breaks."""
        refusal = device_refusal(device)
        if refusal:
            raise PoolError(refusal)
        data, fds, flags, _ = socket.recv_fds(source, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(data) != _HEADER.size or len(fds) != 1 or flags & socket.MSG_CTRUNC:
                raise PoolError(f"session: got {len(data)} bytes with {len(fds)} descriptors, want a GPU's memory")
            magic, size, uuid = _HEADER.unpack(data)
            if magic != _MAGIC or not size:
                raise PoolError("session: the server shares a GPU's memory of another version")
            handle, driver = C.c_uint64(), cuda()
            with ExitStack() as undo:
                undo.enter_context(driver.current(device))
                driver("cuMemImportFromShareableHandle", C.byref(handle), C.c_void_p(fds[0]), C.c_int(_POSIX))
                undo.callback(driver, "cuMemRelease", handle)
                return cls(_map(driver, handle, size, device), size, device, uuid)
        except CudaError as e:
            raise PoolError(f"the server's GPU and this one cannot reach each other's memory: {e}") from e
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Unmaps it; no kernel may use its addresses any more."""
        self._forget_fd()
        address, self.address = self.address, 0
        if address:
            driver = cuda()
            with driver.current(self.device):
                driver("cuMemUnmap", C.c_uint64(address), C.c_size_t(self.bytes))
                driver("cuMemAddressFree", C.c_uint64(address), C.c_size_t(self.bytes))

    def _forget_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _map(driver: Cuda, handle: C.c_uint64, nbytes: int, device: int) -> int:
    """Address of memory that `device` may read and write."""
    size, address, access = C.c_size_t(nbytes), C.c_uint64(), _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
    with ExitStack() as undo:
        driver("cuMemAddressReserve", C.byref(address), size, C.c_size_t(0), _NONE, _NONE)
        undo.callback(driver, "cuMemAddressFree", address, size)
        driver("cuMemMap", address, size, C.c_size_t(0), handle, _NONE)
        undo.callback(driver, "cuMemUnmap", address, size)
        driver("cuMemSetAccess", address, size, C.byref(access), C.c_size_t(1))
        undo.pop_all()
    return address.value
