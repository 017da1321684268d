"""Large fresh matrices in huge pages: with 4 KiB pages the faults cost more than filling the memory does."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["empty"]

HUGE_PAGE = 2 << 20


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.empty, in transparent huge pages where the system has them and the tensor is large enough."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # Private: a shared anonymous mapping is shared memory to the kernel, which gives no huge pages by default.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return torch.empty(shape, dtype=dtype)  # a kernel built without them
    return torch.frombuffer(memory, dtype=dtype).view(shape)
