"""Views of messages that the generated classes have read: the general way, which copies each tensor."""

from __future__ import annotations

from typing import Any

from expertd.codec.values import (
    ForwardRequestView,
    ForwardResponseView,
    ScalesView,
    Spelling,
    StreamRequestView,
    StreamResponseView,
    TensorView,
)
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["request_view", "response_view", "stream_request_view", "stream_response_view"]

_SPELLING = {
    None: Spelling.NONE,
    "raw": Spelling.RAW,
    "floats": Spelling.FLOATS,
    "ints": Spelling.INTS,
    "synthetic": Spelling.SYNTHETIC,
}


def request_view(message: pb.ForwardRequest) -> ForwardRequestView:
    """The same request as a view."""
    return ForwardRequestView(
        message.request_id,
        message.layer,
        _tensor(message, "hidden_states"),
        _tensor(message, "topk_ids"),
        _tensor(message, "topk_weights"),
        message.grouped if message.HasField("grouped") else None,
        message.timeout_us,
        message.output_dtype,
        message.output_form,
        message.traceparent,
        message.router_weight_on_input,
        message.sent_us,
        message.weights_version,
    )


def response_view(message: pb.ForwardResponse) -> ForwardResponseView:
    """The same response as a view."""
    return ForwardResponseView(
        message.request_id,
        _tensor(message, "output"),
        message.digest if message.HasField("digest") else None,
        message.routes_computed,
        message.timing if message.HasField("timing") else None,
        message.load if message.HasField("load") else None,
        message.placement_epoch,
        message.weights_version,
    )


def stream_request_view(message: pb.StreamForwardRequest) -> StreamRequestView | None:
    """What the message holds, as decode_stream_request gives it."""
    kind = message.WhichOneof("kind")
    if kind == "forward":
        return request_view(message.forward)
    return None if kind is None else getattr(message, kind)


def stream_response_view(message: pb.StreamForwardResponse) -> StreamResponseView | None:
    """What the message holds, as decode_stream_response gives it."""
    kind = message.WhichOneof("kind")
    if kind == "forward":
        return response_view(message.forward)
    return None if kind is None else getattr(message, kind)


def _tensor(message: Any, name: str) -> TensorView | None:
    if not message.HasField(name):
        return None
    tensor: pb.Tensor = getattr(message, name)
    which = tensor.WhichOneof("data")
    data: Any = None if which is None else getattr(tensor, which)
    scales = _scales(tensor.scales) if tensor.HasField("scales") else None
    return TensorView(
        tensor.dtype, tuple(tensor.shape), _SPELLING[which], memoryview(data) if which == "raw" else data, scales
    )


def _scales(s: pb.BlockScales) -> ScalesView:
    return ScalesView(s.block, memoryview(s.raw), s.floats if s.HasField("floats") else None)
