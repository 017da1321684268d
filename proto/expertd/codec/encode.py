"""Values to bytes: what the generated classes would write, with each tensor copied once.

Messages whose tensors have two extents are written in C++ (csrc/write.h).  The generated classes of protobuf write the
small messages in them, typed and synthetic values included, and the whole where its tensors have other extents, where a
number fits no field, and where the library is not built.  Fields stand in the order of their numbers and defaults are
left out, as in every protobuf serializer.  C++ alone pads, so that many elements stand where they can be read in place.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from expertd.codec.generated import request_message, response_message
from expertd.codec.library import REQUEST_FORM, library
from expertd.codec.values import (
    Buffer,
    ForwardRequestView,
    ForwardResponseView,
    Spelling,
    StreamRequestView,
    StreamResponseView,
    TensorView,
)
from expertd.v1 import expert_service_pb2 as pb

__all__ = [
    "RequestForm",
    "encode_forward_request",
    "encode_forward_response",
    "encode_stream_request",
    "encode_stream_response",
]


def encode_forward_request(request: ForwardRequestView) -> bytes:
    """A ForwardRequest.  Raises ValueError for a number that its field cannot hold, BufferError for a tensor whose
    memory is not contiguous."""
    found = _request(request, stream=False)
    return request_message(request).SerializeToString() if found is None else found


def encode_forward_response(response: ForwardResponseView) -> bytes:
    """A ForwardResponse.  Raises as above."""
    found = _response(response, stream=False)
    return response_message(response).SerializeToString() if found is None else found


def encode_stream_request(value: StreamRequestView) -> bytes:
    """A StreamForwardRequest that holds `value`.  Raises as above."""
    if isinstance(value, ForwardRequestView):
        found = _request(value, stream=True)
        return pb.StreamForwardRequest(forward=request_message(value)).SerializeToString() if found is None else found
    if isinstance(value, pb.CancelRequest):
        return pb.StreamForwardRequest(cancel=value).SerializeToString()
    return pb.StreamForwardRequest(session=value).SerializeToString()


def encode_stream_response(value: StreamResponseView) -> bytes:
    """A StreamForwardResponse that holds `value`.  Raises as above."""
    if isinstance(value, ForwardResponseView):
        found = _response(value, stream=True)
        return pb.StreamForwardResponse(forward=response_message(value)).SerializeToString() if found is None else found
    if isinstance(value, pb.RequestError):
        return pb.StreamForwardResponse(error=value).SerializeToString()
    if isinstance(value, pb.SessionAnswer):
        return pb.StreamForwardResponse(session=value).SerializeToString()
    return pb.StreamForwardResponse(load=value).SerializeToString()


class RequestForm:
    """What is the same in all requests whose answer is a tensor of one dtype and whose three tensors are raw and have
    these DataTypes and shapes [rows, columns]: a message is then written in few steps.  For any thread."""

    __slots__ = ("_form", "_tensors", "_write")

    def __init__(self, output_dtype: int, *tensors: tuple[int, tuple[int, ...]]) -> None:
        lib = library()
        self._tensors = output_dtype, tensors
        numbers = (n for dtype, shape in tensors for n in (dtype, Spelling.RAW, *shape, 0))
        self._form = REQUEST_FORM.pack(output_dtype, pb.OUTPUT_FORM_TENSOR, 0, *numbers)
        self._write = None if lib is None else lib.write_request

    def message(
        self,
        request_id: int,
        layer: int,
        timeout_us: int,
        sent_us: int,
        hidden: Buffer,
        ids: Buffer,
        weights: Buffer,
        weights_version: int = 0,
    ) -> bytes:
        """A StreamForwardRequest.  The buffers are of the form: nobody checks."""
        if self._write is not None:
            numbers = (1, request_id, layer, timeout_us, sent_us, weights_version)
            written: bytes = self._write(self._form, (*numbers, hidden, ids, weights, None, None, None))
            return written
        dtype, tensors = self._tensors
        x, i, w = (TensorView.of_raw(*t, data) for t, data in zip(tensors, (hidden, ids, weights), strict=True))
        view = ForwardRequestView(request_id, layer, x, i, w, timeout_us=timeout_us, output_dtype=dtype)
        view.output_form, view.sent_us, view.weights_version = pb.OUTPUT_FORM_TENSOR, sent_us, weights_version
        return encode_stream_request(view)


# ---- written by C++ --------------------------------------------------------------------------------------------------


def _request(r: ForwardRequestView, stream: bool) -> bytes | None:
    """None: it is for the generated classes."""
    lib, tensors = library(), (r.hidden_states, r.topk_ids, r.topk_weights)
    x, ids, weights = tensors
    if lib is None or not (_usual(x, scaled=True) and _usual(ids) and _usual(weights)):
        return None
    form = _form(r.output_dtype, r.output_form, r.router_weight_on_input, *map(_form_of, tensors))
    if form is None:
        return None
    written: bytes = lib.write_request(
        form,
        (
            stream,
            r.request_id,
            r.layer,
            r.timeout_us,
            r.sent_us,
            r.weights_version,
            *map(_data_of, tensors),
            x and x.scales and x.scales.raw,
            None if r.grouped is None else r.grouped.SerializeToString(),
            r.traceparent.encode(),
        ),
    )
    return written


def _response(r: ForwardResponseView, stream: bool) -> bytes | None:
    """As _request."""
    lib, x = library(), r.output
    if lib is None or not _usual(x, scaled=True):
        return None
    written: bytes = lib.write_response(
        (
            stream,
            r.request_id,
            r.routes_computed,
            r.placement_epoch,
            r.weights_version,
            *_form_of(x),
            _data_of(x),
            x and x.scales and x.scales.raw,
            *(None if part is None else part.SerializeToString() for part in (r.digest, r.timing, r.load)),
        )
    )
    return written


def _usual(t: TensorView | None, scaled: bool = False) -> bool:
    """scaled: it may have scales."""
    if t is None:
        return True
    if t.spelling == Spelling.NONE or len(t.shape) != 2 or t.dtype < 0:
        return False
    return t.scales is None or (scaled and t.scales.block > 0 and t.scales.floats is None)


def _data_of(t: TensorView | None) -> Buffer:
    if t is None or t.spelling == Spelling.RAW:
        return t and t.data
    return t.data.SerializeToString()


def _form_of(t: TensorView | None) -> tuple[int, ...]:
    """dtype, spelling, rows, columns, block of scales."""
    if t is None:
        return (0, 0, 0, 0, 0)
    return (t.dtype, t.spelling, *t.shape, 0 if t.scales is None else t.scales.block)


@lru_cache(maxsize=1024)
def _form(output_dtype: int, output_form: int, weight_on_input: bool, *tensors: tuple[int, ...]) -> bytes | None:
    """None: a number fits no field.  Cached: the tensors that one caller sends hardly differ."""
    numbers = (n for tensor in tensors for n in tensor)
    try:
        return REQUEST_FORM.pack(output_dtype, output_form, weight_on_input, *numbers)
    except struct.error:
        return None
