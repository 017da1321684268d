"""Bytes to values.  Tensors come out as memoryviews of the bytes that came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from expertd import bounds
from expertd.codec.generated import request_view, response_view, stream_request_view, stream_response_view
from expertd.codec.scan import (
    MAX_FIELDS,
    Bytes,
    OddError,
    dtype_and_shape,
    int32,
    packed_shape,
    size,
    skip,
    tag,
    varint,
)
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
from expertd.errors import ExpertdError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "NO_MESSAGE",
    "decode_forward_request",
    "decode_forward_response",
    "decode_stream_request",
    "decode_stream_response",
    "peek_forward",
    "peek_request_id",
]

NO_MESSAGE = "message: got bytes that are no {message}, want a serialized protobuf message"
"""Text of a MalformedMessageError, whoever reads the message."""

_V = TypeVar("_V")
_M = TypeVar("_M")


def decode_forward_request(buf: Bytes) -> ForwardRequestView:
    """A ForwardRequest.  Raises MalformedMessageError."""
    return _decode(buf, _request, pb.ForwardRequest, request_view)


def decode_forward_response(buf: Bytes) -> ForwardResponseView:
    """A ForwardResponse.  Raises MalformedMessageError."""
    return _decode(buf, _response, pb.ForwardResponse, response_view)


def decode_stream_request(buf: Bytes) -> StreamRequestView | None:
    """What a StreamForwardRequest holds; None where no `kind` is set.  Raises MalformedMessageError whose request_id
    says which request it was, 0 where that cannot be read any more."""
    return _decode(buf, _stream_request, pb.StreamForwardRequest, stream_request_view, stream=True)


def decode_stream_response(buf: Bytes) -> StreamResponseView | None:
    """What a StreamForwardResponse holds; None where no `kind` is set (a newer server's).  Raises MalformedMessageError
    with the request_id as above."""
    return _decode(buf, _stream_response, pb.StreamForwardResponse, stream_response_view, stream=True)


def _decode(
    buf: Bytes,
    scan: Callable[[Bytes, memoryview, int, int], _V],
    message: type[Any],
    view: Callable[[Any], _V],
    stream: bool = False,
) -> _V:
    """The one place that decides who reads a message: the scanner, and where it gives up, the generated classes.

    The scanner, also for the smallest messages: for 128 bytes it takes as long as the generated class and its
    accessors together, and for everything larger the latter copy each tensor once more.
    """
    try:
        return scan(buf, memoryview(buf), 0, len(buf))
    except (OddError, IndexError, UnicodeDecodeError, DecodeError) as odd:
        try:
            return view(_read_odd(message, buf))
        except DecodeError:
            raise MalformedMessageError(
                NO_MESSAGE.format(message=message.DESCRIPTOR.name), request_id=peek_request_id(buf, stream)
            ) from odd
        except ExpertdError as e:
            e.request_id = peek_request_id(buf, stream)
            raise
    except ExpertdError as e:
        e.request_id = peek_request_id(buf, stream)
        raise


def _read_odd(message: type[_M], buf: Bytes) -> _M:
    """What the scanner gave up on.  Raises DecodeError, or the row that says what is too long."""
    if len(buf) > bounds.ODD_BYTES:
        raise DecodeError
    found: _M = message.FromString(bytes(buf))  # type: ignore[attr-defined]
    bounds.within(found)
    return found


_MAX_TRACEPARENT = bounds.MOST["ForwardRequest.traceparent"]


def _request(buf: Bytes, view: memoryview, pos: int, end: int) -> ForwardRequestView:
    request_id = layer = timeout_us = output_dtype = output_form = sent_us = weights_version = 0
    hidden_states = topk_ids = topk_weights = grouped = None
    traceparent = ""
    router_weight_on_input = False
    for _ in range(MAX_FIELDS):
        if pos >= end:
            break
        field = buf[pos]
        if field < 0x80:
            pos += 1
        else:
            field, pos = tag(buf, pos)
        if field == 0x1A:
            if hidden_states is not None:
                raise OddError("hidden_states twice")
            start, pos = size(buf, pos, end)
            hidden_states = _tensor(buf, view, start, pos)
        elif field == 0x22:
            if topk_ids is not None:
                raise OddError("topk_ids twice")
            start, pos = size(buf, pos, end)
            topk_ids = _tensor(buf, view, start, pos)
        elif field == 0x2A:
            if topk_weights is not None:
                raise OddError("topk_weights twice")
            start, pos = size(buf, pos, end)
            topk_weights = _tensor(buf, view, start, pos)
        elif field == 0x08:
            request_id, pos = varint(buf, pos)
        elif field == 0x10:
            layer, pos = varint(buf, pos)
            layer &= 0xFFFFFFFF
        elif field == 0x38:
            timeout_us, pos = varint(buf, pos)
        elif field == 0x40:
            output_dtype, pos = varint(buf, pos)
            output_dtype = int32(output_dtype)
        elif field == 0x48:
            output_form, pos = varint(buf, pos)
            output_form = int32(output_form)
        elif field == 0x58:
            flag, pos = varint(buf, pos)
            router_weight_on_input = flag != 0
        elif field == 0x60:
            sent_us, pos = varint(buf, pos)
        elif field == 0x68:
            weights_version, pos = varint(buf, pos)
        elif field == 0x52:
            start, pos = size(buf, pos, end)
            if pos - start > _MAX_TRACEPARENT:
                raise OddError(f"a traceparent of {pos - start} bytes")
            traceparent = str(view[start:pos], "utf-8")
        elif field == 0x32:
            if grouped is not None:
                raise OddError("grouped twice")
            start, pos = size(buf, pos, end)
            grouped = bounds.read(pb.GroupedRows, view[start:pos])
        else:
            pos = skip(buf, pos, end, field)
    if pos != end:
        raise OddError(f"more than {MAX_FIELDS} fields, or a last one beyond the end, at byte {pos}")
    return ForwardRequestView(
        request_id,
        layer,
        hidden_states,
        topk_ids,
        topk_weights,
        grouped,
        timeout_us,
        output_dtype,
        output_form,
        traceparent,
        router_weight_on_input,
        sent_us,
        weights_version,
    )


def _tensor(buf: Bytes, view: memoryview, pos: int, end: int) -> TensorView:
    """A Tensor.  First the order of the contract with nothing but dtype, shape and raw; anything else goes field by
    field."""
    if end - pos > 5 and buf[pos] == 0x08 and buf[pos + 2] == 0x12:
        head_end = pos + 4 + buf[pos + 3]
        if head_end < end and buf[head_end] == 0x1A:
            start, stop = size(buf, head_end + 1, end)
            if stop == end:
                dtype, shape = dtype_and_shape(bytes(buf[pos:head_end]))
                return TensorView(dtype, shape, Spelling.RAW, view[start:stop], None)
    return _tensor_fields(buf, view, pos, end)


def _tensor_fields(buf: Bytes, view: memoryview, pos: int, end: int) -> TensorView:
    dtype = 0
    shape: tuple[int, ...] = ()
    spelling = Spelling.NONE
    data: Any = None
    scales = None
    for _ in range(MAX_FIELDS):
        if pos >= end:
            break
        field = buf[pos]
        if field < 0x80:
            pos += 1
        else:
            field, pos = tag(buf, pos)
        if field == 0x08:
            dtype = buf[pos]
            if dtype < 0x80:
                pos += 1
            else:
                dtype, pos = varint(buf, pos)
                dtype = int32(dtype)
        elif field == 0x12:
            start, pos = size(buf, pos, end)
            shape += packed_shape(buf, start, pos)
        elif field in _DATA:
            if spelling:
                raise OddError("tensor data twice")
            start, pos = size(buf, pos, end)
            spelling = field >> 3
            data = view[start:pos] if field == 0x1A else bounds.read(_DATA[field], view[start:pos])
        elif field == 0x10:
            extent, pos = varint(buf, pos)
            shape += (extent & 0xFFFFFFFF,)
        elif field == 0x3A:
            if scales is not None:
                raise OddError("scales twice")
            start, pos = size(buf, pos, end)
            scales = _scales(buf, view, start, pos)
        else:
            pos = skip(buf, pos, end, field)
    if pos != end:
        raise OddError(f"more than {MAX_FIELDS} fields, or a last one beyond the end, at byte {pos}")
    if len(shape) > bounds.MAX_RANK:
        raise bounds.shape_too_long(f"{len(shape)} extents")
    return TensorView(dtype, shape, spelling, data, scales)


_DATA: dict[int, Any] = {0x1A: bytes, 0x22: pb.FloatValues, 0x2A: pb.IntValues, 0x32: pb.SyntheticValues}
"""Tags of Tensor.data and what reads each spelling."""


def _scales(buf: Bytes, view: memoryview, pos: int, end: int) -> ScalesView:
    block = 0
    raw: Any = b""
    floats = None
    for _ in range(MAX_FIELDS):
        if pos >= end:
            break
        field, pos = tag(buf, pos)
        if field == 0x08:
            block, pos = varint(buf, pos)
            block &= 0xFFFFFFFF
        elif field == 0x12:
            start, pos = size(buf, pos, end)
            raw = view[start:pos]
        elif field == 0x1A:
            if floats is not None:
                raise OddError("floats twice")
            start, pos = size(buf, pos, end)
            floats = bounds.read(pb.FloatValues, view[start:pos])
        else:
            pos = skip(buf, pos, end, field)
    if pos != end:
        raise OddError(f"more than {MAX_FIELDS} fields, or a last one beyond the end, at byte {pos}")
    return ScalesView(block, raw, floats)


def _response(buf: Bytes, view: memoryview, pos: int, end: int) -> ForwardResponseView:
    request_id = routes_computed = placement_epoch = weights_version = 0
    output = None
    small: dict[int, Any] = {}
    for _ in range(MAX_FIELDS):
        if pos >= end:
            break
        field = buf[pos]
        if field < 0x80:
            pos += 1
        else:
            field, pos = tag(buf, pos)
        if field == 0x12:
            if output is not None:
                raise OddError("output twice")
            start, pos = size(buf, pos, end)
            output = _tensor(buf, view, start, pos)
        elif field == 0x08:
            request_id, pos = varint(buf, pos)
        elif field == 0x20:
            routes_computed, pos = varint(buf, pos)
        elif field == 0x38:
            placement_epoch, pos = varint(buf, pos)
        elif field == 0x40:
            weights_version, pos = varint(buf, pos)
        elif field in _RESPONSE_PARTS:
            if field in small:
                raise OddError(f"field {field >> 3} twice")
            start, pos = size(buf, pos, end)
            small[field] = bounds.read(_RESPONSE_PARTS[field], view[start:pos])
        else:
            pos = skip(buf, pos, end, field)
    if pos != end:
        raise OddError(f"more than {MAX_FIELDS} fields, or a last one beyond the end, at byte {pos}")
    get = small.get
    timing, load = get(0x2A), get(0x32)
    return ForwardResponseView(
        request_id, output, get(0x1A), routes_computed, timing, load, placement_epoch, weights_version
    )


_RESPONSE_PARTS: dict[int, Any] = {0x1A: pb.Digest, 0x2A: pb.Timing, 0x32: pb.Load}


def _stream_request(buf: Bytes, view: memoryview, pos: int, end: int) -> StreamRequestView | None:
    if pos == end:
        return None
    field = buf[pos]
    start, stop = size(buf, pos + 1, end)
    if stop != end:
        raise OddError("more than one field in a stream message")
    if field == 0x0A:
        return _request(buf, view, start, stop)
    if field == 0x12:
        return bounds.read(pb.CancelRequest, view[start:stop])
    raise OddError("not a request")


def _stream_response(buf: Bytes, view: memoryview, pos: int, end: int) -> StreamResponseView | None:
    if pos == end:
        return None
    field = buf[pos]
    start, stop = size(buf, pos + 1, end)
    if stop != end:
        raise OddError("more than one field in a stream message")
    if field == 0x0A:
        return _response(buf, view, start, stop)
    if field == 0x12:
        return bounds.read(pb.RequestError, view[start:stop])
    raise OddError("not an answer")


def peek_forward(buf: Bytes) -> ForwardHead | None:
    """The head of the request in a StreamForwardRequest, a third of the time that reading it takes.  A look: what is
    wrong elsewhere in the message is not seen.  None: it holds something else, or is written as nobody writes it."""
    end = len(buf)
    number = layer = timeout_us = sent_us = 0
    tokens = top_k = 1
    try:
        pos, stop = size(buf, 1, end)
        if buf[0] != 0x0A or stop != end:
            return None
        for _ in range(MAX_FIELDS):
            if pos >= end:
                break
            field, pos = tag(buf, pos)
            if field & 7 == 2:
                start, pos = size(buf, pos, end)
                if field == 0x1A:
                    tokens = _extents(buf, start, pos)[0]
                elif field == 0x22:
                    top_k = _extents(buf, start, pos)[1]
            elif field == 0x08:
                number, pos = varint(buf, pos)
            elif field == 0x10:
                layer, pos = varint(buf, pos)
            elif field == 0x38:
                timeout_us, pos = varint(buf, pos)
            elif field == 0x60:
                sent_us, pos = varint(buf, pos)
            else:
                pos = skip(buf, pos, end, field)
    except (OddError, IndexError, ExpertdError):
        return None
    return ForwardHead(number, layer & 0xFFFFFFFF, tokens, top_k, timeout_us, sent_us)


def _extents(buf: Bytes, pos: int, end: int) -> tuple[int, ...]:
    """The shape of a Tensor that begins as serializers begin it.  Raises OddError, or IndexError."""
    if buf[pos] != 0x08 or buf[pos + 2] != 0x12 or pos + 4 + buf[pos + 3] > end:
        raise OddError("no shape in its usual place")
    return dtype_and_shape(bytes(buf[pos : pos + 4 + buf[pos + 3]]))[1]


def peek_request_id(buf: Bytes, stream: bool) -> int:
    """The request_id of a ForwardRequest or CancelRequest (inside its stream message if `stream`) as far as it can be
    read in broken bytes; 0 = not found.  Looks at the first fields only: serializers write request_id first."""
    pos, end = 0, len(buf)
    try:
        if stream:
            field, pos = tag(buf, pos)
            if field not in (0x0A, 0x12):
                return 0
            pos = varint(buf, pos)[1]
        for _ in range(MAX_FIELDS):
            field, pos = tag(buf, pos)
            if field == 0x08:
                return varint(buf, pos)[0]
            pos = skip(buf, pos, end, field)
    except (OddError, IndexError):
        return 0
    return 0
