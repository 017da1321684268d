"""The clients against a servicer that the test commands (one body for the synchronous and the asyncio client, over a
stream and over unary calls, on localhost): time limits, taking back, broken connections."""

import contextlib
import threading
import time
from concurrent import futures

import grpc
import pytest
from commanded_server import PATIENCE_S, STREAMS, End, FakeServicer, batch, connect, echo, serving

from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    RequestCancelledError,
    UnavailableError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import (
    ExpertClient,
)

# ---- time and taking back --------------------------------------------------------------------------------------------


def test_a_request_ends_with_its_time_and_is_taken_back(client, servicer):
    servicer.on_forward = lambda request, reply: None if request.layer == 3 else reply(echo(request))
    begin_s = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.forward(*batch(), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - begin_s < PATIENCE_S
    assert 0 < servicer.seen[0].timeout_us <= 200_000
    servicer.wait_for(lambda: servicer.cancelled == [servicer.seen[0].request_id])
    assert client.in_flight == 0
    assert client.forward(4, *batch(5.0)[1:]).output[0, 0] == 5.0


@pytest.mark.parametrize("kind", STREAMS)
def test_a_request_that_nobody_waits_for_ends_with_its_time(kind, servicer, address):
    """Callbacks hang on it, for one."""
    servicer.on_forward = lambda request, reply: None
    with connect(kind, address, max_in_flight=1) as client:
        ended = threading.Event()
        call = client.submit(*batch(), timeout_s=0.1)
        call.add_done_callback(lambda _: ended.set())
        assert ended.wait(PATIENCE_S)
        assert isinstance(call.exception(), DeadlineExceededError)
        servicer.wait_for(lambda: servicer.cancelled == [servicer.seen[0].request_id])
        assert client.in_flight == 0
        servicer.on_forward = lambda request, reply: reply(echo(request))
        assert client.forward(*batch(5.0), timeout_s=PATIENCE_S).output[0, 0] == 5.0  # the only place is free again


def test_the_clients_own_timeout_is_the_default(kind, servicer, address):
    servicer.on_forward = lambda request, reply: None
    with connect(kind, address, timeout_s=0.1) as client:
        with pytest.raises(DeadlineExceededError):
            client.forward(*batch())
        with pytest.raises(DeadlineExceededError):
            client.forward(*batch(), timeout_s=0.2)
    assert servicer.seen[0].timeout_us <= 100_000 < servicer.seen[1].timeout_us <= 200_000


@pytest.mark.parametrize("kind", STREAMS)
def test_a_cancelled_request_is_taken_back_and_its_late_answer_is_dropped(kind, servicer, address):
    held = []
    servicer.on_forward = lambda request, reply: (
        held.append((request, reply)) if request.layer == 3 else reply(echo(request))
    )
    with connect(kind, address, max_in_flight=1) as client:
        call = client.submit(*batch())
        servicer.wait_for(lambda: held)
        assert call.cancel()
        servicer.wait_for(lambda: servicer.cancelled == [held[0][0].request_id])
        held[0][1](echo(held[0][0]))
        held[0][1](RequestCancelledError("as the contract says"))
        assert client.forward(4, *batch(5.0)[1:]).output[0, 0] == 5.0  # the only place is free again
        with pytest.raises(futures.CancelledError):
            call.result()
        assert call.cancel()  # again: nothing more happens
        assert client.in_flight == 0
    assert len(servicer.cancelled) == 1


def test_a_cancelled_unary_call_ends_at_the_server(servicer, address):
    servicer.on_forward = lambda request, reply: None if request.layer == 3 else reply(echo(request))
    with connect("sync-unary", address, max_in_flight=1) as client:
        call = client.submit(*batch())
        servicer.wait_for(lambda: servicer.seen)
        assert call.cancel()
        servicer.wait_for(lambda: servicer.cancelled)
        assert client.forward(4, *batch(5.0)[1:]).output[0, 0] == 5.0


def test_closing_fails_what_is_in_flight_and_what_comes_later(kind, servicer, address):
    servicer.on_forward = lambda request, reply: None
    client = connect(kind, address)
    calls = [client.submit(*batch()) for _ in range(3)]
    servicer.wait_for(lambda: len(servicer.seen) == 3)
    client.close()
    for call in calls:
        with pytest.raises(RequestCancelledError):
            call.result(PATIENCE_S)
    if isinstance(client, ExpertClient):
        with pytest.raises(RequestCancelledError, match="closed"):
            client.forward(*batch())
        client.close()


# ---- broken connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    "end",
    [End(), End(grpc.StatusCode.UNAVAILABLE), End(grpc.StatusCode.CANCELLED), End(grpc.StatusCode.DATA_LOSS)],
    ids=["in order", "UNAVAILABLE", "CANCELLED", "DATA_LOSS"],
)
def test_a_broken_stream_fails_all_in_flight_and_sends_nothing_twice(kind, servicer, address, end):
    def third_breaks(request, reply):
        if request.layer == 9:
            reply(echo(request))
        elif len(servicer.seen) == 3:
            reply(end)

    servicer.on_forward = third_breaks
    with connect(kind, address) as client:
        calls = [client.submit(*batch(float(n))) for n in range(3)]
        for call in calls:
            with pytest.raises(UnavailableError) as caught:
                call.result(PATIENCE_S)
            assert caught.value.retryable
        assert len({r.request_id for r in servicer.seen}) == len(servicer.seen) == 3
        assert client.forward(9, *batch(4.0)[1:]).output[0, 0] == 4.0
    assert servicer.streams == 2


@pytest.mark.parametrize("kind", ["sync-unary", "async-unary"])
def test_a_call_that_the_other_side_cancels_is_one_to_send_again(kind, servicer, address):
    servicer.on_forward = lambda request, reply: reply(End(grpc.StatusCode.CANCELLED))
    with connect(kind, address) as client, pytest.raises(UnavailableError, match="other side") as caught:
        client.forward(*batch())
    assert caught.value.retryable


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_ends_with_a_row_of_the_table_says_so(kind, servicer, address):
    error = DrainingError("server: it drains")
    servicer.on_forward = lambda request, reply: reply(End(grpc.StatusCode.UNAVAILABLE, error.to_trailing_metadata()))
    with connect(kind, address) as client, pytest.raises(DrainingError):
        client.forward(*batch())


def test_nobody_listens(kind):
    with connect(kind, "127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1\b") as caught:
            client.forward(*batch())
        assert caught.value.retryable
        with pytest.raises(UnavailableError):
            client.describe()
        with pytest.raises(DeadlineExceededError):
            client.describe(wait_for_ready=True, timeout_s=0.2)


def test_a_server_that_went_away_and_came_back(kind):
    with contextlib.ExitStack() as stack:
        servicer = FakeServicer()
        with serving(servicer) as address:
            client = stack.enter_context(connect(kind, address))
            client.forward(*batch())
            servicer.on_forward = lambda request, reply: None
            call = client.submit(*batch())
            servicer.wait_for(lambda: len(servicer.seen) == 2)
        with pytest.raises(UnavailableError):
            call.result(PATIENCE_S)
        with pytest.raises(UnavailableError):
            client.forward(*batch(), timeout_s=PATIENCE_S)
        with serving(FakeServicer(), port=int(address.rpartition(":")[2])):
            client.describe(wait_for_ready=True, timeout_s=PATIENCE_S)
            assert client.forward(*batch(6.0), timeout_s=PATIENCE_S).output[0, 0] == 6.0


@pytest.mark.parametrize("kind", STREAMS)
def test_messages_that_nobody_asked_for(kind, servicer, address):
    def chatter(request, reply):
        reply(pb.Load(queued_tokens=99, draining=True))
        reply(pb.StreamForwardResponse())  # of a kind that this version does not know
        reply(pb.StreamForwardResponse(session=pb.SessionAnswer()))
        answer = echo(request)
        answer.ClearField("load")
        reply(answer)

    servicer.on_forward = chatter
    with connect(kind, address) as client:
        assert client.load is None
        client.forward(*batch())
        assert (client.load.queued_tokens, client.load.draining) == (99, True)
