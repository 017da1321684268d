"""Bytes to values.  Tensors come out as memoryviews of the bytes that came in.

Requests and answers are read in C++ (csrc/messages.h), which says where their fields lie; the small messages in them,
typed values and synthetic tensors included, by the generated classes of protobuf.  These read the whole where it is
spelled as no serializer does (a tensor in two pieces, groups, hundreds of fields), where it holds something else, and
where the library is not built.  What is no message is theirs to say.
"""

from __future__ import annotations

import ctypes as C
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from expertd.codec.generated import request_view, response_view, stream_request_view, stream_response_view
from expertd.codec.library import HeadRead, Range, RequestRead, ResponseRead, TensorRead, library
from expertd.codec.values import (
    ForwardHead,
    ForwardRequestView,
    ForwardResponseView,
    ScalesView,
    Spelling,
    StreamRequestView,
    StreamResponseView,
    TensorView,
)
from expertd.common import bounds
from expertd.errors import ExpertdError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "NO_MESSAGE",
    "Bytes",
    "decode_forward_request",
    "decode_forward_response",
    "decode_stream_request",
    "decode_stream_response",
    "peek_forward",
    "peek_request_id",
]

Bytes: TypeAlias = "bytes | memoryview"

NO_MESSAGE = "message: got bytes that are no {message}, want a serialized protobuf message"
"""Text of a MalformedMessageError, whoever reads the message."""

_M = TypeVar("_M")
_MAX_TRACEPARENT = bounds.MOST["ForwardRequest.traceparent"]


def decode_forward_request(buf: Bytes) -> ForwardRequestView:
    """A ForwardRequest.  Raises MalformedMessageError, or BadShapeError for a shape of too many extents."""
    found = _request(buf, stream=False)
    return request_view(_generated(pb.ForwardRequest, buf, stream=False)) if found is None else found


def decode_forward_response(buf: Bytes) -> ForwardResponseView:
    """A ForwardResponse.  Raises as above."""
    found = _response(buf, stream=False)
    return response_view(_generated(pb.ForwardResponse, buf, stream=False)) if found is None else found


def decode_stream_request(buf: Bytes) -> StreamRequestView | None:
    """What a StreamForwardRequest holds; None where no `kind` is set.  Raises as above, with the request_id of the
    request, 0 where that cannot be read any more."""
    found = _request(buf, stream=True)
    if found is not None:
        return found
    return stream_request_view(_generated(pb.StreamForwardRequest, buf, stream=True))


def decode_stream_response(buf: Bytes) -> StreamResponseView | None:
    """What a StreamForwardResponse holds; None where no `kind` is set (a newer server's).  Raises as above."""
    found = _response(buf, stream=True)
    if found is not None:
        return found
    return stream_response_view(_generated(pb.StreamForwardResponse, buf, stream=True))


def peek_forward(data: bytes) -> ForwardHead | None:
    """The head of the request in a StreamForwardRequest, whatever else is in it.  None: it holds something else, or is
    written as nobody writes it."""
    lib, head = library(), HeadRead()
    if lib is None or not lib.read_head(data, len(data), C.byref(head)):
        return None
    return ForwardHead(head.request_id, head.layer, head.tokens, head.top_k, head.timeout_us, head.sent_us)


def peek_request_id(buf: Bytes, stream: bool) -> int:
    """The request_id of a ForwardRequest or CancelRequest (inside its stream message if `stream`) as far as it can be
    read in broken bytes; 0 = not found."""
    lib, data = library(), bytes(buf)
    return 0 if lib is None else int(lib.request_id(data, len(data), stream))


# ---- read by C++ -----------------------------------------------------------------------------------------------------


def _request(buf: Bytes, stream: bool) -> ForwardRequestView | None:
    """None: it is for the generated classes.  Raises the error that says what is too long."""
    lib, data, r = library(), bytes(buf), RequestRead()
    if lib is None or not lib.read_request(data, len(data), stream, C.byref(r)):
        return None
    view = memoryview(data)
    traceparent = view[r.traceparent.begin : r.traceparent.end]
    if len(traceparent) > _MAX_TRACEPARENT:
        return None
    try:
        return ForwardRequestView(
            r.request_id,
            r.layer,
            _tensor(view, r.hidden),
            _tensor(view, r.ids),
            _tensor(view, r.weights),
            _part(pb.GroupedRows, view, r.grouped),
            r.timeout_us,
            r.output_dtype,
            r.output_form,
            str(traceparent, "utf-8"),
            bool(r.weight_on_input),
            r.sent_us,
            r.weights_version,
        )
    except (DecodeError, UnicodeDecodeError):
        return None
    except ExpertdError as e:
        e.request_id = r.request_id
        raise


def _response(buf: Bytes, stream: bool) -> ForwardResponseView | None:
    """As _request."""
    lib, data, r = library(), bytes(buf), ResponseRead()
    if lib is None or not lib.read_response(data, len(data), stream, C.byref(r)):
        return None
    view = memoryview(data)
    try:
        return ForwardResponseView(
            r.request_id,
            _tensor(view, r.output),
            _part(pb.Digest, view, r.digest),
            r.routes_computed,
            _part(pb.Timing, view, r.timing),
            _part(pb.Load, view, r.load),
            r.placement_epoch,
            r.weights_version,
        )
    except DecodeError:
        return None
    except ExpertdError as e:
        e.request_id = r.request_id
        raise


def _part(message: type[_M], view: memoryview, at: Range) -> _M | None:
    return bounds.read(message, view[at.begin : at.end]) if at.end else None


_TYPED: dict[int, Any] = {
    Spelling.FLOATS: pb.FloatValues,
    Spelling.INTS: pb.IntValues,
    Spelling.SYNTHETIC: pb.SyntheticValues,
}


def _tensor(view: memoryview, t: TensorRead) -> TensorView | None:
    if not t.present:
        return None
    if t.rank > bounds.MAX_RANK:
        raise bounds.shape_too_long(f"{t.rank} extents")
    data: Any = None
    if t.spelling == Spelling.RAW:
        data = view[t.data.begin : t.data.end]
    elif t.spelling != Spelling.NONE:
        data = _part(_TYPED[t.spelling], view, t.data)
    scales = None
    if t.scaled:
        raw, floats = view[t.scales.begin : t.scales.end], _part(pb.FloatValues, view, t.scale_floats)
        scales = ScalesView(t.block, raw, floats)
    return TensorView(t.dtype, tuple(t.shape[: t.rank]), t.spelling, data, scales)


# ---- read by the generated classes -----------------------------------------------------------------------------------


def _generated(message: type[_M], buf: Bytes, stream: bool) -> _M:
    """Raises the error that says what is wrong, or too long."""
    try:
        if len(buf) > bounds.ODD_BYTES:
            raise DecodeError(f"{len(buf)} bytes, spelled as no serializer does")
        found: _M = message.FromString(bytes(buf))  # type: ignore[attr-defined]
        bounds.within(found)
        return found
    except DecodeError as e:
        name = message.DESCRIPTOR.name  # type: ignore[attr-defined]
        error: ExpertdError = MalformedMessageError(NO_MESSAGE.format(message=name))
        error.__cause__ = e
    except ExpertdError as e:
        error = e
    error.request_id = peek_request_id(buf, stream)
    raise error
