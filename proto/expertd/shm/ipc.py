"""Memory of a GPU that another process of this host allocated, read where it lies (CUDA IPC).

handle, offset = exported(address, device)     the owner's: of the allocation around an address
mapped = MappedMemory(handle, device)          the reader's: the whole allocation, at `mapped.address`
"""

from __future__ import annotations

import ctypes as C

from expertd.shm.cuda import cuda

__all__ = ["HANDLE_BYTES", "MappedMemory", "exported"]

HANDLE_BYTES = 64
_LAZY_PEERS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may be of another GPU of the host."""


class _Handle(C.Structure):
    _fields_ = [("bytes", C.c_ubyte * HANDLE_BYTES)]


def exported(address: int, device: int) -> tuple[bytes, int]:
    """(handle of the allocation in which `address` of `device` lies, bytes from its start).  Raises CudaError: the
    driver shares no memory that is mapped page by page, as torch's expandable segments are."""
    driver, handle, base, size = cuda(), _Handle(), C.c_uint64(), C.c_size_t()
    with driver.current(device):
        driver("cuMemGetAddressRange_v2", C.byref(base), C.byref(size), C.c_uint64(address))
        driver("cuIpcGetMemHandle", C.byref(handle), base)
    return bytes(handle.bytes), address - base.value


class MappedMemory:
    """Another process's allocation.  address, bytes: of it in this process, for `device`.  Raises CudaError."""

    def __init__(self, handle: bytes, device: int) -> None:
        driver, base, size = cuda(), C.c_uint64(), C.c_size_t()
        given = _Handle((C.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        self.device = device
        with driver.current(device):
            driver("cuIpcOpenMemHandle_v2", C.byref(base), given, C.c_uint(_LAZY_PEERS))
            self.address = base.value
            try:
                driver("cuMemGetAddressRange_v2", C.byref(base), C.byref(size), base)
            except BaseException:
                driver("cuIpcCloseMemHandle", C.c_uint64(self.address))
                raise
        self.bytes = size.value

    def close(self) -> None:
        """No kernel and no copy may use its addresses any more."""
        address, self.address = self.address, 0
        if address:
            driver = cuda()
            with driver.current(self.device):
                driver("cuIpcCloseMemHandle", C.c_uint64(address))
