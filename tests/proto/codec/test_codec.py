"""The wire codec by hand: what is zero-copy, what is refused and how, and the limits of nesting and number."""

from __future__ import annotations

from array import array
from itertools import product
from typing import Any

import pytest

from expertd import codec
from expertd.codec import decode
from expertd.codec.scan import OddError, size
from expertd.errors import MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

ALIGNED_BYTES, PADDED_BYTES = 16, 16 << 10  # csrc/write.h


def request(**changes: Any) -> codec.ForwardRequestView:
    values: dict[str, Any] = {
        "request_id": 300,
        "layer": 3,
        "hidden_states": codec.TensorView.of_raw(pb.DATA_TYPE_BF16, (2, 4), bytes(range(16))),
        "topk_ids": codec.TensorView.of_raw(pb.DATA_TYPE_I32, (2, 1), bytes(8)),
        "topk_weights": codec.TensorView.of_raw(pb.DATA_TYPE_F32, (2, 1), bytes(8)),
        "timeout_us": 5000,
        "sent_us": 1 << 40,
    }
    return codec.ForwardRequestView(**(values | changes))


def test_decoding_shares_the_memory_of_the_message() -> None:
    data = codec.encode_stream_request(request())
    got = codec.decode_stream_request(data)
    assert isinstance(got, codec.ForwardRequestView)
    assert got.hidden_states is not None
    assert got.hidden_states.raw.obj is data
    assert bytes(got.hidden_states.raw) == bytes(range(16))


@pytest.mark.parametrize(
    "buffer",
    [bytes(range(16)), bytearray(range(16)), memoryview(bytes(range(16))), array("B", range(16)), array("i", [7] * 4)],
    ids=lambda b: type(b).__name__,
)
def test_encoding_takes_any_buffer(buffer: Any) -> None:
    tensor = codec.TensorView.of_raw(pb.DATA_TYPE_BF16, (2, 4), buffer)
    response = codec.ForwardResponseView(7, tensor, routes_computed=2)
    message = pb.ForwardResponse.FromString(codec.encode_forward_response(response))
    assert message.output.raw == bytes(buffer)
    assert (message.request_id, message.routes_computed) == (7, 2)
    got = codec.decode_forward_response(codec.encode_forward_response(response))
    assert got.output is not None
    assert bytes(got.output.raw) == bytes(buffer)


def test_encoding_takes_numpy_and_refuses_what_is_not_contiguous() -> None:
    numpy = pytest.importorskip("numpy")
    x = numpy.arange(8, dtype=numpy.float32).reshape(2, 4)
    data = codec.encode_forward_request(request(hidden_states=codec.TensorView.of_raw(pb.DATA_TYPE_F32, (2, 4), x)))
    assert pb.ForwardRequest.FromString(data).hidden_states.raw == x.tobytes()
    with pytest.raises(BufferError, match="want contiguous"):
        codec.encode_forward_request(request(hidden_states=codec.TensorView.of_raw(pb.DATA_TYPE_F32, (4, 2), x.T)))


def test_empty_request_and_empty_tensor() -> None:
    assert codec.decode_forward_request(b"") == codec.ForwardRequestView()
    assert codec.encode_forward_request(codec.ForwardRequestView()) == b""
    empty = request(hidden_states=codec.TensorView.of_raw(pb.DATA_TYPE_BF16, (0, 4), b""))
    got = codec.decode_forward_request(codec.encode_forward_request(empty))
    assert got.hidden_states is not None
    assert (got.hidden_states.spelling, got.hidden_states.shape) == (codec.Spelling.RAW, (0, 4))
    none = codec.decode_forward_request(b"\x1a\x00")
    assert none.hidden_states == codec.TensorView()


def test_stream_message_without_a_kind() -> None:
    assert codec.decode_stream_request(b"") is None
    assert codec.decode_stream_response(b"") is None
    assert codec.decode_stream_response(b"\xca\x3e\x01x") is None  # a kind that only a newer server knows


def test_stream_kinds_are_told_apart_by_their_type() -> None:
    requests = [request(), pb.CancelRequest(request_id=4), pb.SessionOffer(transports=["shm"])]
    answers = [
        codec.ForwardResponseView(1, timing=pb.Timing(kernel_ns=5), load=pb.Load(), digest=pb.Digest(crc32=1)),
        pb.RequestError(request_id=1, reason="X"),
        pb.SessionAnswer(token="t"),
        pb.Load(draining=True),
    ]
    for value in requests:
        assert codec.decode_stream_request(codec.encode_stream_request(value)) == value  # type: ignore[arg-type]
    for value in answers:
        assert codec.decode_stream_response(codec.encode_stream_response(value)) == value  # type: ignore[arg-type]


def test_spellings() -> None:
    floats = codec.TensorView(pb.DATA_TYPE_F32, (2,), codec.Spelling.FLOATS, pb.FloatValues(values=[1.0, 2.0]))
    ints = codec.TensorView(pb.DATA_TYPE_I32, (2,), codec.Spelling.INTS, pb.IntValues(values=[1, -1]))
    drawn = codec.TensorView(pb.DATA_TYPE_F32, (2,), codec.Spelling.SYNTHETIC, pb.SyntheticValues(seed=3))
    got = codec.decode_forward_request(
        codec.encode_forward_request(request(hidden_states=floats, topk_ids=ints, topk_weights=drawn))
    )
    assert got.hidden_states is not None
    assert got.topk_ids is not None
    assert got.topk_weights is not None
    assert list(got.hidden_states.floats) == [1.0, 2.0]
    assert list(got.topk_ids.ints) == [1, -1]
    assert got.topk_weights.synthetic.seed == 3


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x08",  # it ends inside a field
        b"\x1a\x05\x08\x03",  # a field of more bytes than are left
        b"\x1a\xff\xff\xff\xff\x0f",
        b"\x1a" + b"\xff" * 9 + b"\x01",
        b"\x08" + b"\xff" * 10 + b"\x01",  # a varint of more than 10 bytes
        b"\x00\x01",  # field number 0
        b"\x0f",  # wire type 7
        b"\x0c",  # the end of a group that did not begin
        b"\x52\x02\xc3\x28",  # a text that is no UTF-8
        b"\x1a\x02\x08\x80\x10\x00",  # a varint that reaches past its tensor
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        codec.decode_forward_request(data)
    assert str(caught.value) == codec.NO_MESSAGE.format(message="ForwardRequest")
    assert caught.value.request_id == 0


def test_a_broken_message_on_a_stream_still_tells_whose_it_is() -> None:
    whole = codec.encode_stream_request(request())
    for stop in range(6, len(whole)):
        with pytest.raises(MalformedMessageError) as caught:
            codec.decode_stream_request(whole[:stop])
        assert caught.value.request_id == 300
    assert codec.peek_request_id(codec.encode_forward_request(request()), stream=False) == 300
    assert codec.peek_request_id(codec.encode_stream_request(pb.CancelRequest(request_id=9)), stream=True) == 9
    assert codec.peek_request_id(b"\x1a\x05", stream=True) == 0


def test_the_head_of_a_request_is_found_without_reading_the_rest() -> None:
    whole = request(layer=3, timeout_us=250_000, sent_us=1 << 40)
    assert whole.hidden_states is not None
    assert whole.topk_ids is not None
    found = codec.peek_forward(codec.encode_stream_request(whole))
    shapes = (whole.hidden_states.shape[0], whole.topk_ids.shape[1])
    assert found == codec.ForwardHead(300, 3, *shapes, 250_000, 1 << 40)
    assert codec.peek_forward(codec.encode_stream_request(codec.ForwardRequestView(request_id=9))) == (9, 0, 1, 1, 0, 0)
    for other in (
        b"",
        b"\x0a",
        b"\x0a\x05\x08",
        codec.encode_stream_request(pb.CancelRequest(request_id=9)),
    ):
        assert codec.peek_forward(other) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"request_id": -1},
        {"request_id": 1 << 64},
        {"layer": 1 << 32},
        {"timeout_us": 1 << 64},
        {"sent_us": 1 << 64},
        {"output_dtype": 1 << 31},
        {"output_dtype": -(1 << 31) - 1},
    ],
)
def test_numbers_that_do_not_fit_are_not_encoded(broken: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(broken.values())))):
        codec.encode_forward_request(request(**broken))


def test_the_largest_numbers_that_fit_are_encoded() -> None:
    most: dict[str, int] = {"request_id": (1 << 64) - 1, "layer": (1 << 32) - 1, "timeout_us": (1 << 64) - 1}
    most |= {"sent_us": (1 << 64) - 1, "output_dtype": (1 << 31) - 1, "output_form": -(1 << 31)}
    seen = codec.decode_forward_request(codec.encode_forward_request(request(**most)))
    assert {name: getattr(seen, name) for name in most} == most


@pytest.mark.parametrize("broken", [{"request_id": 1 << 64}, {"routes_computed": 1 << 64}, {"placement_epoch": -1}])
def test_numbers_of_an_answer_that_do_not_fit_are_not_encoded(broken: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(broken.values())))):
        codec.encode_forward_response(codec.ForwardResponseView(**broken))


# ---- who reads what --------------------------------------------------------------------------------------------------


def test_usual_messages_are_read_in_cpp() -> None:
    assert decode._request(codec.encode_stream_request(request()), stream=True)
    for nbytes in (0, 1, 127, 128, 16383, 16384, 100_000, 1 << 21, 3 << 20):  # sizes of one to four bytes
        sized = request(hidden_states=codec.TensorView.of_raw(pb.DATA_TYPE_BF16, (1, nbytes // 2), bytes(nbytes)))
        assert decode._request(codec.encode_stream_request(sized), stream=True) == sized
    grouped = pb.ForwardRequest(grouped=pb.GroupedRows(expert_ids=[1])).SerializeToString()
    assert decode._request(grouped, stream=False) == codec.decode_forward_request(grouped)
    response = codec.ForwardResponseView(1, request().hidden_states, None, 2, pb.Timing(), pb.Load(), 1)
    assert decode._response(codec.encode_stream_response(response), stream=True) == response


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x02\x08\x01\x1a\x02\x10\x05",  # hidden_states in two pieces
        b"\x7b\x08\x01\x7c",  # an unknown group
        b"\x08\x01" * 65,  # the same field again and again
    ],
    ids=["pieces", "group", "many fields"],
)
def test_what_nobody_sends_is_read_by_the_generated_classes(data: bytes) -> None:
    """Legal, but not worth a scanner: and a flood of tiny fields must not keep the interpreter busy."""
    assert decode._request(data, stream=False) is None
    got = codec.decode_forward_request(data)
    message = pb.ForwardRequest.FromString(data)
    assert got.request_id == message.request_id
    if message.HasField("hidden_states"):
        assert got.hidden_states is not None
        assert (got.hidden_states.dtype, got.hidden_states.shape) == (
            message.hidden_states.dtype,
            tuple(message.hidden_states.shape),
        )


@pytest.mark.parametrize("depth", [99, 100, 101, 100_000])
def test_nested_groups_end_where_the_generated_classes_say(depth: int) -> None:
    data = b"\x7b" * depth + b"\x7c" * depth
    if depth <= 100:
        assert codec.decode_forward_request(data) == codec.ForwardRequestView()
    else:
        with pytest.raises(MalformedMessageError):
            codec.decode_forward_request(data)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16383, 16384])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_size_reaches_to_the_end_of_its_message_and_not_a_byte_further(length: int, more: int) -> None:
    """Bytes lie behind the message: what reads one too many finds one."""
    head, n = b"", length
    while n >= 0x80:
        head += bytes((n & 0x7F | 0x80,))
        n >>= 7
    head += bytes((n,))
    buf = head + bytes(length + 8)
    end = len(head) + length + more
    if more < 0:
        with pytest.raises(OddError, match=f"a field of {length} bytes"):
            size(buf, 0, end)
    else:
        assert size(buf, 0, end) == (len(head), len(head) + length)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("answer", [False, True])
def test_elements_of_a_large_first_tensor_are_aligned_whatever_stands_before(wrapped: bool, answer: bool) -> None:
    """So that who receives the message reads them without a copy."""
    seen = set()
    for n in range(40):
        request_id = (1 << n) - 1
        for size_ in (PADDED_BYTES, (1 << 21) - 40 + n, 3 << 20):
            tensor = codec.TensorView.of_raw(pb.DATA_TYPE_F32, (size_, n + 1), bytes([7]) * size_)
            if answer:
                value: Any = codec.ForwardResponseView(
                    request_id, tensor, routes_computed=2, timing=pb.Timing(queue_ns=1)
                )
                data = (codec.encode_stream_response if wrapped else codec.encode_forward_response)(value)
                got: Any = (codec.decode_stream_response if wrapped else codec.decode_forward_response)(data)
                plain: Any = (pb.StreamForwardResponse if wrapped else pb.ForwardResponse).FromString(data)
            else:
                value = request(request_id=request_id, hidden_states=tensor)
                data = (codec.encode_stream_request if wrapped else codec.encode_forward_request)(value)
                got = (codec.decode_stream_request if wrapped else codec.decode_forward_request)(data)
                plain = (pb.StreamForwardRequest if wrapped else pb.ForwardRequest).FromString(data)
            assert got == value
            plain = plain.forward if wrapped else plain
            seen.add(len(plain.padding))
            plain.padding = b""
            like = (pb.ForwardResponse if answer else pb.ForwardRequest).FromString(
                codec.encode_forward_response(value) if answer else codec.encode_forward_request(value)
            )
            like.padding = b""
            assert plain == like
            assert data.index(bytes([7]) * 64) % ALIGNED_BYTES == 0, (n, size_)
    assert len(seen) > 5


def test_padding_is_a_field_of_every_length_but_one() -> None:
    seen = set()
    for id_bits, layer_bits, rows in product(range(0, 64, 7), range(0, 32, 7), (1, 300)):
        tensor = codec.TensorView.of_raw(pb.DATA_TYPE_F32, (rows, 1), bytes(PADDED_BYTES))
        value = codec.ForwardRequestView((1 << id_bits) - 1, (1 << layer_bits) - 1, tensor)
        data = codec.encode_forward_request(value)
        message = pb.ForwardRequest.FromString(data)
        assert not any(message.padding)
        message.ClearField("padding")
        seen.add(len(data) - len(message.SerializeToString()))
    assert seen == {0, 17, *range(2, ALIGNED_BYTES)}


def test_a_small_message_has_no_padding() -> None:
    data = codec.encode_forward_request(request())
    assert pb.ForwardRequest.FromString(data).padding == b""
    assert data == pb.ForwardRequest.FromString(data).SerializeToString()
