"""Servers as actors of a real Ray cluster of three nodes: an actor, a node and the coordinator are killed under
load."""

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

from expertctl.bench.faults.load import LoadClients
from expertctl.cli import main
from expertctl.common.workload import LayerShape, drawn
from expertd.errors import UnavailableError
from expertd.placement import Placement
from expertd_client import ExpertCluster
from expertd_client.cluster import PlacementFile

pytest.importorskip("ray", reason="starts actors; pip install ray (the extra `deploy` has it)")

import ray
from ray_kit import HEAD, ray_cluster
from waiting import until

from expertctl.ray.deploy import status
from expertctl.ray.follow import Follower
from expertd_client.cluster.ray import NAMESPACE, RayServers

pytestmark = [
    pytest.mark.slow,  # three nodes and nine servers are started, each a process that imports torch
    pytest.mark.timeout(600),  # its steps have limits of their own
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


LIMIT_S = 100.0
"""Of what takes some seconds where this machine has nothing else to do."""


def wait_for(wanted) -> list[dict]:
    """The servers' rows as soon as all serve and they are `wanted`."""
    end_s, found = time.monotonic() + LIMIT_S, []
    while time.monotonic() < end_s:
        with contextlib.suppress(UnavailableError):  # the coordinator is being started again
            found = status("experts")
            if wanted(found) and all(row["phase"] == "serving" for row in found):
                return found
        time.sleep(0.1)
    raise AssertionError(found)


def more_calls(*loads: LoadClients) -> None:
    """Waits until each has had a hundred more answers; a call that hangs, or fails, lets it wait in vain."""
    wanted = [len(load.calls) + 100 for load in loads]
    until(lambda: all(len(load.calls) >= n for load, n in zip(loads, wanted, strict=True)), LIMIT_S)


def assert_apart(found):
    assert [(r["part"], r["replica"]) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for part in (0, 1):
        assert len({r["node"] for r in found if r["part"] == part}) == 2, found


@pytest.mark.soak
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
    until(lambda: follower.step() is not None, LIMIT_S)
    thread = threading.Thread(target=lambda: [follower.step() for _ in iter(ended.is_set, True)])
    thread.start()
    request = drawn(np.random.default_rng(0), 8, LayerShape(0, 256, 8, 2), 0.0)
    try:
        with ExpertCluster(RayServers()) as inside, ExpertCluster(PlacementFile(file)) as outside:
            expected = np.asarray(inside.forward_request(request).output, np.float32)
            with (
                LoadClients(inside, request, expected, 2e-2, 1) as callers,
                LoadClients(outside, request, expected, 2e-2, 1) as others,
            ):
                more_calls(callers, others)
                os.kill(first[0]["pid"], signal.SIGKILL)
                found = wait_for(lambda found: found[0]["starts"] == 2)
                assert found[0]["address"] != first[0]["address"]

                ray.kill(ray.get_actor("experts", namespace=NAMESPACE), no_restart=False)
                more_calls(callers)
                found = wait_for(lambda found: found[0]["starts"] == 1)  # a new coordinator has seen each once
                assert len({row["pid"] for row in found}) == 4

                gone = next(row["node"] for row in found if row["node"] != HEAD)
                cluster, alive = nodes
                cluster.remove_node(alive[gone], allow_graceful=False)
                found = wait_for(lambda found: all(row["node"] != gone for row in found))
                assert_apart(found)
                more_calls(callers, others)
                serving = {row["address"] for row in found}
                until(lambda: {s.address for s in Placement.from_json(file.read_bytes()).servers} == serving, LIMIT_S)
                more_calls(others)
        assert not callers.failures
        assert not others.failures
        assert Placement.from_json(file.read_bytes()).epoch >= 4
    finally:
        ended.set()
        thread.join(LIMIT_S)

    assert main(["ray", "down"]) == 0
    until(nothing_is_left, LIMIT_S)
    until(lambda: not any(Path(f"/proc/{row['pid']}").exists() for row in found), LIMIT_S)
    assert main(["ray", "status"]) == 1
    assert "expertctl ray up starts some" in capsys.readouterr().err


def test_what_cannot_serve_says_why_and_leaves_nothing(nodes, capsys):
    assert main(["ray", "up", *TINY, "--", "--max-tokens", "none"]) == 1
    assert "part 0, replica 0: --max-tokens: got 'none'" in capsys.readouterr().err
    until(nothing_is_left, LIMIT_S)
    assert main(["ray", "up", *TINY, "--resources", "xpu=1", "--wait", "1"]) == 1
    assert "got part 0, replica 0 pending, want all to serve in 1 s" in capsys.readouterr().err
    until(nothing_is_left, LIMIT_S)


def nothing_is_left() -> bool:
    """No actor, and no placement group that keeps resources."""
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    return not groups and not ray.util.list_named_actors(all_namespaces=True)
