"""Experts for a caller on a GPU of the server's host: tensors go from GPU to GPU, the caller's host waits for nothing.

    with client.device_session("cuda:1") as lane:
        out = lane.forward(layer, hidden_states, topk_ids, topk_weights)     # [M, H], ordered on the current stream

A session has memory on the server's GPU that both map, and two words in memory of the host.  A call is two kernels
on the caller's stream: one copies the tensors into the pool, writes the number of the request into one word and waits
for the other one; one copies the output out of the pool.  They can be captured in a CUDA graph.  Whoever makes the
tensors in the pool and reads the output there (slot()) needs the first alone, and nothing is copied.
The server computes the request with those of all other callers, as if it had come through any other channel.

One call of a session is under way at a time, in the order of the stream; who wants two opens two sessions.  Nothing is
raised where the caller's host does not wait: a request that is refused answers NaN, and check() says why.
"""

from __future__ import annotations

import ctypes as C
import select
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from expertd.errors import UnavailableError
from expertd.shm.client import Client
from expertd.shm.cuda import cuda
from expertd.shm.in_flight import SessionEndedError
from expertd.shm.layout import (
    CALLS_OFFSET,
    GOOD,
    LOST,
    MOST_PREPARED,
    ON_DEVICE,
    PAGE,
    PREPARE,
    ROUTER_WEIGHT_ON_INPUT,
    Completion,
    DeviceCalls,
    Submission,
)
from expertd.shm.pool import Pool
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.device.copies import Copies, Launch
from expertd_client.device.dlpack import tensor_at
from expertd_client.device.slot import ALIGN, DeviceSlot, Ground, Place
from expertd_client.transports.message import refusal

# Why it is so: decision 112 in DECISIONS.md.
__all__ = ["DeviceSession"]

_TYPES = {
    torch.float32: pb.DATA_TYPE_F32,
    torch.float16: pb.DATA_TYPE_F16,
    torch.bfloat16: pb.DATA_TYPE_BF16,
    torch.int32: pb.DATA_TYPE_I32,
    torch.int64: pb.DATA_TYPE_I64,
}
_PORTABLE_MAPPED = 3
_PREPARE_S = 10.0
_WATCH_S = 0.001
"""How often a lost session's word is written: a stream that comes to wait later waits no longer than this."""


@dataclass(slots=True)
class _Prepared:
    """A request that the server knows by its number, and the operations of a call; take: None in a slot."""

    call: Launch
    take: Launch | None


class DeviceSession:
    """Calls of one stream after another; see the module.  Not thread-safe."""

    def __init__(self, sock: socket.socket, client: Client, pool: Pool) -> None:
        """Owns all three.  pool: for the caller's GPU.  Raises CudaError."""
        self._sock, self._client, self._pool = sock, client, pool
        self._driver, self.device = cuda(), pool.device
        region = client.region
        self._words = DeviceCalls.from_address(region.address + CALLS_OFFSET)
        self._called = region.address + CALLS_OFFSET + DeviceCalls.called.offset
        self._answered = region.address + CALLS_OFFSET + DeviceCalls.answered.offset
        self._page = region.address
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._ground = Ground(pool.bytes)
        self._told = 0
        self._stream: Any = None
        self._lost = self._closed = False
        with self._driver.current(self.device):
            self._driver("cuMemHostRegister_v2", C.c_void_p(self._page), C.c_size_t(PAGE), C.c_uint(_PORTABLE_MAPPED))
            try:
                self._copies = Copies(self._driver)
            except BaseException:
                self._driver("cuMemHostUnregister", C.c_void_p(self._page))
                raise
        self._watch = threading.Thread(target=self._watch_server, name="expertd-gpu-watch", daemon=True)
        self._watch.start()

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
        router_weight_on_input: bool = False,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """[M, H] of hidden_states' dtype: the weighted sum of the experts here, on `stream` (else the current one).

        hidden_states [M, H] bf16, f16 or f32; topk_ids [M, k] int32 or int64; topk_weights [M, k] of a float type; all
        on this session's GPU.  timeout_s: how long it may wait on the server.  The first call of a layer, a shape and
        types asks the server, which takes a few hundred microseconds; later ones are two launches.
        Raises what check() raises, ValueError for tensors that cannot be used, and what the server has against a
        request of this kind."""
        self.check()
        x, ids, w = (t.contiguous() for t in (hidden_states, topk_ids, topk_weights))
        M, H = x.shape
        if out is None:
            out = torch.empty_like(x)
        if stream is None:
            stream = torch.cuda.current_stream(x.device)
        key = (layer, M, H, ids.shape, w.shape, x.dtype, ids.dtype, w.dtype, router_weight_on_input, timeout_s)
        call = self._prepared.get(key)
        if call is None:
            call = self._prepared[key] = self._prepare(layer, x, ids, w, router_weight_on_input, timeout_s)
        assert call.take is not None
        values = call.call.values
        values[1], values[4], values[7] = x.data_ptr(), ids.data_ptr(), w.data_ptr()
        call.take.values[0] = to = out.data_ptr()
        if (values[1] | values[4] | values[7] | to) % 16:
            raise ValueError("tensors: got one at an odd address, want all at multiples of 16 bytes; clone() it")
        if M:
            self._launch(call, stream)
        return out

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> DeviceSlot:
        """Tensors of one batch that are sent again and again with new values: they lie where the server reads and
        writes.  They take from `bytes` until the slot is closed, and end with the session.  dtype: of hidden states and
        output.  Raises ValueError where the session has not so much memory left."""
        shapes: list[tuple[tuple[int, int], torch.dtype]] = [
            ((tokens, hidden_size), dtype),
            ((tokens, top_k), torch.int32),
            ((tokens, top_k), torch.float32),
            ((tokens, hidden_size), dtype),
        ]
        if tokens < 1 or dtype not in _TYPES or not dtype.is_floating_point:
            raise ValueError(f"device slot: got {tokens} tokens of {dtype}, want at least 1, of bf16, f16 or f32")
        place = self._ground.slot([rows * columns * kind.itemsize for (rows, columns), kind in shapes])
        if place is None:
            raise ValueError(
                f"device session: got no memory left for a slot of {tokens} tokens; close one, or open another"
            )
        at = zip(place[:4], shapes, strict=True)
        tensors = [self._tensor(self._pool.address + offset, shape, kind) for offset, (shape, kind) in at]
        tensors[1].fill_(-1)
        return DeviceSlot(tensors, partial(self._forward_slot, place), partial(self._ground.free, place))

    def _forward_slot(
        self,
        place: Place,
        slot: DeviceSlot,
        layer: int,
        stream: Any,
        router_weight_on_input: bool,
        timeout_s: float | None,
    ) -> None:
        self.check()
        x, ids, w = slot.hidden_states, slot.topk_ids, slot.topk_weights
        key = (layer, *x.shape, ids.shape[1], x.dtype, place.hidden, router_weight_on_input, timeout_s)
        call = self._prepared.get(key)
        if call is None:
            number = self._number(layer, place, x, ids, w, router_weight_on_input, timeout_s)
            out = -(-x.numel() * x.element_size() // 4) * 4  # its place ends no earlier
            launch = Launch(0, *(0,) * 9, *self._words_of(number), self._pool.address + place.out, out)
            call = self._prepared[key] = _Prepared(launch, None)
        self._launch(call, torch.cuda.current_stream(x.device) if stream is None else stream)

    @property
    def bytes(self) -> int:
        """Of a request's hidden states, ids, weights and output together, at most."""
        return self._ground.left - 4 * ALIGN

    def check(self) -> None:
        """Raises the error of a call that was refused since the last check, or UnavailableError where the server is
        gone.  Says nothing of calls that have not ended: synchronize first to know of those."""
        if self._closed or self._lost:
            raise UnavailableError(
                "device session: closed" if self._closed else "device session: the server ended it; open another one"
            )
        refusals: int = self._words.refusals
        if refusals != self._told:
            self._told = refusals
            raise refusal(self._words.failure)

    @property
    def last(self) -> Completion:
        """What the server said of the last call that it computed: routes_computed, times, the batch.  After a
        synchronize."""
        return Completion.from_buffer_copy(self._words.last)

    def close(self) -> None:
        """Ends the session when nothing of it is under way on the GPU: waits for the GPU."""
        if self._closed:
            return
        with self._driver.current(self.device):
            self._driver("cuCtxSynchronize")
            self._closed = True
            with suppress(OSError):  # the server was faster
                self._sock.shutdown(socket.SHUT_RDWR)
            self._watch.join()
            self._copies.close()
            self._driver("cuMemHostUnregister", C.c_void_p(self._page))
        self._pool.close()
        self._sock.close()
        self._client.end()
        self._client.close()

    def __enter__(self) -> DeviceSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(address, shape, dtype, self.device)

    def _launch(self, call: _Prepared, stream: Any) -> None:
        self._follow(stream)
        self._client.wake()
        with self._on_device():
            handle: int = stream.cuda_stream
            self._copies.call(handle, call.call)
            if call.take is not None:
                self._copies.take(handle, call.take)

    def _words_of(self, number: int) -> tuple[int, ...]:
        return (self._answered, self._called, number, self._copies.blocks, GOOD, self._copies.failed)

    def _misplaced(self, t: torch.Tensor) -> bool:
        return t.device.type != "cuda" or t.device.index != self.device

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if torch.cuda.current_device() == self.device else torch.cuda.device(self.device)

    def _follow(self, stream: Any) -> None:
        """Behind what was called on another stream.  During a capture that is the business of who replays."""
        if stream != self._stream:
            if self._stream is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
            self._stream = stream

    def _prepare(
        self, layer: int, x: Any, ids: Any, w: Any, router_weight_on_input: bool, timeout_s: float | None
    ) -> _Prepared:
        if any(map(self._misplaced, (x, ids, w))):
            raise ValueError(f"tensors: got some on another device, want all on cuda:{self.device}")
        if any(t.dtype not in _TYPES for t in (x, ids, w)) or ids.shape != w.shape or len(ids) != len(x):
            raise ValueError(
                f"tensors: got {tuple(x.shape)} {x.dtype}, {tuple(ids.shape)} {ids.dtype}, {tuple(w.shape)} {w.dtype},"
                " want [M, H], [M, k] and [M, k] of float, int32 or int64, and float"
            )
        sizes = [t.numel() * t.element_size() for t in (x, ids, w, x)]
        place = self._ground.call(sizes)
        if place is None:
            raise ValueError(
                f"device session: got a request of {sum(sizes)} bytes, want at most {self.bytes}; split the batch"
            )
        number = self._number(layer, place, x, ids, w, router_weight_on_input, timeout_s)
        there = [self._pool.address + offset for offset in place[:4]]
        segments = [n for to, size in zip(there[:3], sizes[:3], strict=True) for n in (to, 0, size)]
        take = Launch(sizes[3], 0, there[3], sizes[3], self._copies.failed)
        return _Prepared(Launch(sizes[0], *segments, *self._words_of(number), 0, 0), take)

    def _number(
        self, layer: int, place: Place, x: Any, ids: Any, w: Any, router_weight_on_input: bool, timeout_s: float | None
    ) -> int:
        """By which the server knows requests of a layer with tensors at `place`, of these shapes and types."""
        if len(self._prepared) >= MOST_PREPARED:
            raise ValueError(f"device session: got more than {MOST_PREPARED} kinds of requests; open another one")
        number = len(self._prepared) + 1
        self._ask(
            Submission(
                kind=PREPARE, flags=ON_DEVICE | (ROUTER_WEIGHT_ON_INPUT if router_weight_on_input else 0),
                number=number, layer=layer, tokens=len(x), top_k=ids.shape[1], hidden=place.hidden, ids=place.ids,
                weights=place.weights, out=place.out, hidden_dtype=_TYPES[x.dtype], ids_dtype=_TYPES[ids.dtype],
                weights_dtype=_TYPES[w.dtype], out_dtype=_TYPES[x.dtype], hidden_size=x.shape[1],
                deadline_ns=0 if timeout_s is None else max(1, int(timeout_s * 1e9)),
            )
        )  # fmt: skip
        return number

    def _ask(self, s: Submission) -> None:
        answer, ticket = Completion(), self._client.submit(s)
        try:
            if not ticket or not self._client.wait(ticket, answer, int(_PREPARE_S * 1e9)):
                raise UnavailableError("device session: the server does not answer")
        except SessionEndedError as e:
            raise UnavailableError("device session: the server ended it; open another one") from e
        self._client.release(ticket)
        if answer.refused:
            raise refusal(answer)

    def _watch_server(self) -> None:
        """When the server is gone, every stream that waits for it, now or later, gets LOST."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)  # else it is a bell
        while not self._closed and not self._lost:
            if poll.poll():
                self._lost = not self._closed
        while not self._closed:
            if self._words.answered == 0:
                self._words.answered = LOST
            time.sleep(_WATCH_S)
