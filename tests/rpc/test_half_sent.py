"""Callers who send half a message to a live server, by hand, and honest ones beside them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from http2 import HalfSent as Half
from in_process import hosts
from waiting import until

from expertd_client import ExpertClient
from expertd_server.transports.grpc import half_sent

pytestmark = pytest.mark.timeout(60)

FORWARD, STREAM = "/expertd.v1.ExpertService/Forward", "/expertd.v1.ExpertService/StreamForward"
MB = 1 << 20


@pytest.fixture
def serve():
    with hosts(synthetic="tiny:int4_g128", max_message_bytes=4 * MB, max_half_sent_bytes=8 * MB) as start:
        yield start


def half_sent_of(host) -> half_sent.HalfSent:
    return next(t._server._half_sent for t in host._transports if hasattr(t, "_server"))


def held(host) -> int:
    return sum(c.held for c in half_sent_of(host)._connections.values())


def ask(address: str, unary: bool = False, times: int = 1, tokens: int = 3) -> None:
    ids = np.tile(np.arange(2, dtype=np.int32), (tokens, 1))
    x, w = np.ones((tokens, 256), np.float32), np.full((tokens, 2), 0.5, np.float32)
    with ExpertClient(address, unary=unary, timeout_s=20) as client:
        for _ in range(times):
            client.forward(0, x, ids, w).release()


def ended(connections: list[Half]) -> int:
    for c in connections:
        c.push(0)
    return sum(c.closed for c in connections)


@pytest.mark.parametrize("streams", [1, 4])
def test_all_together_hold_no_more_than_the_limit(serve, streams):
    """80 MB begun, on 20 connections or on five; 8 MiB of one connection and 4/3 of it in all is the limit."""
    host = serve()
    begun = [Half(host.address, STREAM, 4_000_000, streams) for _ in range(20 // streams)]
    for c in begun:
        c.push(3_999_999)
    until(lambda: ended(begun) > 0 and sum(sum(c.sent.values()) for c in begun if not c.closed) <= 4 * 8 * MB // 3)
    ask(host.address)
    count, why = host.metrics.registry.get_sample_value, {"why": "half-sent messages hold too much"}
    until(lambda: count("expertd_connections_ended_total", why) == ended(begun))
    live = [c for c in begun if not c.closed]
    assert live or streams > 1, "no more than has to go"
    for c in begun:
        c.close()
    until(lambda: held(host) == 0)


def test_half_a_message_that_does_not_go_on_ends_its_connection(serve, monkeypatch):
    monkeypatch.setattr(half_sent, "STALL_S", 0.3)
    host = serve()
    idle, stuck = Half(host.address, STREAM, 4_000_000), Half(host.address, STREAM, 4_000_000)
    idle.push(1000)
    stuck.push(2_000_000)
    until(lambda: ended([stuck]) == 1)
    assert ended([idle]) == 0
    ask(host.address)
    idle.close()
    stuck.close()


@pytest.mark.parametrize("path", [FORWARD, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"])
def test_a_call_that_is_one_message_has_to_bring_it(serve, monkeypatch, path):
    monkeypatch.setattr(half_sent, "MESSAGE_S", 0.3)
    host = serve()
    slow = Half(host.address, path, 100_000)
    slow.push(50_000)
    connections = half_sent_of(host)._connections
    until(lambda: len(connections) == 1 and not next(iter(connections.values())).calls, 5)
    assert ended([slow]) == 0, "its connection stays"
    ask(host.address, unary=True)
    slow.close()


def test_honest_traffic_leaves_nothing_that_looks_held(serve):
    """The estimate must not grow by itself, or connections that have done nothing would end."""
    host = serve()
    ids = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    x, w = np.ones((3, 256), np.float32), np.full((3, 2), 0.5, np.float32)
    wide = (np.ones((400, 256), np.float32), np.tile(ids[:1], (400, 1)), np.tile(w[:1], (400, 1)))
    with ExpertClient(host.address, timeout_s=20) as client:
        for _ in range(1000):
            client.forward(0, x, ids, w).release()
        for _ in range(50):
            client.forward(0, *wide).release()
        answered_s = time.monotonic()
        (connection,) = half_sent_of(host)._connections.values()
        until(lambda: connection._seen_s > answered_s)
        assert connection.calls == 1
        assert connection.held < 4096
        assert not connection.unsure
