"""What an NVIDIA GPU's driver keeps for the stacks of all threads that the device can run at once."""

from __future__ import annotations

import ctypes as C
import logging
from typing import TYPE_CHECKING

from expertd.shm.cuda import CudaError, cuda
from expertd_server.boot.memory import free_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["STACK_BYTES", "narrow_stacks"]

log = logging.getLogger(__name__)

STACK_BYTES = 256
"""Of a thread of a kernel that does not say what it needs.  CUDA's own 1024 bytes take 264 MiB of an H200 more than
none, these 64."""
_STACK_SIZE = 0
"""CU_LIMIT_STACK_SIZE."""


def narrow_stacks(device: torch.device) -> None:
    """Lower the device's stacks to STACK_BYTES.  Kernels that say what they need get it all the same; one that cannot
    (recursion, calls by pointer) may need CUDA's own size, so this is for a process whose kernels are known."""
    import torch

    if device.type != "cuda" or torch.version.hip is not None:
        return
    now = C.c_size_t()
    try:
        driver = cuda()
        with driver.current(torch.cuda.current_device() if device.index is None else device.index):
            driver("cuCtxGetLimit", C.byref(now), C.c_int(_STACK_SIZE))
            if now.value > STACK_BYTES:
                before = free_bytes(device)
                driver("cuCtxSetLimit", C.c_int(_STACK_SIZE), C.c_size_t(STACK_BYTES))
                log.info(
                    "freed %d MiB of device memory: stacks of the kernels' threads", free_bytes(device) - before >> 20
                )
    except CudaError as e:
        log.info("the stacks of the kernels' threads, about 200 MiB of device memory, cannot be freed: %s", e)
