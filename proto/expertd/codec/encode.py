"""Values to bytes: what the generated classes would write, with each tensor copied once.

A message is the join of small headers and the tensors' own buffers: one allocation of the final size.  Fields stand in
the order of their numbers and defaults are left out, as in every protobuf serializer, but for padding, which stands
before the first tensor.
"""

from __future__ import annotations

from functools import lru_cache
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
    "RequestForm",
    "encode_forward_request",
    "encode_forward_response",
    "encode_stream_request",
    "encode_stream_response",
    "tensor_head",
]

ALIGNED_BYTES = 16
"""Where a bytes object's memory begins, and what the engine's core reads in place."""
PADDED_BYTES = 16 << 10
"""A message from this size on is worth the padding: less is copied in a microsecond."""


def encode_forward_request(request: ForwardRequestView) -> bytes:
    """A ForwardRequest.  Raises ValueError for a number that its field cannot hold, BufferError for a tensor whose
    memory is not contiguous or has a type that the buffer protocol does not know (numpy: view it as uint8)."""
    parts, size = _request(request)
    _align(parts, size, wrapped=False)
    return b"".join(parts)


def encode_forward_response(response: ForwardResponseView) -> bytes:
    """A ForwardResponse.  Raises as above."""
    parts, size = _response(response)
    _align(parts, size, wrapped=False)
    return b"".join(parts)


def encode_stream_request(value: StreamRequestView) -> bytes:
    """A StreamForwardRequest that holds `value`.  Raises as above."""
    if isinstance(value, ForwardRequestView):
        parts, size = _request(value)
        size += _align(parts, size, wrapped=True)
        parts[0] = b"\x0a" + _varint(size)
        return b"".join(parts)
    if isinstance(value, pb.CancelRequest):
        return pb.StreamForwardRequest(cancel=value).SerializeToString()
    return pb.StreamForwardRequest(session=value).SerializeToString()


def encode_stream_response(value: StreamResponseView) -> bytes:
    """A StreamForwardResponse that holds `value`.  Raises as above."""
    if isinstance(value, ForwardResponseView):
        parts, size = _response(value)
        size += _align(parts, size, wrapped=True)
        parts[0] = b"\x0a" + _varint(size)
        return b"".join(parts)
    if isinstance(value, pb.RequestError):
        return pb.StreamForwardResponse(error=value).SerializeToString()
    if isinstance(value, pb.SessionAnswer):
        return pb.StreamForwardResponse(session=value).SerializeToString()
    return pb.StreamForwardResponse(load=value).SerializeToString()


class RequestForm:
    """What is the same in all requests whose answer is a tensor of one dtype and whose three tensors are raw and have
    these DataTypes, shapes and numbers of bytes: a message is then written in few steps.  For any thread."""

    __slots__ = ("_heads", "_options", "_size")

    def __init__(self, output_dtype: int, *tensors: tuple[int, tuple[int, ...], int]) -> None:
        self._heads = [
            tensor_head(tag, dtype, shape, Spelling.RAW, nbytes, 0)
            for tag, (dtype, shape, nbytes) in zip((0x1A, 0x22, 0x2A), tensors, strict=True)
        ]
        options = bytearray()
        _enum(options, 0x40, output_dtype)
        _enum(options, 0x48, pb.OUTPUT_FORM_TENSOR)
        self._options = bytes(options)
        self._size = sum(map(len, self._heads)) + sum(nbytes for *_, nbytes in tensors)

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
        """A StreamForwardRequest.  The buffers are of the form, the numbers fit their fields and request_id is not 0:
        nobody checks."""
        hidden_head, ids_head, weights_head = self._heads
        head = b"\x08" + _varint(request_id)
        if layer:
            head += b"\x10" + _varint(layer)
        tail = self._options
        if timeout_us:
            tail = b"\x38" + _varint(timeout_us) + tail
        if sent_us:
            tail += b"\x60" + _varint(sent_us)
        if weights_version:
            tail += b"\x68" + _varint(weights_version)
        length = len(head) + self._size + len(tail)
        if length >= PADDED_BYTES:
            added = _padding(len(head) + len(hidden_head), length, wrapped=True)
            head += added
            length += len(added)
        before = b"\x0a" + _varint(length)
        return b"".join((before, head, hidden_head, hidden, ids_head, ids, weights_head, weights, tail))


def _request(r: ForwardRequestView) -> tuple[list[Buffer], int]:
    """(parts, their bytes); the first part is empty: the place of a wrapper's header."""
    head = bytearray()
    _scalar(head, 0x08, r.request_id, 64)
    _scalar(head, 0x10, r.layer, 32)
    parts: list[Buffer] = [b"", head]
    size = len(head)
    if r.hidden_states is not None:
        size += _tensor(parts, 0x1A, r.hidden_states)
    if r.topk_ids is not None:
        size += _tensor(parts, 0x22, r.topk_ids)
    if r.topk_weights is not None:
        size += _tensor(parts, 0x2A, r.topk_weights)
    tail = bytearray()
    if r.grouped is not None:
        _message(tail, 0x32, r.grouped)
    _scalar(tail, 0x38, r.timeout_us, 64)
    _enum(tail, 0x40, r.output_dtype)
    _enum(tail, 0x48, r.output_form)
    if r.traceparent:
        text = r.traceparent.encode()
        tail.append(0x52)
        tail += _varint(len(text)) + text
    if r.router_weight_on_input:
        tail += b"\x58\x01"
    _scalar(tail, 0x60, r.sent_us, 64)
    _scalar(tail, 0x68, r.weights_version, 64)
    parts.append(tail)
    return parts, size + len(tail)


def _response(r: ForwardResponseView) -> tuple[list[Buffer], int]:
    """As _request."""
    head = bytearray()
    _scalar(head, 0x08, r.request_id, 64)
    parts: list[Buffer] = [b"", head]
    size = len(head)
    if r.output is not None:
        size += _tensor(parts, 0x12, r.output)
    tail = bytearray()
    if r.digest is not None:
        _message(tail, 0x1A, r.digest)
    _scalar(tail, 0x20, r.routes_computed, 64)
    if r.timing is not None:
        _message(tail, 0x2A, r.timing)
    if r.load is not None:
        _message(tail, 0x32, r.load)
    _scalar(tail, 0x38, r.placement_epoch, 64)
    _scalar(tail, 0x40, r.weights_version, 64)
    parts.append(tail)
    return parts, size + len(tail)


def _align(parts: list[Buffer], size: int, wrapped: bool) -> int:
    """Puts padding before the first tensor where its data are many, so that they come to stand at a multiple of
    ALIGNED_BYTES in the message, and so in memory wherever a bytes object holds it.  Returns the bytes added.

    parts, size: as _request and _response make them.  wrapped: a header with the size comes before."""
    if size < PADDED_BYTES or len(parts) < 5:  # no tensor
        return 0
    head = parts[1]
    assert isinstance(head, bytearray)
    added = _padding(len(head) + len(parts[2]), size, wrapped)
    head += added
    return len(added)


def _padding(lead: int, size: int, wrapped: bool) -> bytes:
    """The field after which data that would stand behind `lead` bytes of a message of `size` are at such a place."""
    return _PADDING[-(lead + (1 + len(_varint(size + ALIGNED_BYTES)) if wrapped else 0)) % ALIGNED_BYTES]


def _tensor(parts: list[Buffer], tag: int, t: TensorView) -> int:
    """Appends a Tensor field to parts; returns its bytes, tag and size included."""
    data: Buffer = t.data
    if t.spelling == Spelling.RAW:
        data_size = len(data) if isinstance(data, bytes) else _nbytes(data)
    elif t.spelling == Spelling.NONE:
        data, data_size = b"", 0
    else:
        data = data.SerializeToString()
        data_size = len(data)
    scales = b"" if t.scales is None else _scales(t.scales)
    head = tensor_head(tag, t.dtype, t.shape, t.spelling, data_size, len(scales))
    parts.append(head)
    parts.append(data)
    if scales:
        parts.append(scales)
    return len(head) + data_size + len(scales)


def _nbytes(data: Buffer) -> int:
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError(
            f"tensor: got strides {view.strides} for shape {view.shape}, want contiguous row-major memory"
        )
    return view.nbytes


@lru_cache(maxsize=1024)
def tensor_head(tag: int, dtype: int, shape: tuple[int, ...], spelling: int, data_size: int, scales_size: int) -> bytes:
    """What stands before the data: tag and size of the tensor, dtype, shape, tag and size of the data.  Cached: the
    tensors that one caller sends hardly differ."""
    body = bytearray()
    _enum(body, 0x08, dtype)
    if shape:
        packed = b"".join([_varint(_checked(extent, 32)) for extent in shape])
        body.append(0x12)
        body += _varint(len(packed)) + packed
    if spelling != Spelling.NONE:
        body.append(spelling << 3 | 2)
        body += _varint(data_size)
    return bytes((tag,)) + _varint(len(body) + data_size + scales_size) + bytes(body)


def _scales(s: ScalesView) -> bytes:
    raw = bytes(s.raw)
    body = bytearray()
    _scalar(body, 0x08, s.block, 32)
    if raw:
        body.append(0x12)
        body += _varint(len(raw)) + raw
    if s.floats is not None:
        _message(body, 0x1A, s.floats)
    return b"\x3a" + _varint(len(body)) + bytes(body)


def _scalar(out: bytearray, tag: int, value: int, bits: int) -> None:
    if value:
        out.append(tag)
        if 0 < value < 0x80:
            out.append(value)
        else:
            out += _varint(_checked(value, bits))


def _enum(out: bytearray, tag: int, value: int) -> None:
    if value:
        out.append(tag)
        if 0 < value < 0x80:
            out.append(value)
        elif -(1 << 31) <= value < 1 << 31:
            out += _varint(value & 0xFFFFFFFFFFFFFFFF)  # negative numbers of 32 bits travel as 64
        else:
            raise ValueError(f"enum value: got {value}, want a signed number of 32 bits")


def _message(out: bytearray, tag: int, message: Any) -> None:
    data = message.SerializeToString()
    out.append(tag)
    out += _varint(len(data)) + data


def _checked(value: int, bits: int) -> int:
    if 0 <= value < 1 << bits:
        return value
    raise ValueError(f"field value: got {value}, want a number from 0 to 2^{bits} - 1")


def _varint(value: int) -> bytes:
    """value >= 0 as a varint."""
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_PADDING = [b"", *(bytes((0x7A, n - 2)) + bytes(n - 2) for n in (17, *range(2, ALIGNED_BYTES)))]
"""The field of as many bytes as its place in this list says, modulo ALIGNED_BYTES: one byte alone is no field."""
_ONE_BYTE = [bytes((value,)) for value in range(0x80)]
