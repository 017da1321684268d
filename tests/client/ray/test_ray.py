"""Servers as actors of a real Ray cluster of three nodes: an actor, a node and the keeper are killed under load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from expertd.errors import UnavailableError
from expertd.placement import Placement
from expertd_client import ExpertCluster
from expertd_client.cli import main
from expertd_client.cluster import PlacementFile
from expertd_client.faults.load import Callers
from expertd_client.workload import LayerShape, drawn

pytest.importorskip("ray", reason="starts actors; pip install ray (the extra `deploy` has it)")

import ray
from ray_kit import HEAD, ray_cluster

from expertd_client.ray import RayServers
from expertd_client.ray.deploy import status
from expertd_client.ray.follow import Follower
from expertd_client.ray.spec import NAMESPACE

pytestmark = [
    pytest.mark.slow,  # three nodes and nine servers are started, each a process that imports torch
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # Ray's own
]

TINY = ("--synthetic", "tiny:int4_g128")
HALVES = ["ray", "up", *TINY, "--shards", "2", "--replicas", "2", "--", "--layers", "0", "--metrics-listen", "{node}:0"]


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(cpus=2) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_for_the_next(nodes):
    yield
    if ray.util.list_named_actors(all_namespaces=True):  # the test failed
        main(["ray", "down"])


def wait_for(wanted, limit_s=60.0) -> list[dict]:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        with contextlib.suppress(UnavailableError):  # the keeper is being started again
            found = status("experts")
            if wanted(found) and all(row["phase"] == "serving" for row in found):
                return found
        time.sleep(0.1)
    raise AssertionError(found)


def assert_apart(found):
    assert [(r["part"], r["replica"]) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for part in (0, 1):
        assert len({r["node"] for r in found if r["part"] == part}) == 2, found


def test_who_is_killed_is_started_again_and_no_call_fails(nodes, capsys, tmp_path):
    assert main(HALVES) == 0
    assert "4 servers serve" in capsys.readouterr().out
    assert main(["ray", "status", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["servers"]
    assert_apart(first)
    assert all(row["metrics"].startswith(row["node"]) for row in first)

    file = tmp_path / "placement.json"
    ended = threading.Event()
    follower = Follower(RayServers(), file, None, 10.0)
    follower.step()
    thread = threading.Thread(target=lambda: [follower.step() for _ in iter(ended.is_set, True)])
    thread.start()
    request = drawn(np.random.default_rng(0), 8, LayerShape(0, 256, 8, 2), 0.0)
    try:
        with ExpertCluster(RayServers()) as inside, ExpertCluster(PlacementFile(file)) as outside:
            expected = np.asarray(inside.forward_request(request).output, np.float32)
            with (
                Callers(inside, request, expected, 2e-2, 1) as callers,
                Callers(outside, request, expected, 2e-2, 1) as others,
            ):
                callers.wait(100, 20)
                os.kill(first[0]["pid"], signal.SIGKILL)
                found = wait_for(lambda found: found[0]["starts"] == 2)
                assert found[0]["address"] != first[0]["address"]

                ray.kill(ray.get_actor("experts", namespace=NAMESPACE), no_restart=False)
                callers.wait(100, 20)
                found = wait_for(lambda found: found[0]["starts"] == 1)  # a new keeper has seen each once
                assert len({row["pid"] for row in found}) == 4

                gone = next(row["node"] for row in found if row["node"] != HEAD)
                cluster, alive = nodes
                cluster.remove_node(alive[gone], allow_graceful=False)
                found = wait_for(lambda found: all(row["node"] != gone for row in found))
                assert_apart(found)
                callers.wait(100, 20)
                others.wait(100, 20)
        assert not callers.failures
        assert not others.failures
        calls = callers.calls + others.calls
        longest_s = max(end - begin for begin, end in calls)
        assert len(calls) > 1000
        assert longest_s < 10.0, "a call hung"
        placement = Placement.from_json(file.read_bytes())
        assert {s.address for s in placement.servers} == {row["address"] for row in found}
        assert placement.epoch >= 4
    finally:
        ended.set()
        thread.join(30)

    assert main(["ray", "down"]) == 0
    assert nothing_is_left()
    assert ended_by(10.0, [row["pid"] for row in found])
    assert main(["ray", "status"]) == 1
    assert "expertctl ray up starts some" in capsys.readouterr().err


def test_what_cannot_serve_says_why_and_leaves_nothing(nodes, capsys):
    assert main(["ray", "up", *TINY, "--", "--max-tokens", "none"]) == 1
    assert "part 0, replica 0: --max-tokens: got 'none'" in capsys.readouterr().err
    assert nothing_is_left()
    assert main(["ray", "up", *TINY, "--resources", "xpu=1", "--wait", "1"]) == 1
    assert "got part 0, replica 0 pending, want all to serve in 1 s" in capsys.readouterr().err
    assert nothing_is_left()


def nothing_is_left(limit_s=10.0) -> bool:
    """No actor, and no placement group that keeps resources."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        if not groups and not ray.util.list_named_actors(all_namespaces=True):
            return True
        time.sleep(0.1)
    return False


def ended_by(limit_s: float, pids: list[int]) -> bool:
    end_s = time.monotonic() + limit_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end_s:
        time.sleep(0.05)
    return not left
