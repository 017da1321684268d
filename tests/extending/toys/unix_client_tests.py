"""Requests by the toy transport, of a server and clients that have it in their tables."""

import asyncio

import numpy as np
import pytest
import torch
from core_library import needs_core
from in_process import hosts

from expertd.errors import LayerNotHeldError
from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.transports.unix import UnixTransport
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import open_source
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges

pytestmark = needs_core

LAYER = 1
TINY = {"synthetic": "tiny:int4_g128", "layers": Ranges.parse("1")}


@pytest.fixture
def host():
    with hosts(**TINY) as serve:
        yield serve()


@pytest.fixture(scope="module")
def batch():
    """(arguments of forward, the float32 reference)"""
    weights = open_source(ServeConfig(**TINY)).load(LAYER, range(8))
    x, ids, w = random_inputs(9, 256, 8, 2, seed=3)
    return (LAYER, x.bfloat16(), ids, w), reference(weights, x.bfloat16(), ids, w)


def assert_right(answer, batch):
    assert torch.isfinite(answer.output).all()
    assert relative_error(answer.output.float(), batch[1]) < tolerance("bf16")


def test_requests_travel_by_it(host, batch, monkeypatch):
    monkeypatch.setattr(UnixTransport, "carried", 0)
    with ExpertClient(host.address, timeout_s=20) as client:
        assert client.session().transport == "unix"
        assert set(client.describe().transports) >= {"shm", "unix"}
        for _ in range(3):
            assert_right(client.forward(*batch[0]), batch)
        assert_right(client.submit(*batch[0]).result(20), batch)
        with pytest.raises(LayerNotHeldError):
            client.forward(7, *batch[0][1:])
        assert_right(client.forward(*batch[0]), batch)  # a refusal is no end of the connection
    assert UnixTransport.carried == 6

    async def in_a_loop():
        async with AsyncExpertClient(host.address, timeout_s=20) as client:
            assert (await client.session()).transport == "unix"
            for answer in await asyncio.gather(*(client.forward(*batch[0]) for _ in range(4))):
                assert_right(answer, batch)

    asyncio.run(in_a_loop())
    assert UnixTransport.carried == 10


def test_a_server_without_it_says_so_and_the_next_one_serves(host, batch):
    del host.service.offered["unix"]
    with ExpertClient(host.address, timeout_s=20) as client:
        session = client.session()
        assert session.transport == "shm"
        assert session.refused["unix"] == "this server does not know it"
        assert_right(client.forward(*batch[0]), batch)


def test_a_drain_answers_what_was_taken(host, batch):
    with ExpertClient(host.address, timeout_s=20) as client:
        assert client.session().transport == "unix"
        answer = client.submit(*batch[0])
        assert_right(answer.result(20), batch)
        assert host.drain(20)
        assert np.isfinite(answer.result(20).output.float().numpy()).all()
