"""The clients against a servicer that the test commands (one body for the synchronous and the asyncio client, over a
stream and over unary calls, on localhost): what goes in and comes out, many at once, other servers behind the seam."""

import asyncio
import subprocess
import sys
from concurrent import futures

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
from commanded_server import PATIENCE_S, STREAMS, InLoop, batch, connect, echo

from expertd.codec import ForwardResponseView
from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    InternalError,
    NotReadyError,
    QueueFullError,
    RequestCancelledError,
    UnimplementedError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
    FunctionTransport,
    Grouped,
    Synthetic,
)
from expertd_client.transports.in_process import ServicerTransport

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
    code = "import sys, expertd_client, expertctl.cli, expertctl.commands.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0
