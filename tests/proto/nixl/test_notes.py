"""What notifications say, and what is refused of them."""

import ctypes as C
import random
import time

import pytest

from expertd.nixl import find
from expertd.nixl.notes import (
    ForgedError,
    Numbers,
    answer_note,
    inputs,
    output,
    parse_answer,
    parse_request,
    request_note,
)
from expertd.shm.layout import CANCEL, FORWARD, PREPARE, Completion, Submission
from expertd.v1 import expert_service_pb2 as pb

BF16, I32, F32, E4M3 = pb.DATA_TYPE_BF16, pb.DATA_TYPE_I32, pb.DATA_TYPE_F32, pb.DATA_TYPE_E4M3


def submission(**more):
    s = Submission(
        kind=FORWARD, id=7, layer=3, tokens=5, top_k=2, hidden_size=64, hidden=0, ids=768, weights=1024, out=1280
    )
    s.hidden_dtype, s.ids_dtype, s.weights_dtype, s.out_dtype = BF16, I32, F32, BF16
    for name, value in more.items():
        setattr(s, name, value)
    return s


def test_a_request_comes_as_it_went_and_its_time_counts_on_the_other_clock():
    number, s = parse_request(request_note(12, submission()))
    assert number == 12
    assert bytes(s) == bytes(submission())
    left_ns = 10**9
    deadline_ns = time.monotonic_ns() + left_ns
    note = request_note(0, submission(deadline_ns=deadline_ns))
    time.sleep(0.01)
    _, s = parse_request(note)
    assert deadline_ns + 9_900_000 < s.deadline_ns <= time.monotonic_ns() + left_ns, "its way does not count"
    _, late = parse_request(request_note(0, submission(deadline_ns=1)))
    assert 0 < late.deadline_ns <= time.monotonic_ns() + 1, "a time that is over is not taken for none"


def test_an_answer_comes_as_it_went_its_text_where_it_was_refused():
    answer = Completion(id=7, routes_computed=10, kernel_ns=5, name=b"cpu_int4", text=b"of an error before")
    number, good = parse_answer(answer_note(3, answer))
    assert (number, good.id, good.routes_computed, good.kernel_ns, good.name) == (3, 7, 10, 5, b"cpu_int4")
    assert good.text == b""
    answer.refused = 1
    assert parse_answer(answer_note(4, answer))[1].text == b"of an error before"


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"expnxr01",
        answer_note(0, Completion()),
        request_note(0, submission())[:-1],
        request_note(0, submission()) + b"x",
        request_note(0, submission(kind=PREPARE)),
        request_note(0, submission(kind=0)),
        request_note(0, submission(hidden_size=0)),
    ],
)
def test_what_is_no_request_is_refused(note):
    with pytest.raises(ForgedError):
        parse_request(note)


def test_what_is_no_answer_is_refused():
    for note in (b"", request_note(0, submission()), answer_note(0, Completion())[:-1], b"expnxa01" + bytes(9)):
        with pytest.raises(ForgedError):
            parse_answer(note)
    assert parse_request(request_note(1, Submission(kind=CANCEL, id=9)))[1].id == 9


def test_numbers_come_once_in_any_order_and_none_far_ahead():
    order = random.Random(0)
    numbers, ahead, coming = Numbers(8), 8, list(range(1000))
    came: list[int] = []
    while coming:
        number = coming.pop(order.randrange(sum(n < coming[0] + ahead for n in coming[:ahead])))
        numbers.take(number)
        came.append(number)
        for wrong in (number, came[0], coming[0] + ahead if coming else 1008, -1):
            with pytest.raises(ForgedError, match="number of a notification"):
                numbers.take(wrong)
    assert came != sorted(came)


def test_ranges_of_a_request_are_its_tensors_and_nothing_of_a_neighbour():
    assert inputs(submission()) == [(0, 1024 + 40)], "one block: the room between its tensors is padding"
    assert output(submission()) == (1280, 640)
    apart = submission(ids=4096, weights=4096 + 256 + 40)
    assert inputs(apart) == [(0, 640), (4096, 40), (4096 + 296, 40)]
    scaled = submission(hidden_dtype=E4M3, scales=2048)
    assert inputs(scaled) == [(0, 320), (768, 256 + 40), (2048, 5 * 4)]
    assert inputs(submission(hidden=2**63, ids=2**63 + 640, weights=2**63 + 680)) == [(2**63, 720)]
    for name in ("hidden_dtype", "ids_dtype", "weights_dtype"):
        with pytest.raises(ForgedError, match="dtype: got 99"):
            inputs(submission(**{name: 99}))
    with pytest.raises(ForgedError, match="dtype: got 99"):
        output(submission(out_dtype=99))


def test_forged_submissions_of_any_bytes_do_nothing_else():
    draw = random.Random(1)
    for _ in range(2000):
        note = (
            b"expnxr01"
            + draw.randbytes(8)
            + bytes([draw.randrange(5) if i == 76 else draw.randrange(256) for i in range(128)])
        )
        try:
            _, s = parse_request(note)
            inputs(s), output(s)
        except ForgedError:
            pass
    assert C.sizeof(Submission) == 128


def test_without_a_package_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(find, "_NAMES", ("no_such_nixl",))
    assert find.missing() == "nixl is not installed: pip install 'expertd[nixl]'"
    with pytest.raises(find.NixlMissingError, match=r"pip install 'expertd\[nixl\]'"):
        find.load()
