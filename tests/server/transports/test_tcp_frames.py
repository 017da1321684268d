"""What a frame may hold: a request over TCP is answered as a message in Python is."""

import numpy as np
import pytest
from asked_kit import REQUESTS, changed, in_python
from core_library import needs_core
from listener_kit import H, K, batch, call
from tcp_kit import Twin, request

from expertd.codec import encode_stream_request
from expertd.errors import TABLE
from expertd.v1 import expert_service_pb2 as pb

pytestmark = [needs_core, pytest.mark.timeout(60)]


def over_tcp(peer, data):
    peer.send_bytes(data)
    said = peer.receive()
    if isinstance(said, pb.RequestError):
        return said.code, said.reason, said.retryable, said.message
    return bytes(said.output.raw)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_by_python(listener, engine, name):
    data = encode_stream_request(REQUESTS[name])
    want = in_python(engine, data)
    with Twin(listener) as peer:
        assert over_tcp(peer, data) == want
        call(peer, 8)  # and the session goes on


def test_what_has_no_form_here_is_refused_by_name(listener):
    with Twin(listener) as peer:
        grouped = changed(topk_ids=None, topk_weights=None, grouped=pb.GroupedRows(expert_ids=[0], row_counts=[3]))
        peer.send(grouped)
        assert peer.receive().reason == "UNSUPPORTED_COMBINATION"
        peer.send(changed(output_form=pb.OUTPUT_FORM_DIGEST))
        assert peer.receive().reason == "UNSUPPORTED_COMBINATION"
        drawn = pb.StreamForwardRequest(forward=pb.ForwardRequest(request_id=3))
        drawn.forward.hidden_states.dtype = pb.DATA_TYPE_F32
        drawn.forward.hidden_states.shape.extend([3, H])
        drawn.forward.hidden_states.synthetic.seed = 1
        peer.send_bytes(drawn.SerializeToString())
        assert peer.receive().reason == "BAD_TENSOR_SPELLING"
        peer.send_bytes(pb.StreamForwardRequest(session=pb.SessionOffer()).SerializeToString())
        assert (said := peer.receive()).reason == "MALFORMED_MESSAGE"
        assert said.request_id == 0
        call(peer, 9)


def test_serializers_may_spell_a_message_otherwise(listener):
    """Fields in another order, shapes that are not packed, fields that nobody knows."""
    x, ids, w = batch()
    message = pb.StreamForwardRequest.FromString(encode_stream_request(request(5, x, ids, w)))

    def field(number, data):
        return bytes([number << 3 | 2]) + _varint(len(data)) + data

    parts = []
    for number, name in ((5, "topk_weights"), (4, "topk_ids"), (3, "hidden_states")):
        t = getattr(message.forward, name)
        shape = b"".join(b"\x10" + _varint(n) for n in t.shape)
        parts.append(field(number, b"\xa2\x06\x01x" + field(3, t.raw) + shape + b"\x08" + _varint(t.dtype)))
    data = field(1, b"".join(parts) + b"\xa2\x06\x03new" + b"\x08\x05")
    with Twin(listener) as peer:
        peer.send_bytes(data)
        answer = peer.receive()
        assert np.array_equal(np.frombuffer(answer.output.raw, np.float32).reshape(3, H), 3 * x)


def _varint(n):
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


@pytest.mark.parametrize("lead", [0, 1, 63, 64, 70, 2**32 - 1])
def test_a_lead_is_a_hint(listener, lead):
    x, ids, w = batch()
    with Twin(listener) as peer:
        peer.send_bytes(encode_stream_request(request(1, x, ids, w)), lead=lead)
        assert peer.receive().routes_computed == 3 * K


def test_every_reason_travels_as_its_row(listener):
    """Code and retryable of an error are those of the table."""
    with Twin(listener) as peer:
        peer.send(changed(layer=3))
        said = peer.receive()
        row = TABLE["LAYER_NOT_HELD"]
        assert (said.code, said.retryable, said.request_id) == (int(row.code), row.retryable, 7)
