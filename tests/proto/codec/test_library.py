"""The readers and writers in C++ and what ctypes is told of them."""

from __future__ import annotations

import ctypes as C

import pytest

from expertd import codec
from expertd.codec import answers, decode, encode, library
from expertd.v1 import expert_service_pb2 as pb


def test_structs_are_the_same_in_python_and_in_cpp() -> None:
    lib = library.library()
    assert lib is not None
    sizes = (C.c_uint64 * 8)()
    lib.sizes(sizes)
    structs = (library.RequestRead, library.ResponseRead, library.HeadRead)
    packed = (library.RAW_ANSWER, library.REQUEST_FORM)
    assert [size for size in sizes if size] == [*map(C.sizeof, structs), *(form.size for form in packed)]


def test_without_the_library_the_generated_classes_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = codec.TensorView.of_raw(pb.DATA_TYPE_F16, (2, 8), bytes(range(32)))
    ids = codec.TensorView.of_raw(pb.DATA_TYPE_I32, (2, 1), bytes(8))
    request = codec.encode_stream_request(codec.ForwardRequestView(7, 3, x, ids, timeout_us=5, traceparent="00-a"))
    response = codec.encode_stream_response(
        codec.ForwardResponseView(7, x, None, 2, pb.Timing(queue_ns=1), pb.Load(queued_tokens=3))
    )
    want = codec.decode_stream_request(request), codec.decode_stream_response(response)
    assert isinstance(codec.AnswerReader().read(response), codec.RawAnswer)
    for module in (decode, answers):
        monkeypatch.setattr(module, "library", lambda: None)
    assert (codec.decode_stream_request(request), codec.decode_stream_response(response)) == want
    assert codec.AnswerReader().read(response) == want[1]
    assert codec.peek_forward(request) is None
    assert codec.peek_request_id(request, stream=True) == 0


def test_without_the_library_the_generated_classes_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = codec.TensorView.of_raw
    x = raw(pb.DATA_TYPE_E4M3, (2, 8), bytes(range(16)), codec.ScalesView(128, bytes(range(8))))
    ids, weights = raw(pb.DATA_TYPE_I32, (2, 1), bytes(8)), raw(pb.DATA_TYPE_F32, (2, 1), bytes(8))
    grouped = pb.GroupedRows(expert_ids=[3], row_counts=[2])
    values = [
        codec.ForwardRequestView(7, 3, x, ids, weights, None, 5, 3, 1, "00-a", True, 9, 2),
        codec.ForwardRequestView(7, 3, x, grouped=grouped),
    ]
    answer = codec.ForwardResponseView(7, x, pb.Digest(crc32=1), 2, pb.Timing(queue_ns=1), pb.Load(), 4, 2)
    want = [codec.encode_stream_request(value) for value in values], codec.encode_stream_response(answer)
    shapes = (pb.DATA_TYPE_F32, (2, 1)), (pb.DATA_TYPE_I32, (2, 1)), (pb.DATA_TYPE_F32, (2, 1))
    numbers_and_tensors = (7, 3, 5, 9, bytes(8), ids.raw, weights.raw, 2)
    short = codec.RequestForm(pb.DATA_TYPE_F32, *shapes).message(*numbers_and_tensors)
    monkeypatch.setattr(encode, "library", lambda: None)
    assert ([codec.encode_stream_request(value) for value in values], codec.encode_stream_response(answer)) == want
    assert codec.RequestForm(pb.DATA_TYPE_F32, *shapes).message(*numbers_and_tensors) == short


def test_what_the_writers_do_not_take_is_said_in_pythons_errors() -> None:
    form = codec.RequestForm(pb.DATA_TYPE_F32, *3 * [(pb.DATA_TYPE_F32, (1, 1))])
    tensors = 3 * (bytes(4),)
    for numbers, got in (((1 << 64, 0, 0, 0), 1 << 64), ((1, 1 << 32, 0, 0), 1 << 32), ((1, -1, 0, 0), -1)):
        with pytest.raises(ValueError, match=f"got {got}, want a number from 0 to"):
            form.message(*numbers, *tensors)
    with pytest.raises(TypeError):
        form.message("1", 0, 0, 0, *tensors)  # type: ignore[arg-type]
    with pytest.raises(BufferError, match="want contiguous"):
        form.message(1, 0, 0, 0, memoryview(bytes(8))[::2], *tensors[1:])
