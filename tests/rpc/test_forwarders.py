"""What forwards, whatever it is: one body for a server on localhost, a function, a servicer in this process, and one
that this test makes of two others."""

import asyncio
from concurrent.futures import Future

import grpc
import numpy as np
import pytest
from commanded_server import batch, echo

from expertd.codec import ForwardResponseView
from expertd.errors import BadShapeError, RequestCancelledError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import (
    AsyncExpertClient,
    AsyncForwarder,
    ExpertClient,
    Forwarder,
    ForwardResult,
    FunctionTransport,
    Request,
)
from expertd_client.transports.in_process import ServicerTransport


def by_function():
    def serve(request):
        return ForwardResponseView(request.request_id, request.hidden_states, routes_computed=len(request.topk_ids.raw))

    return ExpertClient(FunctionTransport(serve))


class Halves(Forwarder):
    """Two others, each with half of the tokens: all that has to be written to be one."""

    def __init__(self, first, second):
        self._parts = (first, second)

    def submit_request(self, request, *, timeout_s=None):
        middle = request.tokens // 2
        halves = (request.rows(slice(middle)), request.rows(slice(middle, None)))
        under_way = [f.submit_request(r, timeout_s=timeout_s) for f, r in zip(self._parts, halves, strict=True)]
        whole = Future()
        answers = [call.result() for call in under_way]
        output = np.concatenate([answer.output for answer in answers])
        routes = sum(answer.routes_computed for answer in answers)
        whole.set_result(ForwardResult(output, None, routes, pb.Timing(), pb.Load(), 0))
        return whole

    def forward_request(self, request, *, timeout_s=None):
        return self.submit_request(request, timeout_s=timeout_s).result()

    def close(self):
        for part in self._parts:
            part.close()


MAKERS = {
    "localhost": lambda address: ExpertClient(address, timeout_s=30.0),
    "function": lambda address: by_function(),
    "halves": lambda address: Halves(ExpertClient(address, unary=True), by_function()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_forwarder(name, address):
    layer, x, ids, weights = batch(tokens=4)
    x += np.arange(4, dtype=np.float32)[:, None]
    with MAKERS[name](address) as experts:
        assert isinstance(experts, Forwarder)
        request = Request(layer, x, ids, weights)
        for answer in (
            experts.forward(layer, x, ids, weights, timeout_s=20.0),
            experts.submit(layer, x, ids, weights, output_dtype="f32").result(20.0),
            experts.forward_request(request),
            experts.submit_request(request, timeout_s=20.0).result(20.0),
        ):
            np.testing.assert_array_equal(answer.output, x)
            assert answer.routes_computed > 0
        with pytest.raises(BadShapeError):
            experts.forward(layer, x, ids)
        with pytest.raises(TypeError, match="no_such_option"):
            experts.forward(layer, x, ids, weights, no_such_option=1)
    with pytest.raises(RequestCancelledError, match="closed"):
        experts.forward(layer, x, ids, weights)


class Echoes:
    """A servicer as grpc.aio calls it, without generated classes."""

    async def stream_forward(self, _, context):
        while (data := await context.read()) is not grpc.aio.EOF:
            message = pb.StreamForwardRequest.FromString(data)
            await context.write(pb.StreamForwardResponse(forward=echo(message.forward)).SerializeToString())


ASYNC_MAKERS = {
    "localhost": lambda address: AsyncExpertClient(address, timeout_s=30.0),
    "in-process": lambda address: AsyncExpertClient(ServicerTransport(Echoes())),
    "function": lambda address: AsyncExpertClient(by_function()._transport),
}


def made_by_the_client(task):
    """And not by gRPC: its tasks are no Python functions."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "expertd_client" in code.co_filename


@pytest.mark.parametrize("name", ASYNC_MAKERS)
async def test_an_async_forwarder(name, address):
    layer, x, ids, weights = batch(tokens=4)
    async with ASYNC_MAKERS[name](address) as experts:
        assert isinstance(experts, AsyncForwarder)
        request = Request(layer, x, ids, weights)
        answers = await asyncio.gather(
            experts.forward(layer, x, ids, weights, timeout_s=20.0),
            experts.forward_request(request),
            *(experts.forward_request(part, timeout_s=20.0) for part in request.cut(3)),
        )
        assert [answer.output.shape for answer in answers] == [(4, 8), (4, 8), (3, 8), (1, 8)]
        with pytest.raises(BadShapeError):
            await experts.forward(layer, x, ids)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert [t for t in left if made_by_the_client(t)] == [], "close() has waited for all"
    assert not left or not (await asyncio.wait(left, timeout=20))[1], "gRPC's own end a moment later"
