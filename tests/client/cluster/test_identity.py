"""Servers that hold other weights under the same name are not asked, and who joins holds nobody up."""

import threading
import time
import tracemalloc

import numpy as np
import pytest
from cluster_kit import E, Fake, batch, experts_of, transports
from waiting import until

from expertd.errors import PlacementError
from expertd.placement import Placement, Server
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import ExpertCluster
from expertd_client.cluster import members as module
from expertd_client.cluster.identity import Identity
from expertd_client.cluster.members import Members

ALL = range(E)


def right(expert):
    return [1000 + expert]


def wrong_of(*experts):
    return lambda expert: [1000 + expert + (expert in experts) * 77]


def check(identity, address, server):
    identity.check(address, server.describe(None))


def test_digests_are_compared_where_experts_are_shared():
    identity = Identity()
    check(identity, "a", Fake({0: (0, 1, 2), 3: (0,)}, weights=right))
    check(identity, "b", Fake({0: (2, 3)}, weights=wrong_of(3)))  # nobody else said anything of 3
    check(identity, "silent", Fake({0: tuple(ALL)}))
    with pytest.raises(PlacementError, match=r"^c: layer 0, experts 1-3: got other weights .* want those of a, b"):
        check(identity, "c", Fake({0: tuple(ALL)}, weights=wrong_of(1, 2)))
    check(identity, "d", Fake({0: (0, 1, 2)}, weights=right))


def test_what_a_server_said_is_forgotten_when_it_leaves_or_says_something_else():
    identity = Identity()
    check(identity, "a", Fake({0: tuple(ALL)}, weights=wrong_of(4)))
    for _ in range(3):
        with pytest.raises(PlacementError):
            check(identity, "b", Fake({0: tuple(ALL)}, weights=right))
    check(identity, "a", Fake({0: tuple(ALL)}, weights=wrong_of(5)))  # restarted, with other weights
    with pytest.raises(PlacementError, match="experts 5:"):
        check(identity, "b", Fake({0: tuple(ALL)}, weights=right))
    identity.forget("a")
    check(identity, "b", Fake({0: tuple(ALL)}, weights=right))
    with pytest.raises(PlacementError, match="want those of b"):
        check(identity, "a", Fake({0: tuple(ALL)}, weights=wrong_of(5)))
    identity.forget("a")  # it had been refused: it bound nobody
    with pytest.raises(PlacementError, match="want those of b"):
        check(identity, "a", Fake({0: tuple(ALL)}, weights=wrong_of(5)))


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (Fake({0: (0, 1)}, weights=lambda e: [5] * e), "got . digests of 2 experts up to ., want one for each"),
        (Fake({0: (0, 9)}, weights=right), "got experts up to 9, want ids below 8"),
    ],
    ids=["few", "beyond"],
)
def test_what_cannot_be_is_refused(server, why):
    with pytest.raises(PlacementError, match=f"^a: layer 0: {why}"):
        check(Identity(), "a", server)


@pytest.mark.timeout(60)
def test_a_server_of_changed_weights_is_refused_at_join():
    servers = {"good": Fake({0: tuple(ALL)}, weights=right), "bad": Fake({0: tuple(ALL)}, weights=wrong_of(6))}
    x, ids, w = batch(10)
    source = Following("good")
    with ExpertCluster(source, transport=transports(servers), timeout_s=10.0) as cluster:
        cluster.forward(0, x, ids, w)
        source.says = ("good", "bad")
        until(lambda: "experts 6: got other weights" in cluster.servers.get("bad", ""))
        for _ in range(20):
            answer = cluster.forward(0, x, ids, w)
            np.testing.assert_allclose(answer.output, experts_of(x, ids, w, ALL)[0], rtol=1e-5, atol=1e-6)
        assert not servers["bad"].asked
        servers["bad"].weights = right  # it was started again, with the right ones
        until(lambda: not cluster.servers["bad"])
        servers["good"].away = True
        cluster.forward(0, x, ids, w)
        assert servers["bad"].asked


def test_who_left_while_it_was_described_binds_nobody():
    good, bad = Fake({0: tuple(ALL)}, weights=right), Fake({0: tuple(ALL)}, weights=wrong_of(6))
    members = Members(lambda address: (None, NoExchange()), 0.2)
    members.apply(("a",))
    (left,) = members.by_address.values()
    members.apply(Placement((Server("b", {0: (0,)}),), {0: E}))
    members.probed(left, bad.describe(None))
    members.probed(members.by_address["b"], good.describe(None))
    assert not members.by_address["b"].refused


class NoExchange:
    load, alive = None, True


class Following:
    every_s = 0.01

    def __init__(self, *says):
        self.says = says

    def read(self):
        return self.says


@pytest.mark.timeout(60)
def test_calls_do_not_wait_for_what_a_join_has_to_work_out(monkeypatch):
    """Tables of many layers and experts take a while: the thread that watches the new server makes them."""
    servers = {name: Fake({0: tuple(ALL)}, weights=right) for name in ("old", "new")}
    x, ids, w = batch(10)
    source = Following("old")
    with ExpertCluster(source, transport=transports(servers), timeout_s=10.0) as cluster:
        cluster.forward(0, x, ids, w)
        makers, made, may_end = [], module.layer_table, threading.Event()

        def slow(*args):
            makers.append(threading.current_thread())
            assert may_end.wait(20)
            return made(*args)

        monkeypatch.setattr(module, "layer_table", slow)
        source.says = ("old", "new")
        until(lambda: makers)
        for _ in range(20):
            cluster.forward(0, x, ids, w)  # while they are made
        assert not servers["new"].asked
        may_end.set()
        until(lambda: cluster.forward(0, x, ids, w) and servers["new"].asked)
    assert threading.current_thread() not in makers


@pytest.mark.parametrize(
    "layers",
    [
        [pb.Layer(layer=0, num_experts=2**32 - 1)],
        [pb.Layer(layer=0, num_experts=2**32 - 1, held=[pb.ExpertRange(first=0, count=2**32 - 1)])],
        [pb.Layer(layer=0, num_experts=8, held=[pb.ExpertRange(first=0, count=1 << 31)] * 20_000)],
        [pb.Layer(layer=n, num_experts=65536, held=[pb.ExpertRange(first=0, count=65536)]) for n in range(64)],
    ],
)
def test_what_a_server_says_of_its_size_is_bounded(layers):
    begun = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(PlacementError, match=r"at most|ids below"):
            Identity().check("a", pb.DescribeResponse(layers=layers))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert time.process_time() - begun < 10
