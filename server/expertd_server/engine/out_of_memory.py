"""A batch for which memory runs out: what can be given back is, and it is computed again in two halves, once.

Rows are independent, so a half is as right as the whole; whatever the first try wrote is written again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

# Why it is so: decision 143 in DECISIONS.md.
__all__ = ["compute", "out_of_memory", "unheard"]

log = logging.getLogger(__name__)

_WORDS = ("out of memory", "not enough memory", "can't allocate memory")
"""Of RuntimeErrors: Triton and the driver, torch's allocators of the host."""


def out_of_memory(e: BaseException) -> bool:
    """Whether less of the same might be computed where `e` was raised."""
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(e, RuntimeError) and any(words in str(e).lower() for words in _WORDS)


def compute(call: Callable[[int, int], None], rows: int, again: Callable[[], None], where: str) -> bool:
    """call(0, rows), or, where that runs out of memory, again() and call() for each half.  True: in halves.

    call(a, z)   computes rows a to z
    again()      brings back what it reads, and may have overwritten; raises where it cannot
    where        the batch, for the log
    """
    try:
        call(0, rows)
        return False
    except Exception as e:
        if rows < 2 or not out_of_memory(e):
            raise
        text = str(e).splitlines()[0][:200]
    for api in (torch.cuda, torch.xpu):
        if api.is_available():
            api.empty_cache()
    log.warning("%s: %s; freeing torch's cached memory and computing the batch again in halves", where, text)
    again()
    half = (rows + 1) // 2
    call(0, half)
    call(half, rows)
    return True


def unheard(kind: str) -> None:
    """For those whom nobody asks for their troubles."""
