"""From one placement to another so that every expert always has a replica."""

from __future__ import annotations

import numpy as np
import pytest

from expertctl.rebalancing.admin import name_of
from expertctl.rebalancing.steps import changed, holdings, kept, loads, step_of
from expertd.errors import UnavailableError
from expertd.placement import Placement, Server
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.admin import admin_address

COUNTS = {0: 8, 1: 8, 2: 8}


def placement(*held, epoch=1) -> Placement:
    """held: of each server, layer -> experts."""
    servers = [Server(f"s{n}:1", {k: tuple(v) for k, v in layers.items()}) for n, layers in enumerate(held)]
    return Placement(tuple(servers), COUNTS, epoch)


NOW = placement({0: range(4), 1: range(8)}, {0: range(4, 8)})
THEN = placement({0: (0, 1, 4), 1: range(8)}, {0: (2, 3, 5, 6, 7), 2: (0,)}, epoch=2)


def test_first_more_holders_then_fewer():
    assert changed(NOW, THEN) == [0, 2]
    step = step_of(NOW, THEN, [0, 2])
    assert step.add == {"s0:1": {0: (0, 1, 2, 3, 4)}, "s1:1": {0: (2, 3, 4, 5, 6, 7), 2: (0,)}}
    assert step.drop == {"s0:1": {0: (0, 1, 4)}, "s1:1": {0: (2, 3, 5, 6, 7)}}
    assert step.moves == 4
    assert loads(step) == 5
    assert changed(THEN, THEN) == []


def test_a_server_that_is_emptied_has_nothing_to_pack():
    then = placement({0: range(8), 1: range(8)}, {})
    step = step_of(NOW, then, changed(NOW, then))
    assert step.drop == {"s1:1": {0: ()}}
    assert loads(step) == 1


@pytest.mark.parametrize("seed", range(8))
def test_nobody_is_ever_without_a_holder(seed):
    rng = np.random.default_rng(seed)

    def some() -> Placement:
        held = rng.random((3, 4, 8)) < 0.4  # [layers, servers, experts]
        held[:, rng.integers(4), :] |= ~held.any(axis=1)
        layers = [{n: np.flatnonzero(held[n, s]).tolist() for n in range(3) if held[n, s].any()} for s in range(4)]
        return placement(*layers)

    now, then = some(), some()
    state = holdings(now)
    for layer in changed(now, then):
        step = step_of(now, then, [layer])
        for part in (step.add, step.drop):
            before = {e for held in state.values() for e in held.get(layer, ())}
            for address, wanted in part.items():
                state[address].update(wanted)
            after = {e for held in state.values() for e in held.get(layer, ())}
            assert after >= before & {e for held in holdings(then).values() for e in held.get(layer, ())}
            assert after == set(range(8)) or layer not in THEN.num_experts
    want = holdings(then)
    assert {a: {n: e for n, e in layers.items() if e} for a, layers in state.items()} == want


def test_what_would_be_lost_stays():
    alive = Placement((Server("s1:1", {0: (4, 5)}),), COUNTS, 3)
    now = Placement((Server("s1:1", {0: (2, 4, 5), 2: (0,)}),), COUNTS, 1)
    assert holdings(kept(now, alive)) == {"s1:1": {0: (2, 4, 5), 2: (0,)}}


def test_the_same_change_has_the_same_name():
    assert name_of({0: (1, 2), 1: ()}) == name_of({1: (), 0: (1, 2)})
    assert name_of({0: (1, 2)}) != name_of({0: (1, 3)})


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("127.0.0.1:7071", "127.0.0.1:7071"),
        ("0.0.0.0:7071", "node-3:7071"),
        ("[::]:7071", "node-3:7071"),
        ("unix:/run/admin", "unix:/run/admin"),
    ],
)
def test_where_the_admin_service_is(told, found):
    assert admin_address("node-3:50051", pb.DescribeResponse(admin_address=told)) == found
    with pytest.raises(UnavailableError, match="start the server with --admin-listen"):
        admin_address("node-3:50051", pb.DescribeResponse())
