"""The fast path: protobuf's wire format without its generated classes.

Messages with tensors are read by a field scanner that hands out memoryviews of the received bytes, and written by one
join of headers and buffers: each tensor is copied zero times on decode and once on encode.  Any gRPC client in any
language can be on the other side.

    value = decode_stream_request(data)         ForwardRequestView | CancelRequest | SessionOffer
    data = encode_stream_response(value)        ForwardResponseView | RequestError | SessionAnswer | Load

and the other two directions, and the unary messages alone.  Everything that is small (timing, load, errors, session)
is the generated class: for those, the C implementation behind it is faster than a scanner in Python.

What no serializer writes but protobuf allows (groups, a tensor in two pieces, hundreds of fields) is read by the
generated classes, with a copy.  A fuzz test holds reading to them: what they accept is accepted with equal values, what
they refuse is refused, always as MalformedMessageError.  The one difference: unknown groups that nest 97 to 100 deep
inside a small message are accepted here, where a generated class counts the messages around them.
"""

from expertd.codec.decode import (
    NO_MESSAGE,
    decode_forward_request,
    decode_forward_response,
    decode_stream_request,
    decode_stream_response,
    peek_forward,
    peek_request_id,
)
from expertd.codec.encode import (
    RequestForm,
    encode_forward_request,
    encode_forward_response,
    encode_stream_request,
    encode_stream_response,
)
from expertd.codec.usual import Told, UsualAnswer, UsualAnswers
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

__all__ = [
    "NO_MESSAGE",
    "ForwardHead",
    "ForwardRequestView",
    "ForwardResponseView",
    "RequestForm",
    "ScalesView",
    "Spelling",
    "StreamRequestView",
    "StreamResponseView",
    "TensorView",
    "Told",
    "UsualAnswer",
    "UsualAnswers",
    "decode_forward_request",
    "decode_forward_response",
    "decode_stream_request",
    "decode_stream_response",
    "encode_forward_request",
    "encode_forward_response",
    "encode_stream_request",
    "encode_stream_response",
    "peek_forward",
    "peek_request_id",
]
