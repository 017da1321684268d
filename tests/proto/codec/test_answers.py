"""The short ways for the two messages of every request, held to the codec's: the same bytes, the same values, and where
bytes are broken nothing that the codec does not say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.codec import (
    AnswerReader,
    ForwardRequestView,
    ForwardResponseView,
    RawAnswer,
    RequestForm,
    TensorView,
    decode_stream_response,
    encode_stream_request,
    encode_stream_response,
)
from expertd.errors import BadResponseError, ExpertdError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb

NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
BF16, I32, F32 = pb.DATA_TYPE_BF16, pb.DATA_TYPE_I32, pb.DATA_TYPE_F32


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 3000),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    NUMBERS,
    NUMBERS,
    NUMBERS,
)
def test_a_request_has_the_codecs_bytes(tokens, hidden, request_id, layer, timeout_us, sent_us, version):
    rng = np.random.default_rng(tokens * 3001 + hidden)
    x, ids, w = rng.bytes(tokens * hidden * 2), rng.bytes(tokens * 8), rng.bytes(tokens * 8)
    form = RequestForm(BF16, (BF16, (tokens, hidden)), (I32, (tokens, 2)), (F32, (tokens, 2)))
    view = ForwardRequestView(
        request_id,
        layer,
        TensorView.of_raw(BF16, (tokens, hidden), x),
        TensorView.of_raw(I32, (tokens, 2), ids),
        TensorView.of_raw(F32, (tokens, 2), w),
        timeout_us=timeout_us,
        output_dtype=BF16,
        output_form=pb.OUTPUT_FORM_TENSOR,
        sent_us=sent_us,
        weights_version=version,
    )
    assert form.message(request_id, layer, timeout_us, sent_us, x, ids, w, version) == encode_stream_request(view)


def answer(tokens=2, hidden=5, request_id=300, routes=16, backend="cpu", version=0):
    raw = np.random.default_rng(hidden).bytes(tokens * hidden * 2)
    timing = pb.Timing(queue_ns=1, kernel_ns=70_000, batch_tokens=tokens, backend=backend)
    load = pb.Load(queued_tokens=9)
    output = TensorView.of_raw(BF16, (tokens, hidden), raw)
    return ForwardResponseView(request_id, output, None, routes, timing, load, weights_version=version)


@pytest.mark.parametrize("version", [1, 300, 2**64 - 1])
def test_an_answer_with_a_version_is_read_the_short_way(version):
    answers, data = AnswerReader(), encode_stream_response(answer(version=version))
    answers.read(encode_stream_response(answer()))
    found = answers.read(data)
    assert isinstance(found, RawAnswer)
    assert found.weights_version == version
    assert found.view() == decode_stream_response(data) == answer(version=version)


def read(data, first):
    """`data` read by a reader that has seen `first`; an answer as the codec gives it."""
    answers = AnswerReader()
    answers.read(encode_stream_response(first))
    found = answers.read(data)
    return found.view() if isinstance(found, RawAnswer) else found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 9), st.integers(1, 3000), NUMBERS, NUMBERS)
def test_an_answer_has_the_codecs_values(tokens, hidden, request_id, routes):
    one = answer(tokens, hidden, request_id, routes)
    data = encode_stream_response(one)
    assert read(data, one) == decode_stream_response(data) == one


def test_an_answer_is_read_the_short_way():
    answers = AnswerReader()
    small, large = encode_stream_response(answer()), encode_stream_response(answer(9, 2000))
    assert [type(answers.read(data)) for data in (small, large, small)] == [RawAnswer] * 3


@pytest.mark.parametrize("padding", [b"\x7a\x00", b"\x7a\x05" + bytes(5), b"\x7a\x7f" + bytes(127)])
def test_padding_may_stand_behind_everything(padding):
    """Where a server fixes an answer's size before it knows what stands behind the output."""
    one = answer(9, 2000)
    whole = encode_stream_response(one)
    inner = whole[4:] + padding
    size = len(inner)
    data = b"\x0a" + bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14)) + inner
    answers = AnswerReader()
    answers.read(whole)
    found = answers.read(data)
    assert isinstance(found, RawAnswer)
    assert found.view() == decode_stream_response(data) == one
    with pytest.raises(MalformedMessageError):
        answers.read(data[:-1])
    other = answers.read(data[:-1] + b"\x01") if len(padding) > 2 else found
    assert isinstance(other, RawAnswer), "what it holds means nothing"


@pytest.mark.parametrize(
    "other",
    [
        pb.RequestError(request_id=3, reason="BUSY"),
        pb.SessionAnswer(token="t"),
        pb.Load(queued_tokens=1),
        ForwardResponseView(1, TensorView.of_raw(F32, (2, 5), bytes(40)), None, 3, pb.Timing(), pb.Load()),
        ForwardResponseView(1, TensorView.of_raw(BF16, (2, 5), bytes(20)), None, 3, pb.Timing(queue_ns=1), None),
        ForwardResponseView(1, TensorView.of_raw(BF16, (2, 5), bytes(20)), None, 3, None, pb.Load(queued_tokens=1)),
        ForwardResponseView(1, None, pb.Digest(crc32=5), 3, pb.Timing(), pb.Load()),
        ForwardResponseView(
            1, TensorView.of_raw(BF16, (2, 5), bytes(20)), None, 3, pb.Timing(queue_ns=1), pb.Load(queued_tokens=1), 7
        ),
        answer(backend="x" * 150),
    ],
)
def test_what_is_not_as_usual_goes_by_the_codec(other):
    data = encode_stream_response(other)
    assert read(data, answer()) == decode_stream_response(data) == other


def test_a_message_without_a_kind_is_none():
    assert read(b"", answer()) is None


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_broken_bytes_are_what_the_codec_says(data):
    one = answer()
    whole = bytearray(encode_stream_response(one))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(whole) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "insert", "remove"]))
        if how == "set":
            whole[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del whole[max(1, at) :]
        elif how == "insert":
            whole[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif len(whole) > 1:
            del whole[at]
    broken = bytes(whole)
    try:
        want = decode_stream_response(broken)
    except ExpertdError as refusal:
        with pytest.raises((type(refusal), BadResponseError)):
            read(broken, one)
    else:
        assert read(broken, one) == want


def test_a_broken_timing_is_found_when_somebody_asks():
    data = bytearray(encode_stream_response(answer()))
    at = bytes(data).rindex(b"cpu") - 2
    data[at] = 0x07  # a field number 0
    answers = AnswerReader()
    answers.read(encode_stream_response(answer()))
    found = answers.read(bytes(data))
    assert isinstance(found, RawAnswer)
    assert found.report.load() == pb.Load(queued_tokens=9)
    with pytest.raises(BadResponseError, match="answer: got bytes that are no Timing"):
        found.report.timing()
