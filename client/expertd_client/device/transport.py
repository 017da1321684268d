"""How a torch module's tensors on a GPU reach a server on the same host: a session from GPU to GPU (cuda_ipc), opened
when the first of them comes and again after it broke, or the reason why they travel as others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expertd.errors import ExpertdError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.device.session import DeviceSession
from expertd_client.tracing import gpu_clock, recorder

__all__ = ["DeviceTransport"]

_AGAIN_S, _MOST_S = 1.0, 60.0
"""After so long a session that could not be had is tried again, and twice as long after each further time."""
_AT = 16
"""Addresses of a session's tensors are multiples of it."""


class DeviceTransport:
    """One client's, for one GPU.  Thread-safe; its calls are computed one after another.

    open_session, describe: of the client
    timeout_s: of a call that names none, at the server; None = no limit
    reason: why there is no session; "" where there is one, or nobody asked yet

    Nothing waits on the host, so nothing counts the routes that a server computed: layers of which it does not hold
    every expert travel as others do.  A call that is refused later answers NaN, and the next one raises its error.

    Calls may be captured in a CUDA graph once a session is open.  A graph keeps the session that it was captured with:
    when the server ends, its replays answer NaN and check() raises; capture again to use the next session.
    """

    def __init__(
        self,
        open_session: Callable[[], DeviceSession],
        describe: Callable[[], pb.DescribeResponse],
        timeout_s: float | None = None,
    ) -> None:
        self._open, self._describe = open_session, describe
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: DeviceSession | None = None
        self._side: Any = None
        self._captured: list[DeviceSession] = []
        self._whole: frozenset[int] = frozenset()
        self._max_tokens = 0
        self._not_before_s = 0.0
        self._pause_s = _AGAIN_S
        self.reason = ""

    def forward(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, timeout_s: float | None = None
    ) -> Tensor | None:
        """[M, H] in the order of the current stream: see DeviceSession.forward.  None: it must travel another way.
        UnavailableError where a capture meets a session that is lost."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            capturing = torch.cuda.is_current_stream_capturing()
            session = self._ready(layer, capturing)
            rows = 0 if session is None else self._rows(session, x, ids, weights)
            if session is None or not rows:
                return None
            out = torch.empty_like(x)
            over = (now := recorder.active) and gpu_clock.timed(now, layer, x)
            try:
                for at in range(0, len(x), rows):
                    piece = slice(at, at + rows)
                    tensors = (_aligned(t[piece]) for t in (x, ids, weights))
                    session.forward(layer, *tensors, out=out[piece], timeout_s=timeout_s)
            except UnavailableError as e:
                if capturing:  # closing a session waits for the GPU, which a capture forbids
                    raise
                self._lose(e)
                return None
            if capturing and session not in self._captured:
                self._captured.append(session)
            if over is not None:
                over()
            return out

    def start(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, timeout_s: float | None = None
    ) -> Callable[[], Tensor] | None:
        """The same beside what the current stream is given meanwhile.  What it returns makes the current stream wait,
        and gives the answer."""
        before = torch.cuda.current_stream(x.device)
        if self._side is None:
            self._side = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(before)
        with torch.cuda.stream(self._side):
            out = self.forward(layer, x, ids, weights, timeout_s)
        if out is None:
            return None
        for t in (x, ids, weights):
            t.record_stream(self._side)
        done = self._side.record_event()

        def wait() -> Tensor:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(done)
            out.record_stream(stream)
            return out

        return wait

    def check(self) -> None:
        """Raises the error of the last capture's session: UnavailableError where its server has ended, or why a call
        was refused since the last check.  Synchronize first to know of replays that were launched."""
        with self._lock:
            if self._captured:
                self._captured[-1].check()

    def close(self) -> None:
        """Graphs that hold calls of this object must not be replayed afterwards."""
        with self._lock:
            for session in (*self._captured, self._session):
                if session is not None:
                    session.close()
            self._captured.clear()
            self._session = None
            self._not_before_s, self.reason = float("inf"), "closed"

    def _ready(self, layer: int, capturing: bool) -> DeviceSession | None:
        if self._session is None and not capturing and time.monotonic() >= self._not_before_s:
            try:
                described = self._describe()
                self._session = self._open()
            except ExpertdError as e:
                self._lose(e)
                return None
            self._pause_s, self.reason = _AGAIN_S, ""
            self._max_tokens = described.limits.max_tokens
            self._whole = frozenset(
                entry.layer for entry in described.layers if sum(r.count for r in entry.held) == entry.num_experts
            )
        return self._session if layer in self._whole else None

    def _rows(self, session: DeviceSession, x: Tensor, ids: Tensor, weights: Tensor) -> int:
        """How many tokens travel at once; 0: they cannot."""
        M = len(x)
        if not M or (x.shape[1] * x.element_size()) % _AT:
            return 0
        a_row = sum(t[0].numel() * t.element_size() for t in (x, ids, weights, x))
        return min(M, self._max_tokens or M, session.bytes // a_row)

    def _lose(self, why: ExpertdError) -> None:
        lost, self._session = self._session, None
        self.reason = why.message
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(_MOST_S, 2 * self._pause_s)
        if lost is not None and lost not in self._captured:  # a graph that is replayed needs its memory
            lost.close()


def _aligned(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t if t.data_ptr() % _AT == 0 else t.clone()
