"""A request as a submission: what it says, where its tensors lie, and that two of one form share nothing."""

from __future__ import annotations

import ctypes as C

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd.errors import BadResponseError
from expertd.shm.layout import ROUTER_WEIGHT_ON_INPUT, Completion, Tensors
from expertd_client import Request
from expertd_client.transports.message import Prepared, sendable, submission_of, timing_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def batch(tokens=3, hidden=8, top_k=2):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    return x, rng.integers(0, 9, (tokens, top_k)).astype(np.int32), rng.random((tokens, top_k), np.float32) + 0.5


def bytes_at(tensors, name):
    address = C.c_void_p.from_buffer(tensors, getattr(Tensors, name).offset).value
    return C.string_at(address, getattr(tensors, name + "_bytes"))


@pytest.mark.parametrize("tokens", [1, 3, 2000])  # few bytes are copied, many stay where they are
@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids, w: (x, ids, w),
        lambda x, ids, w: (x.astype(ml_dtypes.bfloat16), ids.astype(np.int64), w.astype(np.float16)),
        lambda x, ids, w: (x.astype(">f4"), ids.astype(">i4"), w.astype(">f4")),
        lambda x, ids, w: (np.repeat(x, 2, 1)[:, ::2], ids[::-1][::-1], np.asfortranarray(w)),
        lambda x, ids, w: tuple(map(torch.from_numpy, (x, ids, w))),
    ],
)
def test_tensors_are_found_where_they_are_said_to_lie(tokens, change):
    r = Request(4, *change(*batch(tokens)))
    sent, view = submission_of(r), r.view(1, 0)
    for name, tensor in (("hidden", view.hidden_states), ("ids", view.topk_ids), ("weights", view.topk_weights)):
        assert bytes_at(sent.tensors, name) == bytes(tensor.raw), name
    s = sent.submission
    assert (s.layer, s.tokens, s.hidden_size, s.top_k) == (4, tokens, 8, 2)
    assert (s.out_dtype, s.hidden_dtype, s.ids_dtype, s.weights_dtype) == r.dtypes
    assert sent.tensors.out_bytes == bytes_of_answer(r)


def bytes_of_answer(r):
    return r.tokens * 8 * r.hidden_states.dtype.itemsize


def test_submissions_of_one_form_share_nothing():
    tensors = batch(top_k=1)
    marked = submission_of(Request(3, *tensors, traceparent=TRACE, router_weight_on_input=True))
    x, ids, w = batch(top_k=1)
    plain = submission_of(Request(5, x + 1, ids, w))
    assert (marked.submission.layer, marked.submission.flags) == (3, ROUTER_WEIGHT_ON_INPUT)
    assert any(marked.submission.trace)
    assert (plain.submission.layer, plain.submission.flags, any(plain.submission.trace)) == (5, 0, False)
    assert bytes_at(marked.tensors, "hidden") == tensors[0].tobytes()
    assert bytes_at(plain.tensors, "hidden") == (x + 1).tobytes()


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_an_answer_is_prepared_before_it_is_there_and_its_memory_goes_back_once(kind):
    request = Request(4, *map(kind, batch()))
    sent, answer, given = submission_of(request), Completion(), []
    memory = (C.c_float * 24)()
    prepared = Prepared(answer, sent, request, C.addressof(memory))
    memory[:], answer.routes_computed = range(24), 6
    found = prepared.result(lambda: given.append(1))
    assert found.routes_computed == 6
    assert found.output.tolist() == [[*map(float, range(n, n + 8))] for n in (0, 8, 16)]
    row = found.output[1]
    del found, prepared
    assert given == [], "somebody still reads it"
    del row
    assert given == [1]


def test_what_was_prepared_for_an_answer_that_is_none_gives_nothing_back():
    request, memory = Request(4, *batch()), (C.c_float * 24)()
    Prepared(Completion(), submission_of(request), request, C.addressof(memory))


def test_a_prepared_answer_of_another_version_is_refused_and_gives_its_memory_back():
    request, memory, given = Request(4, *batch(), weights_version=3), (C.c_float * 24)(), []
    prepared = Prepared(Completion(), submission_of(request), request, C.addressof(memory))
    with pytest.raises(BadResponseError, match="weights_version"):
        prepared.result(lambda: given.append(1))
    del prepared
    assert given == [1]


@pytest.mark.parametrize("kind", [lambda *t: t, lambda *t: map(torch.from_numpy, t)])
def test_one_that_was_sent_lets_no_digest_be_sent(kind):
    request = Request(4, *kind(*batch()))
    assert sendable(request)
    submission_of(request)
    for layer in (4, 5):
        assert sendable(Request(layer, *kind(*batch())))
        assert not sendable(Request(layer, *kind(*batch()), digest=True))


@pytest.mark.parametrize("version", [1, 7, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_an_answer_says_its_version_as_the_library_wrote_it(version):
    raw = bytearray(C.sizeof(Completion))
    raw[108:120] = (0x017677FF).to_bytes(4, "little") + version.to_bytes(8, "little")
    answer = Completion.from_buffer(raw)
    assert answer.weights_version == version
    answer.refused = 1
    assert answer.weights_version == 0
    answer.refused, raw[108:112] = 0, b"cpu\0"
    assert (answer.weights_version, answer.text) == (0, b"cpu")


def test_an_answer_says_how_long_it_was_decoded_unless_a_text_lies_there():
    raw = bytearray(C.sizeof(Completion))
    raw[120:128] = (0x017677FF).to_bytes(4, "little") + (1234).to_bytes(4, "little")
    answer = Completion.from_buffer(raw)
    assert timing_of(answer).decode_ns == 1234
    answer.refused = 1
    assert answer.decode_ns == 0
    answer.refused, raw[120:128] = 0, b"of a ref"
    assert timing_of(answer).decode_ns == 0
