"""Messages of the generated classes as views, and views as messages: the general way, which copies each tensor."""

from __future__ import annotations

from typing import Any

from expertd.codec.values import (
    Buffer,
    ForwardRequestView,
    ForwardResponseView,
    ScalesView,
    Spelling,
    StreamRequestView,
    StreamResponseView,
    TensorView,
)
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "request_message",
    "request_view",
    "response_message",
    "response_view",
    "stream_request_view",
    "stream_response_view",
]

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


def request_message(view: ForwardRequestView) -> pb.ForwardRequest:
    """The same request as a message.  Raises ValueError for a number that its field cannot hold, BufferError for a
    tensor whose memory is not contiguous."""
    return pb.ForwardRequest(
        request_id=view.request_id,
        layer=view.layer,
        hidden_states=_tensor_message(view.hidden_states),
        topk_ids=_tensor_message(view.topk_ids),
        topk_weights=_tensor_message(view.topk_weights),
        grouped=view.grouped,
        timeout_us=view.timeout_us,
        output_dtype=view.output_dtype,  # type: ignore[arg-type]
        output_form=view.output_form,  # type: ignore[arg-type]
        traceparent=view.traceparent,
        router_weight_on_input=view.router_weight_on_input,
        sent_us=view.sent_us,
        weights_version=view.weights_version,
    )


def response_message(view: ForwardResponseView) -> pb.ForwardResponse:
    """The same response as a message.  Raises as above."""
    return pb.ForwardResponse(
        request_id=view.request_id,
        output=_tensor_message(view.output),
        digest=view.digest,
        routes_computed=view.routes_computed,
        timing=view.timing,
        load=view.load,
        placement_epoch=view.placement_epoch,
        weights_version=view.weights_version,
    )


def _tensor_message(view: TensorView | None) -> pb.Tensor | None:
    if view is None:
        return None
    name = next(name for name, spelling in _SPELLING.items() if spelling == view.spelling)
    data: Any = {} if name is None else {name: _bytes(view.data) if name == "raw" else view.data}
    scales = None
    if (s := view.scales) is not None:
        scales = pb.BlockScales(block=s.block, raw=_bytes(s.raw), floats=s.floats)
    return pb.Tensor(dtype=view.dtype, shape=view.shape, scales=scales, **data)  # type: ignore[arg-type]


def _bytes(data: Buffer) -> bytes:
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError(f"tensor: got strides {view.strides}, want contiguous row-major memory")
    return view.tobytes()


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
