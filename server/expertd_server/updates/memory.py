"""Where tensors of an update lie until their layer is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expertd.errors import ChangeRefusedError
from expertd.shm.cuda import CudaError
from expertd.shm.ipc import HANDLE_BYTES, MappedMemory

__all__ = ["TrainerMemory", "memory_refusal", "room_on"]

_MOST_MAPPED = 4096


def room_on(device: torch.device) -> Callable[[int], Tensor] | None:
    """What makes [n] u8 on the host for so many bytes, pinned, so that `device` copies from there by itself; torch
    keeps such memory for the next tensors.  None: the device is a CPU, and tensors may lie anywhere."""
    if device.type != "cuda":
        return None
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def memory_refusal(device: torch.device) -> str:
    """ "" where tensors may lie in memory of a GPU, else why not."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "this server computes on no NVIDIA GPU"
    return ""


class _Array:
    """Bytes of a GPU as torch takes them: without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class TrainerMemory:
    """A trainer's allocations that tensors of one update lie in, each mapped once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._mapped = device, dict[bytes, MappedMemory]()

    def tensor(self, name: str, handle: bytes, offset: int, nbytes: int) -> Tensor:
        """[nbytes] u8 where they lie.  Raises ChangeRefusedError."""
        if len(handle) != HANDLE_BYTES:
            raise ChangeRefusedError(f"{name}: a handle of {len(handle)} bytes, want {HANDLE_BYTES}")
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        try:
            mapped = self._mapped.get(handle)
            if mapped is None:
                if len(self._mapped) >= _MOST_MAPPED:
                    raise ChangeRefusedError(f"{name}: lies in more than {_MOST_MAPPED} allocations with the others")
                mapped = self._mapped[handle] = MappedMemory(handle, index)
        except CudaError as e:
            raise ChangeRefusedError(f"{name}: the trainer's memory cannot be read: {e}") from e
        if offset + nbytes > mapped.bytes:
            raise ChangeRefusedError(
                f"{name}: bytes {offset} to {offset + nbytes} of an allocation of {mapped.bytes} bytes"
            )
        with torch.cuda.device(index):
            return torch.as_tensor(_Array(mapped.address + offset, nbytes), device="cuda")

    def close(self) -> None:
        """Unmaps them, once nothing on the device reads there any more."""
        mapped, self._mapped = self._mapped, {}
        if mapped:
            torch.cuda.synchronize(self._device)
        for one in mapped.values():
            one.close()
