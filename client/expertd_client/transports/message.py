"""A request as a submission in shared memory, and a completion as an answer."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint8
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from expertd.codec import ForwardResponseView, TensorView
from expertd.common.dtypes import DTYPE_BYTES, scales_of_row, tensor_bytes
from expertd.common.trace_context import context_of
from expertd.errors import TABLE, BadResponseError, ExpertdError
from expertd.shm.layout import FORWARD, ROUTER_WEIGHT_ON_INPUT, Completion, Submission, Tensors
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.lent import Lent, lend
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult, require_version
from expertd_client.requests.tensors import Synthetic, are_few_bytes, device_of, host_address, over_buffer, over_memory

_Form: TypeAlias = tuple[Submission, Tensors, tuple[int, int]]
"""The submission but for its layer and places, the sizes of the tensors, [M, H]."""

__all__ = [
    "ALIGN",
    "Prepared",
    "Sent",
    "head_of",
    "load_of",
    "message_bytes",
    "refusal",
    "response",
    "result",
    "result_with",
    "sendable",
    "submission_of",
    "timing_of",
]

ALIGN = 256
"""Of tensors in a block."""
_HEADS = 256
"""Bytes of a message that are no tensor's, at most."""


class Sent(NamedTuple):
    """A request on its way.  keep: whatever its addresses need alive until it was sent; shape: [M, H]."""

    submission: Submission
    tensors: Tensors
    keep: tuple[Any, ...]
    out_dtype: int
    shape: tuple[int, int]


def sendable(request: Request) -> bool:
    """Whether it has a form here."""
    if request.plain or request.digest or request.kind.submission is not None:  # such a one was sent
        return not request.digest
    if request.grouped is not None or request.tokens == 0:
        return False
    return not (
        isinstance(request.hidden_states, Synthetic)
        or isinstance(request.topk_ids, Synthetic)
        or isinstance(request.topk_weights, Synthetic)
    )


def message_bytes(request: Request) -> int:
    """Of a sendable request as a message, at most."""
    _, hidden_dtype, ids_dtype, weights_dtype = request.dtypes
    M, H = request.hidden_states.shape
    k = request.topk_ids.shape[1]
    scales = scales_of_row(H) * DTYPE_BYTES[pb.DATA_TYPE_F32] if hidden_dtype == pb.DATA_TYPE_E4M3 else 0
    row = H * DTYPE_BYTES[hidden_dtype] + scales + k * (DTYPE_BYTES[ids_dtype] + DTYPE_BYTES[weights_dtype])
    return int(M * row) + _HEADS


def head_of(request: Request) -> Submission:
    """The submission but for where its tensors lie."""
    M, H = request.hidden_states.shape
    return _head(request, _form(request.dtypes, M, H, request.topk_ids.shape[1])[0])


def _head(request: Request, form: Submission) -> Submission:
    s = Submission.from_buffer_copy(form)
    s.layer = request.layer
    if request.weights_version:
        s.weights_version = request.weights_version
    if request.traceparent:
        s.trace = (c_uint8 * 24)(*context_of(request.traceparent))
    if request.router_weight_on_input:
        s.flags = ROUTER_WEIGHT_ON_INPUT
    return s


def submission_of(request: Request) -> Sent:
    """The submission of a sendable request, and where its tensors lie: they are copied when it is sent."""
    out_dtype, hidden_dtype, ids_dtype, weights_dtype = request.dtypes
    x, ids, weights = request.hidden_states, request.topk_ids, request.topk_weights
    form: _Form | None = request.kind.submission
    if form is None:
        form = request.kind.submission = _form(request.dtypes, *x.shape, ids.shape[1])
    head, places, shape = form
    s, t = _head(request, head), Tensors.from_buffer_copy(places)
    if request.plain:
        t.hidden, t.ids, t.weights = kept = x.tobytes(), ids.tobytes(), weights.tobytes()
        return Sent(s, t, kept, out_dtype, shape)
    kept_scales = None
    if isinstance(x, E4m3):
        x = x.on_host()
        t.scales, kept_scales = host_address(x.scales, pb.DATA_TYPE_F32)
        t.hidden, kept_x = host_address(x.codes, hidden_dtype)
    else:
        t.hidden, kept_x = _place(x, hidden_dtype)
    t.ids, kept_ids = _place(ids, ids_dtype)
    t.weights, kept_weights = _place(weights, weights_dtype)
    return Sent(s, t, (kept_x, kept_scales, kept_ids, kept_weights), out_dtype, shape)


@lru_cache(maxsize=1024)
def _form(dtypes: tuple[int, ...], M: int, H: int, top_k: int) -> _Form:
    """What is the same in all requests of these dtypes and shapes.  (To set a field takes 0.1 us, and there are 15.)"""
    s, t = Submission(), Tensors()
    s.kind, s.tokens, s.hidden_size, s.top_k = FORWARD, M, H, top_k
    s.out_dtype, s.hidden_dtype, s.ids_dtype, s.weights_dtype = dtypes
    t.hidden_bytes = M * H * DTYPE_BYTES[s.hidden_dtype]
    t.ids_bytes, t.weights_bytes = M * top_k * DTYPE_BYTES[s.ids_dtype], M * top_k * DTYPE_BYTES[s.weights_dtype]
    t.out_bytes = tensor_bytes(s.out_dtype, M, H)
    if s.hidden_dtype == pb.DATA_TYPE_E4M3:
        t.scales_bytes = M * scales_of_row(H) * DTYPE_BYTES[pb.DATA_TYPE_F32]
    return s, t, (M, H)


def _place(x: Any, number: int) -> tuple[Any, Any]:
    """As host_address(), or twice the bytes of few: a copy of them takes less than numpy's word where they lie."""
    if type(x) is np.ndarray and are_few_bytes(x, number):
        few = x.tobytes()
        return few, few
    return host_address(x, number)


def result(
    answer: Completion, sent: Sent, request: Request, address: int, give_back: Callable[[], None]
) -> ForwardResult:
    """What the caller gets.  address: of the output; give_back: once, when it is not read any more.  Raises
    BadResponseError where another version of the weights computed it than the request asks for."""
    return Prepared(answer, sent, request, address).result(give_back)


class Prepared:
    """result() in two steps, of which the first needs no answer yet: it takes its time while the server computes.

    answer   is filled between the two"""

    __slots__ = ("_answer", "_found", "_lent", "_request", "_sent")

    def __init__(self, answer: Completion, sent: Sent, request: Request, address: int) -> None:
        self._answer, self._sent, self._request = answer, sent, request
        lent: Any = lend(address, sent.tensors.out_bytes)
        device = None if request.plain else device_of(request.hidden_states)
        on_host = device is None or device.type == "cpu"
        output = over_buffer(lent, sent.out_dtype, sent.shape, device) if on_host else None  # else it is copied there
        self._lent, self._found = lent, result_with(answer, output, lent.release)

    def result(self, give_back: Callable[[], None]) -> ForwardResult:
        """As the function result().  Once; without it the memory stays whose it was."""
        answer, found = self._answer, self._found
        found.weights_version = answer.weights_version
        if self._request.weights_version:
            try:
                require_version(found.weights_version, self._request)
            except BadResponseError:
                give_back()
                raise
        self._lent.give_back = give_back
        found.routes_computed = answer.routes_computed
        if found.output is None:
            device = device_of(self._request.hidden_states)
            memory = np.frombuffer(self._lent, np.uint8)
            found.output = over_memory(memory, self._sent.out_dtype, self._sent.shape, device)
            self._lent.release()
        return found


def result_with(answer: Completion, output: Any, give_back: Callable[[], None] | None = None) -> ForwardResult:
    """What the caller gets, with an output that is his."""
    timing, load = (lambda: timing_of(answer)), (lambda: load_of(answer))
    return ForwardResult(output, None, answer.routes_computed, timing, load, 0, give_back, answer.weights_version)


def response(
    answer: Completion, request_id: int, sent: Sent, address: int, give_back: Callable[[], None]
) -> ForwardResponseView:
    """The same as what a message would hold."""
    lent = Lent.at(address, sent.tensors.out_bytes, give_back)
    v = ForwardResponseView(
        request_id,
        TensorView.of_piece(sent.out_dtype, sent.shape, lent.array().data),
        routes_computed=answer.routes_computed,
        timing=timing_of(answer),
        load=load_of(answer),
        weights_version=answer.weights_version,
    )
    v.give_back = lent.release
    return v


def refusal(answer: Completion) -> ExpertdError:
    """The server's error."""
    row: Any = TABLE.get(answer.name.decode(errors="replace"), ExpertdError)
    error: ExpertdError = row(answer.text.decode(errors="replace"), retry_after_us=answer.retry_after_us)
    return error


def timing_of(answer: Completion) -> pb.Timing:
    return pb.Timing(
        decode_ns=answer.decode_ns,
        queue_ns=answer.queue_ns,
        copy_in_ns=answer.collect_ns,
        kernel_ns=answer.kernel_ns,
        copy_out_ns=answer.deliver_ns,
        batch_tokens=answer.batch_tokens,
        batch_requests=answer.batch_requests,
        backend=answer.name.decode(errors="replace"),
        arrival_ns=answer.arrival_ns,
    )


def load_of(answer: Completion) -> pb.Load:
    return pb.Load(queued_tokens=answer.queued_tokens, queued_requests=answer.queued_requests, token_ns=answer.token_ns)
