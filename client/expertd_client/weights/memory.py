"""Tensors in memory of a GPU that servers of this host read where they lie (CUDA IPC)."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any

from expertd.errors import BadDtypeError, UnavailableError
from expertd.shm.cuda import CudaError
from expertd.shm.ipc import exported
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.transports.shm.entry import entered
from expertd_client.weights.tensors import dtype_of

__all__ = ["TrainerSession", "on_gpu"]

_OPEN_S = 10.0


def on_gpu(tensor: Any) -> bool:
    """Whether it is a torch tensor in an NVIDIA GPU's memory."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


class TrainerSession:
    """Of one update: sockets by which its servers know that this is a process of their user, and the tensors that they
    read.  Raises UnavailableError."""

    def __init__(self, begun: Mapping[str, pb.BeginUpdateResponse]) -> None:
        self._sockets: list[socket.socket] = []
        self._kept: list[Any] = []
        self._unsettled: set[int] = set()
        try:
            for address, answer in begun.items():
                self._sockets.append(_entered(address, answer))
        except BaseException:
            self.close()
            raise

    def part(self, name: str, tensor: Any) -> tuple[pb.WeightPart, int]:
        """(the part that says where it lies, its bytes).  tensor: torch, on a GPU; a DTensor is gathered.  Raises
        BadDtypeError, UnavailableError."""
        whole = getattr(tensor, "full_tensor", None)
        tensor = (whole() if callable(whole) else tensor).detach().contiguous()
        dtype = dtype_of(name, tensor)
        if not tensor.numel():
            raise BadDtypeError.about(name, got="no elements", want="some")
        try:
            handle, offset = exported(tensor.data_ptr(), tensor.device.index)
        except CudaError as error:
            raise UnavailableError(
                f"cuda_ipc: {name}: its memory cannot be shared: {error}; want torch's allocator without"
                " expandable_segments, or cuda_ipc=False"
            ) from error
        self._kept.append(tensor)
        self._unsettled.add(tensor.device.index)
        memory = pb.DeviceMemory(handle=handle, offset=offset)
        part = pb.WeightPart(name=name, dtype=dtype, shape=list(tensor.shape), memory=memory)
        return part, tensor.numel() * tensor.element_size()

    def settle(self) -> None:
        """Wait until what was put is written: what this thread's current stream has to do for it."""
        torch = sys.modules["torch"]
        for index in self._unsettled:
            torch.cuda.current_stream(index).synchronize()
        self._unsettled.clear()

    def close(self) -> None:
        """Servers read nothing any more."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self._kept.clear()


def _entered(address: str, answer: pb.BeginUpdateResponse) -> socket.socket:
    """A socket that the server has taken the token of.  Raises UnavailableError."""
    if not answer.memory_endpoint:
        why = answer.memory_refusal or "the server reads no memory of a GPU"
        raise UnavailableError(f"{address}: cuda_ipc: {why}")
    try:
        sock = entered(answer.memory_endpoint, answer.memory_token)
        try:
            sock.settimeout(_OPEN_S)
            if not sock.recv(1):
                raise OSError("the server refused this process: want one of its own user")
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise UnavailableError(f"{address}: cuda_ipc: {error}") from error
    return sock
