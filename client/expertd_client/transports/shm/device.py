"""Tensors on a GPU of the caller's, to and from the region of a session in shared memory: without a copy in between.

The arena is registered with the driver as pinned memory when the first such tensor comes, so one copy on the caller's
stream moves a tensor there, and one moves the output back.  The host waits for the first, since the server must not
read before it is done; not for the second: the block of an answer goes back once the device is seen to have read it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from expertd.common.dtypes import DTYPE_BYTES, scales_of_row
from expertd.shm.client import Client
from expertd.shm.layout import Tensors
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.lent import Lent
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import device_of, torch_dtype
from expertd_client.transports.message import ALIGN, Sent, head_of

__all__ = ["Pinned", "on_gpu"]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU of this process."""


def on_gpu(request: Request) -> bool:
    """Whether its hidden states lie on a GPU, and its routes in tensors of torch.  Outputs of e4m3 go by way of the
    host."""
    if getattr(request.hidden_states, "is_cpu", False):
        return False
    device = device_of(request.hidden_states)
    if device is None or device.type != "cuda" or request.dtypes[0] == pb.DATA_TYPE_E4M3:
        return False
    return device_of(request.topk_ids) is not None and device_of(request.topk_weights) is not None


class Pinned:
    """The arena of a session.  Thread-safe."""

    def __init__(self, client: Client) -> None:
        """Raises RuntimeError where the driver does not take it."""
        self._torch: Any = sys.modules["torch"]  # whose tensors have come
        self._client = client
        self._address, self._bytes = client.region.arena, client.region.arena_bytes
        _checked(self._torch.cuda.cudart().cudaHostRegister(self._address, self._bytes, _PORTABLE))
        self._views: dict[int, Any] = {}  # the arena as a tensor of each dtype
        self._lock = threading.Lock()
        self._read: deque[tuple[Any, Callable[[], None]]] = deque()  # answers that a GPU copies

    def put(self, request: Request) -> tuple[Sent, int] | None:
        """The request's tensors in a block of the arena, once they are there: the submission says where.  None: there
        is no room."""
        self.sweep()
        out_dtype, hidden_dtype, ids_dtype, weights_dtype = request.dtypes
        x, M = request.hidden_states, request.tokens
        device, (H, k) = device_of(x), (x.shape[1], request.topk_ids.shape[1])
        parts: list[tuple[str, Any, int, tuple[int, int]]] = [
            ("ids", request.topk_ids, ids_dtype, (M, k)),
            ("weights", request.topk_weights, weights_dtype, (M, k)),
        ]
        if isinstance(x, E4m3):
            parts.append(("scales", x.scales, pb.DATA_TYPE_F32, (M, scales_of_row(H))))
            x = x.codes
        parts.append(("hidden", x, hidden_dtype, (M, H)))
        sizes = [rows * columns * DTYPE_BYTES[dtype] for _, _, dtype, (rows, columns) in parts]
        out_bytes = M * H * DTYPE_BYTES[out_dtype]
        block = self._client.take(sum(-(-n // ALIGN) * ALIGN for n in sizes) + out_bytes)
        if block is None:
            return None
        s, at = head_of(request), block
        try:
            for (field, tensor, dtype, shape), n in zip(parts, sizes, strict=True):
                self._view(at, dtype, shape).copy_(tensor.detach(), non_blocking=True)
                setattr(s, field, at)
                at += -(-n // ALIGN) * ALIGN
            s.out = at
            self._torch.cuda.current_stream(device).synchronize()
        except BaseException:
            self._client.give(block)
            raise
        return Sent(s, Tensors(out_bytes=out_bytes), (), out_dtype, (M, H)), block

    def get(self, sent: Sent, device: Any, give_back: Callable[[], None]) -> Any:
        """The output on `device`, in the order of the caller's stream.  give_back: once the arena was read."""
        shape, number = sent.shape, sent.out_dtype
        output = self._torch.empty(shape, dtype=torch_dtype(number), device=device)
        output.copy_(self._view(sent.submission.out, number, shape), non_blocking=True)
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(device))
        with self._lock:
            self._read.append((event, give_back))
        return output

    def sweep(self, wait: bool = False) -> None:
        """Give back what was read.  wait: for the devices."""
        while True:
            with self._lock:
                if not self._read or not (wait or self._read[0][0].query()):
                    return
                event, give_back = self._read.popleft()
            event.synchronize()
            give_back()

    def close(self) -> None:
        """After the last copy."""
        self._views.clear()
        self._torch.cuda.cudart().cudaHostUnregister(self._address)

    def _view(self, at: int, number: int, shape: tuple[int, int]) -> Any:
        whole = self._views.get(number)
        if whole is None:
            nbytes = DTYPE_BYTES[number]
            memory = Lent.at(self._address, self._bytes // nbytes * nbytes, lambda: None)
            dtype = self._torch.uint8 if number == pb.DATA_TYPE_E4M3 else torch_dtype(number)
            whole = self._views[number] = self._torch.as_tensor(memory.array()).view(dtype)
        return whole.as_strided(shape, (shape[1], 1), at // DTYPE_BYTES[number])


def _checked(result: Any) -> None:
    if int(result):
        raise RuntimeError(f"the driver did not register the session's memory: error {int(result)}")
