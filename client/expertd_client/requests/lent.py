"""Memory that a transport lends for one answer, such as a slot that it shares with the server.

A transport that reads answers from memory of its own wraps each in Lent:

    lent = Lent(slot_bytes, give_back=lambda: ring.free(slot))
    view.output = TensorView.of_raw(dtype, shape, lent.array())
    view.give_back = lent.release

The array keeps `lent` alive, and so does everything that is made from it (numpy views, torch.from_numpy): when the last
of them is gone, the memory goes back.  Callers who know earlier call ForwardResult.release().
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Why it is so: decision 75 in DECISIONS.md.
__all__ = ["Lent", "LentBytes", "lend"]


class Lent:
    """`memory` (a C-contiguous buffer, best a writable one) until it is given back: once, in whatever thread it is."""

    __slots__ = ("__array_interface__", "_give_back", "_memory")

    def __init__(self, memory: Any, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = None  # until the memory is known to be of use
        self._memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__
        self._give_back = give_back

    @classmethod
    def at(cls, address: int, nbytes: int, give_back: Callable[[], None]) -> Lent:
        """Memory at an address, which stays there until it is given back."""
        lent = cls.__new__(cls)
        lent._memory = None
        lent.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        lent._give_back = give_back
        return lent

    def array(self) -> NDArray[np.uint8]:
        """[n] u8 over the memory."""
        return np.asarray(self)

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    __del__ = release


class LentBytes:
    """Memory at an address as a buffer, in fewer steps than Lent: np.ndarray(shape, dtype, lent) and torch.frombuffer
    keep it alive.  Made by lend()."""

    give_back: Callable[[], None] | None = None

    def release(self) -> None:
        """Once, in whatever thread it is."""
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()

    __del__ = release


@lru_cache(maxsize=1024)
def _kind(nbytes: int) -> Any:
    return type("LentBytes", (LentBytes, C.c_uint8 * nbytes), {})


def lend(address: int, nbytes: int, give_back: Callable[[], None] | None = None) -> LentBytes:
    """The memory at `address`, which stays there until it is given back.  give_back: None = it is set later, or nobody
    wants it."""
    lent: LentBytes = _kind(nbytes).from_address(address)
    lent.give_back = give_back
    return lent
