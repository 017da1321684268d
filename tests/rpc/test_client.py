"""The clients against a servicer that the test commands: one body for the synchronous and the asyncio client, over a
stream and over unary calls, on localhost."""

import asyncio
import contextlib
import queue
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch

from expertd.errors import (
    TABLE,
    BadResponseError,
    BadShapeError,
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    InternalError,
    MessageTooLargeError,
    NotReadyError,
    QueueFullError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
    UnrecognizedError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as pb_grpc
from expertd.wire import ForwardResponseView
from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
    FunctionTransport,
    Grouped,
    Retry,
    Synthetic,
)
from expertd_client.servicer import ServicerTransport

PATIENCE_S = 20.0
"""How long a test waits for what must happen."""


def echo(request):
    """The answer of a server whose experts change nothing."""
    return pb.ForwardResponse(
        request_id=request.request_id,
        output=request.hidden_states,
        routes_computed=int(np.prod(request.topk_ids.shape)),
        timing=pb.Timing(kernel_ns=7, backend="echo"),
        load=pb.Load(queued_tokens=11),
        placement_epoch=5,
    )


class FakeServicer(pb_grpc.ExpertServiceServicer):
    """Does with each request what `on_forward(request, reply)` says; by default echoes it.

    reply takes a ForwardResponse, an ExpertdError for this request, a pb.Load unasked, or End for the whole stream.
    seen, cancelled: what came, in order
    """

    def __init__(self):
        self.on_forward = lambda request, reply: reply(echo(request))
        self.seen, self.cancelled, self.streams, self.describes = [], [], 0, []

    def wait_for(self, condition):
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "it did not happen"
            time.sleep(0.002)

    def StreamForward(self, request_iterator, context):  # noqa: N802 - the contract's name
        self.streams += 1
        outbox = queue.SimpleQueue()

        def read():
            with contextlib.suppress(grpc.RpcError):
                for message in request_iterator:
                    if message.HasField("cancel"):
                        self.cancelled.append(message.cancel.request_id)
                        continue
                    request = message.forward
                    self.seen.append(request)
                    self.on_forward(request, lambda answer, r=request: outbox.put((r.request_id, answer)))
            outbox.put((0, End()))

        threading.Thread(target=read, daemon=True).start()
        while True:
            request_id, answer = outbox.get()
            if isinstance(answer, End):
                if answer.code is not None:
                    context.set_trailing_metadata(answer.metadata)
                    context.abort(answer.code, "commanded")
                return
            if isinstance(answer, ExpertdError):
                yield pb.StreamForwardResponse(error=answer.to_request_error(request_id))
            elif isinstance(answer, pb.Load):
                yield pb.StreamForwardResponse(load=answer)
            elif isinstance(answer, pb.StreamForwardResponse):
                yield answer
            else:
                yield pb.StreamForwardResponse(forward=answer)

    def Forward(self, request, context):  # noqa: N802 - the contract's name
        self.seen.append(request)
        answers = queue.SimpleQueue()

        def ended():  # also at an ordinary end
            self.cancelled.append(request.request_id)
            answers.put(RequestCancelledError("the call is over"))

        context.add_callback(ended)
        self.on_forward(request, answers.put)
        answer = answers.get()
        while isinstance(answer, pb.Load):
            answer = answers.get()
        if isinstance(answer, ExpertdError):
            context.set_trailing_metadata(answer.to_trailing_metadata())
            context.abort(answer.code.grpc, answer.message)
        if isinstance(answer, End):
            context.abort(answer.code, "commanded")
        return answer

    def Describe(self, request, context):  # noqa: N802 - the contract's name
        self.describes.append(request)
        return pb.DescribeResponse(version="0.0.0", layers=[pb.Layer(layer=3)])


class End:
    """The end of the stream, or of a unary call: in order, or with a status."""

    def __init__(self, code=None, metadata=()):
        self.code, self.metadata = code, metadata


@contextlib.contextmanager
def serving(servicer, port=0, max_message_bytes=-1):
    server = grpc.server(
        futures.ThreadPoolExecutor(32),
        options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)],
    )
    pb_grpc.add_ExpertServiceServicer_to_server(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


class InLoop:
    """AsyncExpertClient with the manners of ExpertClient: its loop runs in a thread."""

    def __init__(self, server, **options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make():
            return AsyncExpertClient(server, **options)

        self._client = self._run(make())

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def forward(self, *args, **kwargs):
        return self._run(self._client.forward(*args, **kwargs))

    def submit(self, *args, **kwargs):
        return asyncio.run_coroutine_threadsafe(self._client.forward(*args, **kwargs), self._loop)

    def describe(self, **kwargs):
        return self._run(self._client.describe(**kwargs))

    @property
    def in_flight(self):
        return self._client.in_flight

    @property
    def load(self):
        return self._client.load

    def close(self):
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


KINDS = {
    "sync-stream": (ExpertClient, {}),
    "async-stream": (InLoop, {}),
    "sync-unary": (ExpertClient, {"unary": True}),
    "async-unary": (InLoop, {"unary": True}),
}
STREAMS = [name for name, (_, options) in KINDS.items() if not options]


@pytest.fixture
def servicer():
    return FakeServicer()


@pytest.fixture
def address(servicer):
    with serving(servicer) as where:
        yield where


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def connect(kind, server, **options):
    make, fixed = KINDS[kind]
    return make(server, **fixed, **options)


@pytest.fixture
def client(kind, address):
    with connect(kind, address) as it:
        yield it


def batch(value=1.0, tokens=2, hidden=8, top_k=2):
    """Arguments of a forward to layer 3, every hidden state `value`."""
    ids = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
    x = np.full((tokens, hidden), value, np.float32)
    return 3, x, ids, np.full((tokens, top_k), 0.5, np.float32)


# ---- what goes in and what comes out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_in_numpy_out(client, dtype):
    layer, x, ids, weights = batch(1.5)
    answer = client.forward(layer, x.astype(dtype), ids, weights)
    assert answer.output.dtype == dtype
    np.testing.assert_array_equal(answer.output, x.astype(dtype))
    answer.output[0, 0] = 3.0  # it belongs to the caller
    assert (answer.routes_computed, answer.placement_epoch, answer.digest) == (4, 5, None)
    assert (answer.timing.kernel_ns, answer.timing.backend, answer.load.queued_tokens) == (7, "echo", 11)
    assert client.load.queued_tokens == 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(client, dtype):
    x = torch.randn(3, 16).to(dtype)
    answer = client.forward(0, x, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    assert answer.output.dtype == dtype
    assert torch.equal(answer.output, x)
    answer.output += 1


def test_every_argument_arrives(client, servicer):
    layer, x, ids, _ = batch(2.0, top_k=1)
    client.forward(
        layer,
        x,
        ids.astype(np.int64),
        np.ones((2, 1), ml_dtypes.bfloat16),
        timeout_s=30.0,
        output_dtype="f32",
        router_weight_on_input=True,
        traceparent="00-11-22-01",
    )
    (r,) = servicer.seen
    assert r.request_id > 0
    assert (r.layer, r.output_dtype, r.output_form) == (3, pb.DATA_TYPE_F32, pb.OUTPUT_FORM_TENSOR)
    assert (r.topk_ids.dtype, r.topk_weights.dtype) == (pb.DATA_TYPE_I64, pb.DATA_TYPE_BF16)
    assert (r.router_weight_on_input, r.traceparent) == (True, "00-11-22-01")
    assert r.hidden_states == pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=[2, 8], raw=x.tobytes())
    assert 29e6 < r.timeout_us <= 30e6


def test_grouped_rows_synthetic_tensors_and_a_digest(client, servicer):
    servicer.on_forward = lambda r, reply: reply(pb.ForwardResponse(request_id=r.request_id, digest=pb.Digest(crc32=9)))
    answer = client.forward(
        1, Synthetic((6, 8), seed=5), grouped=Grouped([2, 7], [4, 2]), digest=True, output_dtype="f16"
    )
    assert (answer.output, answer.digest.crc32) == (None, 9)
    (r,) = servicer.seen
    assert r.grouped == pb.GroupedRows(expert_ids=[2, 7], row_counts=[4, 2])
    assert r.hidden_states.synthetic.seed == 5
    assert r.output_form == pb.OUTPUT_FORM_DIGEST
    assert not r.HasField("topk_ids")


def test_an_empty_batch(client):
    answer = client.forward(*batch(tokens=0))
    assert answer.output.shape == (0, 8)


def test_messages_of_many_mib(client):
    _, x, ids, weights = batch(tokens=1024, hidden=4096)  # 16 MiB of f32
    x += np.arange(4096, dtype=np.float32)
    np.testing.assert_array_equal(client.forward(0, x, ids, weights).output, x)


def test_describe(client, servicer):
    assert client.describe().layers[0].layer == 3
    client.describe(include_decisions=True)
    assert [r.include_decisions for r in servicer.describes] == [False, True]


# ---- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMS)
def test_a_thousand_in_flight_answered_in_any_order(kind, servicer, address):
    held, order = [], np.random.default_rng(0).permutation(1000)

    def hold(request, reply):
        held.append((request, reply))
        if len(held) == 1000:
            for n in order:
                held[n][1](echo(held[n][0]))

    servicer.on_forward = hold
    with connect(kind, address, max_in_flight=1000) as client:
        calls = [client.submit(*batch(float(n))) for n in range(1000)]
        for n, call in enumerate(calls):
            assert call.result(PATIENCE_S).output[0, 0] == n
        assert client.in_flight == 0
    assert servicer.streams == 1


def test_threads_share_a_client(kind, address):
    with connect(kind, address) as client:

        def work(n):
            for k in range(25):
                value = float(100 * n + k)
                assert (client.forward(*batch(value)).output == value).all()

        with futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))


def test_max_in_flight_makes_the_next_one_wait(kind, servicer, address):
    held = []
    servicer.on_forward = lambda request, reply: held.append((request, reply))
    with connect(kind, address, max_in_flight=2) as client:
        calls = [client.submit(*batch(float(n))) for n in range(2)]
        servicer.wait_for(lambda: len(held) == 2)
        with pytest.raises(DeadlineExceededError, match="max_in_flight"):
            client.forward(*batch(), timeout_s=0.05)
        assert len(held) == 2
        held[0][1](echo(held[0][0]))
        servicer.wait_for(lambda: any(call.done() for call in calls))
        third = client.submit(*batch(9.0))
        servicer.wait_for(lambda: len(held) == 3)
        for request, reply in held[1:]:
            reply(echo(request))
        assert third.result(PATIENCE_S).output[0, 0] == 9.0
        assert [call.result(PATIENCE_S).output[0, 0] for call in calls] == [0.0, 1.0]


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


def test_bytes_that_are_no_message_are_refused(kind):
    handlers = {
        "Forward": grpc.unary_unary_rpc_method_handler(lambda data, context: b"\xff\xff\xff"),
        "StreamForward": grpc.stream_stream_rpc_method_handler(lambda data, context: iter([b"\xff\xff\xff"])),
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
        with connect(kind, f"127.0.0.1:{port}", retry=Retry(attempts=9, pause_s=0.001)) as client:
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


# ---- other servers behind the seam -----------------------------------------------------------------------------------


def function(request):
    if request.layer == 1:
        raise QueueFullError("full")
    return ForwardResponseView(request.request_id, output=request.hidden_states, routes_computed=4)


@pytest.mark.parametrize("make", [ExpertClient, InLoop])
def test_a_function_can_stand_for_a_server(make):
    with make(FunctionTransport(function)) as client:
        assert client.forward(*batch(3.0)).output[0, 0] == 3.0
        with pytest.raises(QueueFullError):
            client.forward(1, *batch()[1:])
        with pytest.raises(UnimplementedError):
            client.describe()
    with make(FunctionTransport(function, lambda r: pb.DescribeResponse(version="f"))) as client:
        assert client.describe().version == "f"


class BytesServicer:
    """A servicer as grpc.aio calls it without generated classes: echoes, but for layers 9 (ends), 10 (breaks), 11."""

    async def stream_forward(self, _, context):
        while (data := await context.read()) is not grpc.aio.EOF:
            message = pb.StreamForwardRequest.FromString(data)
            if message.forward.layer == 9:
                error = DrainingError("it drains")
                await context.abort(error.code.grpc, error.message, error.to_trailing_metadata())
            if message.forward.layer == 10:
                raise RuntimeError("a bug")
            if message.forward.layer == 11:
                continue
            await context.write(pb.StreamForwardResponse(forward=echo(message.forward)).SerializeToString())

    async def describe(self, data, context):
        assert context.time_remaining() > 0
        if pb.DescribeRequest.FromString(data).include_decisions:
            error = NotReadyError("it loads")
            await context.abort(error.code.grpc, error.message, error.to_trailing_metadata())
        return pb.DescribeResponse(version="in-process").SerializeToString()


async def test_a_servicer_in_this_process():
    async with AsyncExpertClient(ServicerTransport(BytesServicer())) as client:
        answers = await asyncio.gather(*(client.forward(*batch(float(n))) for n in range(20)))
        assert [a.output[0, 0] for a in answers] == list(range(20))
        assert (await client.describe()).version == "in-process"
        with pytest.raises(NotReadyError):
            await client.describe(include_decisions=True)
        with pytest.raises(DrainingError):
            await client.forward(9, *batch()[1:])
        with pytest.raises(InternalError, match="a bug"):
            await client.forward(10, *batch()[1:])
        with pytest.raises(DeadlineExceededError):
            await client.forward(11, *batch()[1:], timeout_s=0.05)
        waiting = asyncio.create_task(client.forward(11, *batch()[1:]))
        while not client.in_flight:
            await asyncio.sleep(0)
    with pytest.raises(RequestCancelledError):
        await waiting


async def test_a_client_that_was_never_used_closes():
    await AsyncExpertClient("127.0.0.1:1").close()


async def test_a_task_that_is_cancelled_takes_its_request_back(servicer, address):
    servicer.on_forward = lambda request, reply: None if request.layer == 3 else reply(echo(request))
    async with AsyncExpertClient(address, max_in_flight=1) as client:
        task = asyncio.create_task(client.forward(*batch()))
        while not servicer.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not servicer.cancelled:
            await asyncio.sleep(0.01)
        assert (await client.forward(4, *batch(5.0)[1:])).output[0, 0] == 5.0
    assert servicer.cancelled == [servicer.seen[0].request_id]


def test_torch_is_not_imported_by_the_client():
    code = (
        "import sys, expertd_client, expertd_client.cli, expertd_client.commands.load; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
