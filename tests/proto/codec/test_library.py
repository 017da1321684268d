"""The readers in C++ and what ctypes is told of them."""

from __future__ import annotations

import ctypes as C

import pytest

from expertd import codec
from expertd.codec import answers, decode, library
from expertd.v1 import expert_service_pb2 as pb


def test_structs_are_the_same_in_python_and_in_cpp() -> None:
    lib = library.library()
    assert lib is not None
    sizes = (C.c_uint64 * 8)()
    lib.sizes(sizes)
    structs = (library.RequestRead, library.ResponseRead, library.HeadRead)
    assert [size for size in sizes if size] == [*map(C.sizeof, structs), library.RAW_ANSWER.size]


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
