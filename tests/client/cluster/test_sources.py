"""Where a placement comes from, and servers that join and leave while calls go on."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import numpy as np
import pytest
from cluster_kit import E, Fake, Looped, Threaded, batch, experts_of, transports
from waiting import until

from expertd.errors import PlacementError
from expertd.placement import Placement, Server
from expertd_client.cluster import AsyncExpertCluster, Dns, ExpertCluster, PlacementFile

X, IDS, W = batch(12)
WANT, _ = experts_of(X, IDS, W, range(E))
pytestmark = pytest.mark.timeout(60)


def placement(epoch, **held):
    servers = tuple(Server(address, {0: tuple(experts)}) for address, experts in held.items())
    return Placement(servers, {0: E}, epoch)


def put(path, what):
    """As one has to write it: whole."""
    path.with_suffix(".new").write_text(what if isinstance(what, str) else what.to_json())
    os.replace(path.with_suffix(".new"), path)


def check(answer):
    np.testing.assert_allclose(answer.output, WANT, rtol=1e-5, atol=1e-6)


def fleet():
    return {"a": Fake({0: range(E)}), "b": Fake({0: range(E)}), "c": Fake({0: range(E)})}


def test_servers_join_and_leave_under_load(tmp_path):
    servers, path = fleet(), tmp_path / "placement.json"
    put(path, placement(1, a=range(4), b=range(4, 8)))
    over, faults, seen = threading.Event(), [], []

    def call():
        while not over.is_set():
            try:
                answer = cluster.forward(0, X, IDS, W)
                check(answer)
                seen.append(answer.placement_epoch)
            except Exception as error:
                faults.append(error)

    before = set(threading.enumerate())
    with ExpertCluster(
        PlacementFile(path, every_s=0.02), transport=transports(servers, Threaded), timeout_s=10.0
    ) as cluster:
        check(cluster.forward(0, X, IDS, W))
        callers = [threading.Thread(target=call) for _ in range(3)]
        for t in callers:
            t.start()
        until(lambda: seen)  # with the first placement
        for epoch, held in (
            (2, {"a": range(4), "b": range(4, 8), "c": range(8)}),
            (3, {"b": range(4, 8), "c": range(8)}),
            (4, {"b": range(8), "c": range(2)}),
            (5, {"a": range(2, 8), "b": range(8)}),
        ):
            put(path, placement(epoch, **held))
            until(lambda epoch=epoch: seen and seen[-1] == epoch)
            until(lambda held=held: cluster.servers == dict.fromkeys(held, ""))
        put(path, "{")
        until(lambda: "placement" in cluster.source_error)
        put(path, placement(4, a=range(8)))
        until(lambda: "epoch" in cluster.source_error)
        check(cluster.forward(0, X, IDS, W))
        assert list(cluster.servers) == ["a", "b"], "what was said before stays in force"
        put(path, placement(6, b=range(8)))
        until(lambda: list(cluster.servers) == ["b"])
        until(lambda: not cluster.source_error)
        over.set()
        for t in callers:
            t.join(10)
    assert not faults
    assert {1, 2, 3, 4, 5} <= set(seen)
    assert all(server.asked for server in servers.values())
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("expertd") and t not in before])


async def test_the_same_in_an_event_loop(tmp_path):
    servers, path = fleet(), tmp_path / "placement.json"
    put(path, placement(1, a=range(4), b=range(4, 8)))
    source = PlacementFile(path, every_s=0.02)
    async with AsyncExpertCluster(source, transport=transports(servers, Looped), timeout_s=10.0) as cluster:
        check(await cluster.forward(0, X, IDS, W))
        put(path, placement(2, c=range(8)))
        end_s = time.monotonic() + 20
        while {part.server for part in (await cluster.forward(0, X, IDS, W)).parts} != {"c"}:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
        check(await cluster.forward(0, X, IDS, W))
        assert cluster.servers == {"c": ""}


def test_a_server_that_holds_less_than_the_placement_says_is_asked_for_what_it_has():
    servers = {"a": Fake({0: range(4)}), "b": Fake({0: range(8)})}
    with ExpertCluster(placement(1, a=range(8), b=range(8)), transport=transports(servers), timeout_s=10.0) as cluster:
        for _ in range(20):
            check(cluster.forward(0, X, IDS, W))
    assert all(set(ids.ravel().tolist()) <= {-1, 0, 1, 2, 3} for _, _, ids, _ in servers["a"].asked)


def test_dns(monkeypatch):
    def resolve(host, port, **kwargs):
        assert host == "experts.svc"
        v6 = (socket.AF_INET6, 1, 6, "", ("fd00::1", port, 0, 0))
        return [(socket.AF_INET, 1, 6, "", (a, port)) for a in ("10.0.0.2", "10.0.0.1", "10.0.0.2")] + [v6]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert Dns("experts.svc:7070").read() == ("10.0.0.1:7070", "10.0.0.2:7070", "[fd00::1]:7070")
    assert Dns("experts.svc").read()[0] == "10.0.0.1:50051"
    for wrong in ("", ":7070", "experts:http", "https://experts"):
        with pytest.raises(PlacementError, match="name:port"):
            Dns(wrong)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        ExpertCluster(PlacementFile(tmp_path / "no.json"))


class Faulty:
    """A source of somebody's own: the first two readings after the first have a fault."""

    every_s = 0.02

    def __init__(self):
        self.readings = 0

    def read(self):
        self.readings += 1
        if self.readings in (2, 3):
            raise KeyError("metadata")
        return ("a",) if self.readings < 30 else ("b",)


def test_a_source_with_a_fault_is_read_again():
    with ExpertCluster(Faulty(), transport=transports(fleet(), Threaded), timeout_s=10.0) as cluster:
        until(lambda: cluster.source_error == "KeyError: 'metadata'")
        check(cluster.forward(0, X, IDS, W))
        until(lambda: list(cluster.servers) == ["b"])
        assert not cluster.source_error
        check(cluster.forward(0, X, IDS, W))


async def test_a_source_with_a_fault_is_read_again_in_a_loop():
    async with AsyncExpertCluster(Faulty(), transport=transports(fleet(), Looped), timeout_s=10.0) as cluster:
        said = set()
        for _ in range(500):
            said.add(cluster.source_error)
            if list(cluster.servers) == ["b"]:
                break
            await asyncio.sleep(0.01)
        assert said == {"", "KeyError: 'metadata'"}
        assert list(cluster.servers) == ["b"]
        check(await cluster.forward(0, X, IDS, W))
