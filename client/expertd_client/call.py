"""From the arguments of forward() to a request on the wire, and from its answer to a ForwardResult.  Pure: both clients
share it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertd.errors import BadResponseError, BadShapeError, DeadlineExceededError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, ForwardResponseView
from expertd_client.tensors import Like, from_wire, like, to_wire, wire_dtype

__all__ = ["Call", "ForwardResult", "Grouped", "crowded", "expired", "make_call", "numbered", "result_of"]

_MAX_TIMEOUT_US = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows that come sorted by expert: the first row_counts[0] rows are for expert_ids[0], and so on; sum = M.

    They are answered row by row, not weighted and not summed."""

    expert_ids: Sequence[int]
    row_counts: Sequence[int]


@dataclass(slots=True)
class ForwardResult:
    """The answer to one forward; the caller's own: `answer.output += shared_experts(x)` is fine.

    output            [M, H] in the dtype that was asked for, of the kind (numpy or torch, device) of hidden_states: the
                      sum over the routes that this server computed, times their weights; None where a digest was
                      asked for
    digest            sum, sum of squares and CRC-32 of the output, where asked for
    routes_computed   over all servers these add up to M * top_k less the -1s
    timing            nanoseconds of the server's stages, and the batch that this request was part of
    load              the server's load when it answered
    """

    output: Any
    digest: pb.Digest | None
    routes_computed: int
    timing: pb.Timing
    load: pb.Load
    placement_epoch: int


@dataclass(frozen=True, slots=True)
class Call:
    """One forward, ready to be sent.

    request     without request_id and timeout
    want        what its answer should be
    digest      whether a digest answers it
    timeout_s   as the caller gave it; end_s: when it is over, on time.monotonic(); None = never
    """

    request: ForwardRequestView
    want: Like
    digest: bool
    timeout_s: float | None
    end_s: float | None

    def left_s(self) -> float | None:
        """Seconds left, >= 0; None = no limit."""
        return None if self.end_s is None else max(0.0, self.end_s - time.monotonic())


def make_call(
    layer: int,
    hidden_states: Any,
    topk_ids: Any,
    topk_weights: Any,
    *,
    timeout_s: float | None,
    output_dtype: Any,
    router_weight_on_input: bool,
    digest: bool,
    grouped: Grouped | None,
    traceparent: str,
) -> Call:
    """The call.  Raises a row of the error table for what can be seen without the server: types and dtypes."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: got {timeout_s}, want finite seconds > 0, or None for no limit")
    if (grouped is None) != (topk_ids is not None and topk_weights is not None):
        raise BadShapeError.about(
            "forward",
            got="grouped with topk_ids or topk_weights" if grouped is not None else "no topk_ids or no topk_weights",
            want="topk_ids and topk_weights, or grouped alone",
        )
    hidden = to_wire(hidden_states, "hidden_states")
    want = like(hidden_states, hidden)
    request = ForwardRequestView(
        layer=layer,
        hidden_states=hidden,
        topk_ids=None if topk_ids is None else to_wire(topk_ids, "topk_ids"),
        topk_weights=None if topk_weights is None else to_wire(topk_weights, "topk_weights"),
        grouped=None
        if grouped is None
        else pb.GroupedRows(expert_ids=grouped.expert_ids, row_counts=grouped.row_counts),
        output_dtype=want.dtype if output_dtype is None else wire_dtype(output_dtype),
        output_form=pb.OUTPUT_FORM_DIGEST if digest else pb.OUTPUT_FORM_TENSOR,
        router_weight_on_input=router_weight_on_input,
        traceparent=traceparent,
    )
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Call(request, want, digest, timeout_s, end_s)


def numbered(call: Call, request_id: int) -> ForwardRequestView:
    """The request of `call` as it is sent now: with its id and what is left of its time (whole microseconds, >= 1)."""
    left_s = call.left_s()
    timeout_us = 0 if left_s is None else min(_MAX_TIMEOUT_US, max(1, int(left_s * 1e6)))
    r = call.request  # field by field: dataclasses.replace() takes five times as long, on every request
    return ForwardRequestView(
        request_id,
        r.layer,
        r.hidden_states,
        r.topk_ids,
        r.topk_weights,
        r.grouped,
        timeout_us,
        r.output_dtype,
        r.output_form,
        r.traceparent,
        r.router_weight_on_input,
    )


def expired(call: Call, request_id: int) -> DeadlineExceededError:
    """The client's own end of a request's time."""
    return DeadlineExceededError.about(
        f"forward of layer {call.request.layer}",
        got=f"no answer within {call.timeout_s} s",
        want="one in time",
        remedy="give it more time, or ask a replica with less load",
        request_id=request_id,
    )


def crowded(call: Call) -> DeadlineExceededError:
    """A request whose time was over before it could be sent."""
    return DeadlineExceededError.about(
        f"forward of layer {call.request.layer}",
        got=f"max_in_flight requests under way for {call.timeout_s} s",
        want="one of them answered",
        remedy="raise max_in_flight, or send less",
    )


def result_of(answer: ForwardResponseView, call: Call) -> ForwardResult:
    """The answer for the caller.  Raises BadResponseError where it does not fit the request."""
    if (answer.digest is None) == call.digest or (answer.output is None) != call.digest:
        got = f"output {answer.output is not None}, digest {answer.digest is not None}"
        raise BadResponseError.about("answer", got=got, want="a digest" if call.digest else "an output tensor")
    if answer.output is not None and answer.output.dtype != call.request.output_dtype:
        raise BadResponseError.about("output", got=f"DataType {answer.output.dtype}", want=call.request.output_dtype)
    return ForwardResult(
        output=None if answer.output is None else from_wire(answer.output, call.want),
        digest=answer.digest,
        routes_computed=answer.routes_computed,
        timing=answer.timing or pb.Timing(),
        load=answer.load or pb.Load(),
        placement_epoch=answer.placement_epoch,
    )
