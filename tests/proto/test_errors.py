"""The error table: every row is whole, and survives each way over the wire."""

from __future__ import annotations

import pickle
import re

import grpc
import pytest

from expertd import errors
from expertd.errors import TABLE, Code, ExpertdError
from expertd.v1 import expert_service_pb2 as pb

ROWS = list(TABLE.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.__name__)
def test_row_is_whole(row: type[ExpertdError]) -> None:
    assert row.__name__.endswith("Error")
    assert row.__name__ in errors.__all__
    assert re.fullmatch(r"[A-Z][A-Z_]+", row.reason)
    assert TABLE[row.reason] is row
    assert row.code is not Code.OK
    assert row.code.grpc.value[0] == row.code
    assert row.__doc__
    if row.retryable:
        assert row.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
        assert not issubclass(row, errors.InvalidRequestError)


def test_codes_are_those_of_grpc() -> None:
    assert {c.name: c.value for c in Code} == {c.name: c.value[0] for c in grpc.StatusCode}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.__name__)
def test_row_as_a_message(row: type[ExpertdError]) -> None:
    sent = row("grün: got 1, want 2", request_id=7, retry_after_us=1500)
    message = pb.RequestError.FromString(sent.to_request_error().SerializeToString())
    assert (message.request_id, message.code, message.reason) == (7, row.code, row.reason)
    got = errors.from_request_error(message)
    assert type(got) is row
    assert (got.message, got.request_id, got.retry_after_us) == ("grün: got 1, want 2", 7, 1500)
    assert sent.to_request_error(request_id=8).request_id == 8


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.__name__)
def test_row_as_the_end_of_a_call(row: type[ExpertdError]) -> None:
    sent = row("x: got 1, want 2", retry_after_us=1500)
    metadata = sent.to_trailing_metadata()
    assert dict(metadata)["expertd-reason"] == row.reason
    assert dict(metadata)["expertd-retryable"] == ("true" if row.retryable else "false")
    for code in (sent.code.grpc, int(sent.code)):
        got = errors.from_status(code, sent.message, metadata)
        assert type(got) is row
        assert (got.message, got.retry_after_us) == (sent.message, 1500)
    got = errors.from_status(sent.code.grpc, sent.message, grpc.aio.Metadata(*metadata))
    assert type(got) is row


def test_row_survives_pickling() -> None:
    got = pickle.loads(pickle.dumps(errors.QueueFullError("full", request_id=3, retry_after_us=9)))
    assert type(got) is errors.QueueFullError
    assert (str(got), got.request_id, got.retry_after_us) == ("full", 3, 9)


@pytest.mark.parametrize(
    ("code", "details", "row"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, "Channel closed!", errors.RequestCancelledError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.UnimplementedError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (9 vs. 4)",
            errors.MessageTooLargeError,
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate limit of a proxy", errors.UnrecognizedError),
        (grpc.StatusCode.UNKNOWN, None, errors.UnrecognizedError),
    ],
)
def test_status_without_a_reason(code: grpc.StatusCode, details: str | None, row: type[ExpertdError]) -> None:
    got = errors.from_status(code, details, None)
    assert type(got) is row
    assert got.code == code.value[0]
    assert got.message == (details or "")


def test_reason_of_a_newer_server_is_kept() -> None:
    metadata = (("expertd-reason", "TOO_COLD"), ("expertd-retryable", "true"), ("expertd-retry-after-us", "5"))
    got = errors.from_status(grpc.StatusCode.UNAVAILABLE, "brr", metadata)
    assert type(got) is errors.UnrecognizedError
    assert (got.reason, got.code, got.retryable, got.retry_after_us) == ("TOO_COLD", Code.UNAVAILABLE, True, 5)
    assert (errors.UnrecognizedError.reason, errors.UnrecognizedError.retryable) == ("UNRECOGNIZED", False)
    got = errors.from_request_error(pb.RequestError(code=99, reason="TOO_COLD", message="brr"))
    assert (got.reason, got.code) == ("TOO_COLD", Code.UNKNOWN)


@pytest.mark.parametrize("value", ["", "-1", "1e3", "soon", "٣"])
def test_broken_advice_is_no_advice(value: str) -> None:
    metadata = (("expertd-reason", "QUEUE_FULL"), ("expertd-retry-after-us", value))
    assert errors.from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "", metadata).retry_after_us == 0


def test_text_says_subject_got_want_remedy() -> None:
    error = errors.BadShapeError.about(
        "hidden_states", got=[3, 4], want="[M, 8]", remedy="send rows of 8", request_id=2
    )
    assert type(error) is errors.BadShapeError
    assert str(error) == "hidden_states: got [3, 4], want [M, 8]; send rows of 8"
    assert error.request_id == 2


def test_rows_are_what_python_programs_expect() -> None:
    assert issubclass(errors.BadDtypeError, ValueError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    assert issubclass(errors.UnavailableError, ConnectionError)


def test_a_reason_stands_once() -> None:
    with pytest.raises(ValueError, match="BAD_DTYPE stands there twice"):

        class AgainError(ExpertdError, code=Code.UNKNOWN, reason="BAD_DTYPE"):
            """A second row with the reason of another."""

    assert TABLE["BAD_DTYPE"] is errors.BadDtypeError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer: got 3, want 1", "layer: got 3, want 1"),
        ("grün €", "grün €"),
        ("a\nb\x1b[31mred\x00\x7f\u2028\u202e", r"a\nb\x1b[31mred\x00\x7f\u2028\u202e"),
        ("lone \ud800", r"lone \ud800"),
    ],
)
def test_a_text_is_one_line_that_no_terminal_obeys(text: str, says: str) -> None:
    error = errors.BadShapeError(text)
    assert error.message == says
    assert errors.from_request_error(error.to_request_error(1)).message == says


@pytest.mark.parametrize("letter", ["x", "€", "\U0001f600", "\x00"])
def test_a_text_of_any_length_fits_into_the_headers_of_a_call(letter: str) -> None:
    error = errors.BadShapeError("begin " + letter * 1_000_000 + " end")
    assert error.message.startswith("begin ")
    assert error.message.endswith(" end")
    assert "characters left out]" in error.message
    percent_encoded = sum(1 if 0x20 <= b < 0x7F else 3 for b in error.message.encode())
    assert percent_encoded < 8192 - 512


def test_what_a_server_sends_is_escaped_too() -> None:
    got = errors.from_request_error(pb.RequestError(code=13, reason="\x1b[2J" * 100, message="x\ny" * 1000))
    assert got.reason.isprintable()
    assert len(got.reason) < 500
    assert got.message.isprintable()
    got = errors.from_status(8, "x", [("expertd-reason", "QUEUE_FULL"), ("expertd-retry-after-us", "9" * 100_000)])
    assert (got.reason, got.retry_after_us) == ("QUEUE_FULL", 0)
