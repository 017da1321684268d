"""The asyncio client in front of the real servicer, without a socket between them: tensors in, right answers out."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from server_kit import NUM_EXPERTS, H, InProcess, K, wait_for

from expertd.errors import ExpertIdOutOfRangeError, LayerNotHeldError, NonFiniteWeightsError
from expertd_client import AsyncExpertClient, Grouped
from expertd_client.transports.in_process import ServicerTransport
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs

pytestmark = pytest.mark.parametrize("served", [InProcess], indirect=True)


@pytest.fixture
async def client(served):
    async with AsyncExpertClient(ServicerTransport(served.server.servicer), timeout_s=60.0) as it:
        yield it


def slots(ids):
    """Experts 1..6 of 8 are held: their local positions, -1 for the others."""
    return torch.where((ids >= 1) & (ids <= 6), ids - 1, -1).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numpy", [False, True])
async def test_answers_are_right_in_every_dtype(client, weights, dtype, numpy):
    calls = []
    for n in range(6):
        x, ids, w = random_inputs(n + 1, H, NUM_EXPERTS, K, seed=n)
        calls.append((n % 2, x.to(dtype), ids, w))

    async def check(layer, x, ids, w):
        as_numpy = numpy and dtype != torch.bfloat16
        arguments = [t.numpy() for t in (x, ids, w)] if as_numpy else [x, ids, w]
        answer = await client.forward(layer, *arguments)
        output = torch.from_numpy(answer.output) if as_numpy else answer.output
        assert output.dtype == dtype
        assert relative_error(output, reference(weights[layer], x, slots(ids), w)) <= tolerance("bf16")
        assert answer.routes_computed == int((slots(ids) >= 0).sum())
        assert answer.timing.backend == "reference"

    await asyncio.gather(*(check(*call) for call in calls))


async def test_rows_grouped_by_expert(client, weights):
    x, _, _ = random_inputs(5, H, NUM_EXPERTS, K, seed=9)
    answer = await client.forward(0, x, grouped=Grouped([2, 6], [3, 2]), output_dtype="f32")
    ids = torch.tensor([[2], [2], [2], [6], [6]])
    want = reference(weights[0], x, slots(ids), torch.ones(5, 1))
    assert relative_error(answer.output, want) <= tolerance("bf16")


async def test_an_array_of_experts(client, weights):
    x = random_inputs(8, H, NUM_EXPERTS, K, seed=9)[0].reshape(2, 4, H)
    x[0, 3:], x[1, 1:] = np.nan, np.nan
    answer = await client.forward(0, x.reshape(8, H), grouped=Grouped([2, 6], [3, 1], 4), output_dtype="f32")
    rows = [0, 1, 2, 4]
    ids = torch.tensor([[2], [2], [2], [6]])
    want = reference(weights[0], x.reshape(8, H)[rows], slots(ids), torch.ones(4, 1))
    assert relative_error(answer.output[rows], want) <= tolerance("bf16")
    assert not answer.output[[3, 5, 6, 7]].any()
    assert answer.routes_computed == int((slots(ids) >= 0).sum())


async def test_refusals_are_rows_of_the_table(client):
    x, ids, w = random_inputs(2, H, NUM_EXPERTS, K, seed=1)
    with pytest.raises(LayerNotHeldError):
        await client.forward(7, x, ids, w)
    with pytest.raises(ExpertIdOutOfRangeError):
        await client.forward(0, x, ids + NUM_EXPERTS, w)
    with pytest.raises(NonFiniteWeightsError):
        await client.forward(0, x, ids, w * np.nan)
    assert (await client.forward(0, x, ids, w)).output.shape == (2, H)


async def test_a_request_that_is_taken_back_while_it_waits_is_never_computed(served, client):
    x, ids, w = random_inputs(3, H, NUM_EXPERTS, K, seed=1)
    with served.busy():
        first = asyncio.create_task(client.forward(0, x, ids, w))
        await wait_for(served.entered.is_set)
        waiting = asyncio.create_task(client.forward(0, x, ids, w))
        await wait_for(lambda: client.in_flight == 2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        cancelled = {"code": "CANCELLED", "reason": "CANCELLED"}
        get = served.metrics.registry.get_sample_value
        await wait_for(lambda: get("expertd_requests_total", cancelled))
    await first
    await client.forward(0, x, ids, w)
    assert served.kernels == [3, 3]
