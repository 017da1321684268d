"""AsyncExpertCluster: the same calls in an event loop."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch
from cluster_kit import E, Fake, Looped, batch, experts_of, later, transports

from expertd.errors import (
    DeadlineExceededError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    PlacementError,
    RequestCancelledError,
    UnavailableError,
)
from expertd_client import AsyncForwarder
from expertd_client.cluster import AsyncExpertCluster, OnMissing, Policy

X, IDS, W = batch(12)
WANT, ROUTES = experts_of(X, IDS, W, range(E))
pytestmark = pytest.mark.timeout(60)


def replicas():
    return {"a": Fake({0: range(4)}), "b": Fake({0: range(4)}), "c": Fake({0: range(4, 8)})}


def cluster_of(servers, **options):
    return AsyncExpertCluster(list(servers), transport=transports(servers, Looped), **{"timeout_s": 10.0} | options)


def check(answer):
    np.testing.assert_allclose(answer.output, WANT, rtol=1e-5, atol=1e-6)
    assert answer.routes_computed == ROUTES


async def test_it_says_what_each_server_said_and_how_messages_travel():
    servers = replicas()
    servers["b"].away = True
    async with cluster_of(servers) as cluster:
        described, sessions = await cluster.describe(), await cluster.session()
        assert {a: d.layers[0].held[0].first for a, d in described.items()} == {"a": 0, "c": 4}
        assert {a: s.transport for a, s in sessions.items()} == {"a": "inline", "c": "inline"}


async def test_layers_are_waited_for():
    servers = replicas()
    servers["c"].away = True
    async with cluster_of(servers) as cluster:
        with pytest.raises(UnavailableError, match=r"layer 0: got no server for experts 4-7.*c: away"):
            await cluster.wait_for_layers([0], timeout_s=0.2)
        waits = asyncio.create_task(cluster.wait_for_layers([0], timeout_s=50.0))
        servers["c"].away = False
        await waits
        with pytest.raises(PlacementError, match="layer 1: got no server of this layer"):
            await cluster.wait_for_layers([0, 1], timeout_s=50.0)


async def test_answers():
    servers = replicas()
    async with cluster_of(servers) as cluster:
        assert isinstance(cluster, AsyncForwarder)
        assert cluster.servers == {"a": "", "b": "", "c": ""}
        for answer in await asyncio.gather(*(cluster.forward(0, X, IDS, W) for _ in range(20))):
            check(answer)
        out = torch.full(X.shape, 7.0)
        tensors = [torch.from_numpy(t) for t in (X, IDS, W)]
        assert (await cluster.forward(0, *tensors, out=out)).output is out
        np.testing.assert_allclose(out.numpy(), WANT, rtol=1e-5, atol=1e-6)
        with pytest.raises(LayerNotHeldError):
            await cluster.forward(1, X, IDS, W)
        with pytest.raises(ExpertIdOutOfRangeError):
            await cluster.forward(0, X, IDS + 8, W)
    with pytest.raises(RequestCancelledError):
        await cluster.forward(0, X, IDS, W)
    with pytest.raises(RequestCancelledError):
        await cluster.wait_for_layers([0])
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_a_failed_a_late_and_a_hung_replica():
    servers = replicas()
    async with cluster_of(servers, policy=Policy(stall_s=0.1)) as cluster:
        check(await cluster.forward(0, X, IDS, W))
        servers["a"].away = True
        for _ in range(10):
            check(await cluster.forward(0, X, IDS, W))
        servers["a"].away = False
        while cluster.servers["a"]:
            await asyncio.sleep(0.01)
        later(servers["a"], None)
        asked = len(servers["a"].asked)
        for _ in range(30):
            check(await cluster.forward(0, X, IDS, W))
        assert len(servers["a"].asked) <= asked + 10, "once it hangs it gets nothing"
        await nothing_outstanding(cluster)


async def nothing_outstanding(cluster):
    """What a timer sent as its call ended is taken back a moment later."""
    end_s = time.monotonic() + 20
    while any(m.outstanding for m in cluster._members.by_address.values()):
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.002)


async def test_deadlines_cancels_and_experts_that_are_missing():
    servers = replicas()
    async with cluster_of(servers) as cluster:
        later(servers["c"], None)
        with pytest.raises(DeadlineExceededError):
            await cluster.forward(0, X, IDS, W, timeout_s=0.05)
        some = await cluster.forward(0, X, IDS, W, timeout_s=0.05, on_missing=OnMissing.SKIP)
        np.testing.assert_allclose(some.output, experts_of(X, IDS, W, range(4))[0], rtol=1e-5, atol=1e-6)
        assert len(some.missing) == (IDS >= 4).sum()
        waiting = asyncio.create_task(cluster.forward(0, X, IDS, W))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not cluster._state.flights
        await nothing_outstanding(cluster)
    del servers["c"]
    async with cluster_of(servers) as cluster:
        with pytest.raises(PlacementError, match="no server for experts 4-7"):
            await cluster.forward(0, X, IDS, W)
    servers["a"].away = servers["b"].away = True
    async with cluster_of(servers, timeout_s=0.2) as cluster:
        with pytest.raises((LayerNotHeldError, UnavailableError)):
            await cluster.forward(0, X, IDS, W)
