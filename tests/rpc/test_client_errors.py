"""The clients against a servicer that the test commands (one body for the synchronous and the asyncio client, over a
stream and over unary calls, on localhost): errors, and sending again."""

from concurrent import futures

import grpc
import numpy as np
import pytest
from commanded_server import PATIENCE_S, batch, connect, echo, serving

from expertd.errors import (
    TABLE,
    BadResponseError,
    BadShapeError,
    DrainingError,
    MessageTooLargeError,
    QueueFullError,
    UnimplementedError,
    UnrecognizedError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import (
    Retry,
)

# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in TABLE.values() if row is not UnrecognizedError], ids=lambda r: r.reason)
def test_an_error_arrives_as_its_row_and_harms_nobody_else(kind, servicer, address, row):
    def fail_the_negative(request, reply):
        negative = np.frombuffer(request.hidden_states.raw, np.float32)[0] < 0
        reply(row("subject: got this, want that", retry_after_us=1500) if negative else echo(request))

    servicer.on_forward = fail_the_negative
    with connect(kind, address) as client:
        calls = [client.submit(*batch(value)) for value in (1.0, -1.0, 2.0)]
        with pytest.raises(row, match="got this, want that") as caught:
            calls[1].result(PATIENCE_S)
        assert (caught.value.reason, caught.value.retryable) == (row.reason, row.retryable)
        assert caught.value.retry_after_us == 1500
        (wrong,) = [r for r in servicer.seen if r.hidden_states.raw.startswith(np.float32(-1).tobytes())]
        assert caught.value.request_id == wrong.request_id
        assert [calls[n].result(PATIENCE_S).output[0, 0] for n in (0, 2)] == [1.0, 2.0]


def test_a_reason_from_the_future_keeps_its_name(client, servicer):
    def newer(request, reply):
        error = DrainingError("?")
        error.reason = "SOLAR_FLARE"
        reply(error)

    servicer.on_forward = newer
    with pytest.raises(UnrecognizedError) as caught:
        client.forward(*batch())
    assert (caught.value.reason, caught.value.code.name, caught.value.retryable) == ("SOLAR_FLARE", "UNAVAILABLE", True)


def test_what_cannot_be_sent_is_refused_before_and_leaks_no_place(kind, servicer, address):
    layer, x, ids, weights = batch()
    with connect(kind, address, max_in_flight=1) as client:
        for _ in range(3):
            with pytest.raises(BadShapeError):
                client.forward(layer, x)
            with pytest.raises(ValueError, match="-1"):
                client.forward(-1, x, ids, weights)
        assert client.forward(layer, x, ids, weights).routes_computed == 4
    assert len(servicer.seen) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [1, 8]},
        {"dtype": pb.DATA_TYPE_F16},
        {"raw": b"123"},
        {"floats": pb.FloatValues(values=[1.0] * 16)},
    ],
    ids=lambda w: next(iter(w)),
)
def test_an_answer_that_does_not_fit_is_refused(client, servicer, wrong):
    def distort(request, reply):
        answer = echo(request)
        for field, value in wrong.items():
            if field == "shape":
                answer.output.shape[:] = value
            elif field == "floats":
                answer.output.floats.CopyFrom(value)
            else:
                setattr(answer.output, field, value)
        reply(answer)

    servicer.on_forward = distort
    with pytest.raises(BadResponseError):
        client.forward(*batch())


LONG = pb.ForwardResponse(request_id=1, output=pb.Tensor(shape=[1] * 40))


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (b"\xff\xff\xff", b"\xff\xff\xff"),
        (LONG.SerializeToString(), pb.StreamForwardResponse(forward=LONG).SerializeToString()),
    ],
    ids=["no message", "a shape of 40 extents"],
)
def test_bytes_that_are_no_answer_are_refused(kind, whole, part):
    handlers = {
        "Forward": grpc.unary_unary_rpc_method_handler(lambda data, context: whole),
        "StreamForward": grpc.stream_stream_rpc_method_handler(lambda data, context: (part for _ in data)),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("expertd.v1.ExpertService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with connect(kind, f"127.0.0.1:{port}") as client, pytest.raises(BadResponseError):
            client.forward(*batch(), timeout_s=PATIENCE_S)
    finally:
        server.stop(None).wait()


def test_a_server_of_something_else(kind):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        # Retry: grpc.aio now and then hides the status of a stream that ended at once, and it then reads as broken.
        with connect(kind, f"127.0.0.1:{port}", retry=Retry(attempts=40, pause_s=0.005)) as client:
            with pytest.raises(UnimplementedError, match=f"127.0.0.1:{port}"):
                client.forward(*batch(), timeout_s=PATIENCE_S)
            with pytest.raises(UnimplementedError):
                client.describe()
    finally:
        server.stop(None).wait()


def test_a_message_that_is_too_large_for_the_server(kind, servicer):
    with (
        serving(servicer, max_message_bytes=1 << 16) as address,
        connect(kind, address) as client,
    ):
        with pytest.raises(MessageTooLargeError):
            client.forward(*batch(tokens=64, hidden=1024), timeout_s=PATIENCE_S)
        assert client.forward(*batch(2.0), timeout_s=PATIENCE_S).output[0, 0] == 2.0


# ---- sending again ---------------------------------------------------------------------------------------------------


def failing(times, error):
    def on_forward(request, reply):
        on_forward.calls += 1
        reply(error if on_forward.calls <= times else echo(request))

    on_forward.calls = 0
    return on_forward


def test_nothing_is_sent_again_by_itself(client, servicer):
    servicer.on_forward = failing(1, QueueFullError("full"))
    with pytest.raises(QueueFullError):
        client.forward(*batch())
    assert len(servicer.seen) == 1


def test_a_caller_may_have_it_sent_again(kind, servicer, address):
    servicer.on_forward = failing(2, QueueFullError("full", retry_after_us=1000))
    with connect(kind, address, retry=Retry(attempts=3, pause_s=0.001)) as client:
        assert client.forward(*batch(2.0)).output[0, 0] == 2.0
        assert len({r.request_id for r in servicer.seen}) == len(servicer.seen) == 3
        servicer.on_forward = failing(3, QueueFullError("full"))
        with pytest.raises(QueueFullError):
            client.forward(*batch())
        servicer.on_forward = failing(1, BadShapeError("never right"))
        with pytest.raises(BadShapeError):
            client.forward(*batch())
        assert len(servicer.seen) == 7
