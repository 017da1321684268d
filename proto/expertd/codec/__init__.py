"""Messages with tensors: values of Python to bytes and back, without copies on reading and with one on writing.

    value = decode_stream_request(data)         ForwardRequestView | CancelRequest | SessionOffer
    data = encode_stream_response(value)        ForwardResponseView | RequestError | SessionAnswer | Load

and the other two directions, and the unary messages alone.  Any gRPC client in any language can be on the other side.

ForwardRequest and ForwardResponse have one reader (csrc/messages.h) and one writer (csrc/write.h) in C++, which the
server's core and the client of TCP sessions include, too.  The generated classes of protobuf read and write what is
small (timing, load, errors, session, typed values), and messages that are unusual: what no serializer writes but
protobuf allows, tensors of one or three extents.  A fuzz test holds both to them.  What they accept is accepted with
equal values, what they refuse is refused, always as MalformedMessageError, and what is written has their bytes.
"""

from expertd.codec.answers import AnswerReader, RawAnswer, ServerReport
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
    "AnswerReader",
    "ForwardHead",
    "ForwardRequestView",
    "ForwardResponseView",
    "RawAnswer",
    "RequestForm",
    "ScalesView",
    "Spelling",
    "StreamRequestView",
    "StreamResponseView",
    "TensorView",
    "ServerReport",
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
