"""Servers that switch to other weights: no sum ever has terms of two versions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from cluster_kit import E, Fake, Threaded, batch, experts_of, nothing_under_way, transports
from waiting import until

from expertd.errors import DeadlineExceededError, PlacementError, UnavailableError, WeightsVersionNotHeldError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import AsyncExpertCluster, ExpertCluster, Policy
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.requests.step_version import StepVersion

X, IDS, W = batch(12)
WANT, ROUTES = experts_of(X, IDS, W, range(E))
LOW, HIGH = {0: range(4)}, {0: range(4, 8)}
pytestmark = pytest.mark.timeout(60)


class Versioned(Fake):
    """Whose answers are as many times WANT as their version says.  versions: held, the served one first."""

    def __init__(self, held, versions=(1,), **options):
        super().__init__(held, **options)
        self.versions, self.pinned, self.digest_of = list(versions), [], lambda version, expert: 100 * version + expert
        self.identity_of = lambda version: f"sampled:{version}"

    def serve(self, request):
        found = super().serve(request)  # `does` may switch it
        self.pinned.append(request.weights_version)
        version = request.weights_version or self.versions[0]
        if version not in self.versions:
            raise WeightsVersionNotHeldError(f"got {version}, want one of {self.versions}")
        x = np.frombuffer(found.output.raw, np.float32) * np.float32(version)
        found.output.data = memoryview(x.tobytes())
        found.weights_version = version
        return found

    def describe(self, request):
        self.weights = lambda expert: [self.digest_of(self.versions[0], expert)]
        found = super().describe(request)
        found.versions.extend(
            pb.WeightVersion(number=v, serving=n == 0, identity=self.identity_of(v))
            for n, v in enumerate(self.versions)
        )
        return found

    def switch(self, version):
        self.versions = [version, self.versions[0]]

    def begin(self):
        """The next update: the version before is held no more."""
        self.versions = self.versions[:1]


def cluster_of(servers, **options):
    return ExpertCluster(list(servers), transport=transports(servers, Threaded), **{"timeout_s": 10.0} | options)


def check(answer, version):
    assert answer.weights_version == version
    np.testing.assert_allclose(answer.output, WANT * version, rtol=1e-5, atol=1e-5)
    assert answer.routes_computed == ROUTES


def knows(cluster, *versions):
    """Waits until each server is known to serve that version."""
    for member in cluster._members.by_address.values():
        cluster._wake(member)
    until(lambda: [m.versions[:1] for m in cluster._members.by_address.values()] == [(v,) for v in versions])
    until(lambda: not any(cluster.servers.values()))


def test_between_two_switches_calls_are_computed_by_the_version_that_both_hold():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        servers["a"].switch(2)
        check(cluster.forward(0, X, IDS, W), 1)  # a answered with 2 first, and was asked again
        assert servers["a"].pinned == [0, 0, 1]
        until(lambda: cluster._members.version == 1)  # both were asked what they hold
        check(cluster.forward(0, X, IDS, W), 1)
        assert servers["a"].pinned == [0, 0, 1, 1], "from then on it is asked for that version at once"
        servers["b"].switch(2)
        knows(cluster, 2, 2)
        check(cluster.forward(0, X, IDS, W), 2)
        assert servers["b"].pinned[-1] == 0
        nothing_under_way(cluster)


def test_a_switch_while_parts_are_under_way_mixes_nothing():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    waits, go = threading.Event(), threading.Event()

    def does(request):
        if not go.is_set():
            waits.set()
            assert go.wait(20)

    servers["b"].does = does
    with cluster_of(servers) as cluster:
        future = cluster.submit(0, X, IDS, W)
        assert waits.wait(20)
        for server in servers.values():  # a has answered with version 1, b will with 2
            server.switch(2)
        go.set()
        check(future.result(20), 1)
        assert servers["b"].pinned == [0, 1]
        knows(cluster, 2, 2)
        check(cluster.forward(0, X, IDS, W), 2)


def test_a_version_that_is_gone_meanwhile_is_replaced_by_the_one_that_all_serve():
    """The cluster learns of it by a refusal, before a Describe says so."""
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers) as cluster:
        servers["a"].switch(2)
        check(cluster.forward(0, X, IDS, W), 1)
        servers["b"].switch(2)
        for server in servers.values():
            server.begin()
        check(cluster.forward(0, X, IDS, W), 2)


def test_a_server_that_missed_an_update_is_not_asked_for_the_new_version():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH), "c": Versioned(LOW)}
    with cluster_of(servers, policy=Policy(hedge=0.0)) as cluster:
        for name in "ab":
            servers[name].switch(2)
            servers[name].begin()
        knows(cluster, 2, 2, 1)
        asked = len(servers["c"].asked)
        for _ in range(20):
            check(cluster.forward(0, X, IDS, W), 2)
        assert len(servers["c"].asked) == asked
        servers["c"].switch(2)
        knows(cluster, 2, 2, 2)
        for _ in range(60):
            check(cluster.forward(0, X, IDS, W), 2)
        assert len(servers["c"].asked) > asked


def test_no_version_that_all_experts_are_held_of_is_no_answer():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers, timeout_s=0.5) as cluster:
        servers["a"].versions = [3]
        knows(cluster, 3, 1)
        with pytest.raises(WeightsVersionNotHeldError) as said:
            cluster.forward(0, X, IDS, W)
        nothing_under_way(cluster)
        assert "no server of experts 4-7 that holds version 3 of the weights (a: 3; b: 1)" in str(said.value)
        assert "expertctl update SERVER --checkpoint DIR --version N" in str(said.value)


def test_a_version_that_a_caller_asks_for_and_some_servers_lack_is_named_with_the_servers():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers, timeout_s=0.5) as cluster:
        servers["a"].switch(2)
        knows(cluster, 2, 1)
        with pytest.raises(WeightsVersionNotHeldError, match=r"holds version 2 of the weights \(a: 2 and 1; b: 1\)"):
            cluster.forward(0, X, IDS, W, weights_version=2)


def test_without_a_deadline_the_versions_are_named_too():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers, timeout_s=None, policy=Policy(patience_s=0.2)) as cluster:
        servers["a"].versions = [3]
        knows(cluster, 3, 1)
        with pytest.raises(WeightsVersionNotHeldError, match=r"\(a: 3; b: 1\)"):
            cluster.forward(0, X, IDS, W)


def test_a_server_that_only_takes_long_is_late_and_not_of_another_version():
    servers, go = {"a": Versioned(LOW), "b": Versioned(HIGH)}, threading.Event()
    servers["b"].does = lambda request: go.wait(20)
    with cluster_of(servers, timeout_s=0.3) as cluster:
        with pytest.raises(DeadlineExceededError):
            cluster.forward(0, X, IDS, W)
        go.set()


def test_a_hedge_of_another_version_is_not_added():
    """The replica that answers first may have switched, the others not."""
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH), "c": Versioned(LOW)}
    slow = threading.Event()
    servers["a"].does = lambda request: slow.wait(2)
    with cluster_of(servers, policy=Policy(hedge=0.0, stall_s=0.05)) as cluster:
        servers["c"].switch(2)
        for _ in range(8):
            check(cluster.forward(0, X, IDS, W), 1)
        slow.set()


def test_a_caller_may_ask_for_a_version():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers) as cluster:
        for server in servers.values():
            server.switch(2)
        check(cluster.forward(0, X, IDS, W, weights_version=1), 1)
        check(cluster.forward(0, X, IDS, W, weights_version=2), 2)
        with pytest.raises(WeightsVersionNotHeldError):
            cluster.forward(0, X, IDS, W, weights_version=7)
        knows(cluster, 2, 2)
        check(cluster.forward(0, X, IDS, W), 2)
        nothing_under_way(cluster)


def test_a_version_that_one_half_lacks_is_waited_for_as_long_as_a_call_has():
    servers = {"a": Versioned(LOW, [2, 1]), "b": Versioned(HIGH, [2])}
    with cluster_of(servers) as cluster:
        with pytest.raises(WeightsVersionNotHeldError, match=r"version 1 of the weights \(a: 2 and 1; b: 2\)"):
            cluster.forward(0, X, IDS, W, weights_version=1, timeout_s=0.3)
        servers["b"].versions = [2, 1]
        check(cluster.forward(0, X, IDS, W, weights_version=1), 1)
        nothing_under_way(cluster)


def test_a_version_that_one_replica_holds_is_had_from_that_one():
    servers = {"a": Versioned({0: range(8)}, [3, 2]), "b": Versioned({0: range(8)}, [3, 2])}
    with cluster_of(servers) as cluster:
        servers["b"].begin()
        for _ in range(10):
            check(cluster.forward(0, X, IDS, W, weights_version=2), 2)


def test_an_old_server_counts_as_the_first_version():
    servers = {"a": Fake(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers) as cluster:
        answer = cluster.forward(0, X, IDS, W)
        np.testing.assert_allclose(answer.output, WANT, rtol=1e-5, atol=1e-5)
        servers["b"].switch(2)
        answer = cluster.forward(0, X, IDS, W)
        np.testing.assert_allclose(answer.output, WANT, rtol=1e-5, atol=1e-5)


def test_other_weights_under_the_same_version_are_refused():
    servers = {"a": Versioned({0: range(8)}), "b": Versioned({0: range(8)})}
    with cluster_of(servers) as cluster:
        servers["b"].digest_of = lambda version, expert: 1000 * version + expert
        for server in servers.values():
            server.switch(2)
        for member in cluster._members.by_address.values():
            cluster._wake(member)
        until(lambda: sum("other weights" in why for why in cluster.servers.values()) == 1)


def described_again(cluster):
    for member in cluster._members.by_address.values():
        cluster._wake(member)


def test_other_weights_under_the_same_version_are_refused_where_no_expert_is_shared():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    servers["b"].identity_of = lambda version: "sampled:another"
    with cluster_of(servers) as cluster:
        until(lambda: cluster._members.settled)
        with pytest.raises(PlacementError) as refused:
            cluster.forward(0, X, IDS, W)
        (why,) = filter(None, cluster.servers.values())
        assert why in str(refused.value)
        assert "version 1 of the weights: got sampled:" in why
        assert ("a: " in why and "which b serve" in why) or ("b: " in why and "which a serve" in why)
        assert "start it with their checkpoint" in why
        servers["b"].identity_of = lambda version: "sampled:1"
        until(lambda: len(cluster._members.table(0).replicas) == 2)
        check(cluster.forward(0, X, IDS, W), 1)


def test_what_is_published_under_the_same_number_is_not_added_before_it_is_compared():
    """Two trainers: both servers answer with version 2, and what they say of it comes later."""
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        servers["b"].identity_of = lambda version: "sampled:1" if version == 1 else "sampled:another"
        for server in servers.values():
            server.switch(2)
        with contextlib.suppress(DeadlineExceededError, UnavailableError):  # where one of them was described meanwhile
            check(cluster.forward(0, X, IDS, W, timeout_s=1.0), 1)
        until(lambda: any("version 2 of the weights: got sampled:" in why for why in cluster.servers.values()))
        with pytest.raises((DeadlineExceededError, UnavailableError, WeightsVersionNotHeldError)):
            cluster.forward(0, X, IDS, W, weights_version=2, timeout_s=0.5)
        nothing_under_way(cluster)


def test_a_version_before_that_is_of_other_weights_is_not_asked_for():
    servers = {"a": Versioned(LOW, [7, 1]), "b": Versioned(HIGH, [7, 1])}
    servers["b"].identity_of = lambda version: f"sampled:{version if version == 7 else 'another'}"
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W), 7)
        assert not any(cluster.servers.values())
        with pytest.raises((DeadlineExceededError, WeightsVersionNotHeldError)):
            cluster.forward(0, X, IDS, W, weights_version=1, timeout_s=0.5)
        nothing_under_way(cluster)


@pytest.mark.parametrize("identity", ["", "changes:1"])
def test_weights_that_cannot_be_compared_are_added_with_a_warning(identity, caplog):
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH), "c": Versioned(HIGH)}
    servers["b"].identity_of = servers["c"].identity_of = lambda version: identity
    with cluster_of(servers) as cluster:
        for _ in range(3):
            check(cluster.forward(0, X, IDS, W), 1)
            described_again(cluster)
        assert not any(cluster.servers.values())
        (record,) = caplog.records
        assert "cannot be compared" in record.getMessage()


class Restartable(Threaded):
    """Whose connections end with break_all()."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ways = []

    def connect(self, deliver, closed):
        way = super().connect(deliver, closed)
        self.ways.append(way)
        return way

    def break_all(self):
        ways, self.ways = self.ways, []
        for way in ways:
            closed, way._closed = way._closed, lambda error: None
            closed(UnavailableError("connection reset"))


def test_a_restart_with_other_weights_is_found_out_before_the_server_is_asked_again():
    """Its connection is made again by itself, and Describe was asked a moment ago."""
    servers, made = {"a": Versioned(LOW), "b": Versioned(HIGH)}, {}

    def transport(address):
        made[address] = transports(servers, Restartable)(address)
        return made[address]

    with ExpertCluster(list(servers), transport=transport, timeout_s=10.0) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        asked = len(servers["b"].asked)
        servers["b"].identity_of = lambda version: "sampled:another"
        made["b"].break_all()
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            cluster.forward(0, X, IDS, W, timeout_s=0.5)
        assert len(servers["b"].asked) == asked
        assert "b: version 1 of the weights" in cluster.servers["b"]
        servers["b"].identity_of = lambda version: "sampled:1"
        check(cluster.forward(0, X, IDS, W), 1)


def test_a_call_that_servers_outrun_is_tried_until_they_stand_still():
    """More often than a call changes its version at once."""
    servers, left = {"a": Versioned(LOW), "b": Versioned(HIGH)}, [60]

    def outrun(request):
        if left[0]:
            left[0] -= 1
            version = max(server.versions[0] for server in servers.values()) + 1
            for server in servers.values():
                server.versions = [version]

    for server in servers.values():
        server.does = outrun
    with cluster_of(servers, timeout_s=40.0) as cluster:
        answer = cluster.forward(0, X, IDS, W)
        check(answer, answer.weights_version)
        assert left == [0]
        nothing_under_way(cluster)


def test_two_versions_of_the_same_experts_are_no_conflict():
    servers = {"a": Versioned({0: range(8)}), "b": Versioned({0: range(8)})}
    with cluster_of(servers) as cluster:
        servers["a"].switch(2)
        knows(cluster, 2, 1)
        assert not any(cluster.servers.values())


def test_in_an_event_loop_too():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH)}

    async def run():
        async with AsyncExpertCluster(list(servers), transport=transports(servers), timeout_s=10) as cluster:
            check(await cluster.forward(0, X, IDS, W), 1)
            servers["a"].switch(2)
            check(await cluster.forward(0, X, IDS, W), 1)
            servers["b"].switch(2)
            for _ in range(100):
                answer = await cluster.forward(0, X, IDS, W)
                check(answer, answer.weights_version)
                if answer.weights_version == 2:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("never switched")

    asyncio.run(run())


@contextlib.contextmanager
def meanwhile(work, stop):
    """work() runs on a thread of its own, until `stop` is set after the body."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_calls_while_servers_switch_again_and_again_are_of_one_version_each():
    servers = {"a": Versioned(LOW), "b": Versioned(HIGH), "c": Versioned(LOW), "d": Versioned(HIGH)}
    seen, stop = set(), threading.Event()

    def switches():
        version = 1
        while not stop.is_set():
            version += 1
            for server in servers.values():
                server.begin()
                stop.wait(0.01)
            for server in servers.values():
                server.switch(version)
                stop.wait(0.01)

    with cluster_of(servers, policy=Policy(hedge=0.5)) as cluster:
        with meanwhile(switches, stop):
            end_s = time.monotonic() + 20
            for _ in range(200):
                if len(seen) > 1 and time.monotonic() > end_s:
                    break
                answer = cluster.forward(0, X, IDS, W)  # also where they switch faster than a call takes
                check(answer, answer.weights_version)
                seen.add(answer.weights_version)
        assert len(seen) > 1
        nothing_under_way(cluster)


class Rolling(Versioned):
    """Which switches one layer after another, and has one version of each: `of`, by layer."""

    def __init__(self, held, layers=(0, 1, 2)):
        super().__init__(dict.fromkeys(layers, held))
        self.of, self.refused = dict.fromkeys(layers, 1), []

    def serve(self, request):
        self.does(request)
        version = self.of[request.layer]
        if request.weights_version not in (0, version):
            self.refused.append((request.layer, request.weights_version))
            raise WeightsVersionNotHeldError(f"got {request.weights_version}, want {version}")
        self.versions = [version]
        return super().serve(request)

    def describe(self, request):
        of = dict(self.of)
        served = sorted(set(of.values()), reverse=True)
        found = super().describe(request)
        del found.versions[:]
        for layer in found.layers:
            digests = [self.digest_of(of[layer.layer], e.first) for e in layer.held]
            layer.weight_digests[:] = digests
        for v in served:
            layers = [n for n in of if of[n] == v] if len(served) > 1 else []
            found.versions.add(number=v, serving=True, rolling=True, identity=self.identity_of(v), layers=layers)
        return found


def described(cluster):
    """What every server says now is known.  Twice: the first answer may be of a question from before."""
    members = cluster._members.by_address.values()
    for _ in range(2):
        before = {m.address: m.description for m in members}
        for member in members:
            cluster._wake(member)
        until(lambda before=before: all(m.description is not before[m.address] for m in members))


def test_servers_that_roll_at_different_moments_wait_for_each_other_layer_by_layer():
    servers = {"a": Rolling(range(4)), "b": Rolling(range(4, 8)), "c": Rolling(range(4))}
    with cluster_of(servers, policy=Policy(hedge=0.0)) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        for name in "ac":
            servers[name].of[0] = 2
        described(cluster)
        for _ in range(5):
            check(cluster.forward(1, X, IDS, W), 1)
            check(cluster.forward(2, X, IDS, W, weights_version=1), 1)
        assert not any(s.refused for s in servers.values()), "nobody is asked for what it has not"
        with pytest.raises(WeightsVersionNotHeldError, match="no server of experts 4-7 that holds version 2"):
            cluster.forward(0, X, IDS, W, timeout_s=0.3)
        with pytest.raises((WeightsVersionNotHeldError, DeadlineExceededError)):
            cluster.forward(0, X, IDS, W, weights_version=1, timeout_s=0.3)
        servers["b"].of[0] = 2
        check(cluster.forward(0, X, IDS, W), 2)
        described(cluster)
        check(cluster.forward(0, X, IDS, W), 2)
        check(cluster.forward(1, X, IDS, W), 1)
        for server in servers.values():
            server.of = dict.fromkeys(server.of, 2)
        described(cluster)
        for layer in range(3):
            check(cluster.forward(layer, X, IDS, W), 2)
        assert not any(cluster.servers.values()), "digests of a layer are of its version"
        nothing_under_way(cluster)


def test_a_layer_of_which_one_replica_has_the_old_version_still_is_computed_by_that_one():
    servers = {"a": Rolling(range(4)), "b": Rolling(range(4, 8)), "c": Rolling(range(4))}
    with cluster_of(servers, policy=Policy(hedge=0.0)) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        servers["a"].of[0] = servers["c"].of[1] = 2
        described(cluster)
        asked = len(servers["a"].asked)
        for _ in range(10):
            check(cluster.forward(0, X, IDS, W), 1)
        assert len(servers["a"].asked) == asked
        asked = len(servers["c"].asked)
        for _ in range(10):
            check(cluster.forward(1, X, IDS, W), 1)
        assert len(servers["c"].asked) == asked
        assert not any(s.refused for s in servers.values()), "nobody is asked for what it has not"
        assert not any(cluster.servers.values()), "digests of a layer are of its version"
        nothing_under_way(cluster)


def test_other_weights_of_a_layer_under_the_same_version_are_refused_while_servers_roll():
    servers = {"a": Rolling(range(8)), "b": Rolling(range(8))}
    servers["b"].digest_of = lambda version, expert: 100 * version + expert + (version == 2)
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W), 1)
        assert not any(cluster.servers.values())
        for server in servers.values():
            server.of[1] = 2
        for member in cluster._members.by_address.values():
            cluster._wake(member)
        until(lambda: sum("layer 1, experts 0-7: got other weights" in w for w in cluster.servers.values()) == 1)


def test_calls_while_servers_roll_are_of_one_version_each_and_none_fails():
    servers = {"a": Rolling(range(4)), "b": Rolling(range(4, 8))}
    seen, stop = set(), threading.Event()

    def rolls():
        version = 1
        while not stop.is_set():
            version += 1
            for layer in range(3):
                for server in servers.values():
                    stop.wait(0.01)
                    server.of[layer] = version

    with cluster_of(servers, timeout_s=40.0) as cluster:
        with meanwhile(rolls, stop):
            for n in range(100):
                answer = cluster.forward(n % 3, X, IDS, W)
                check(answer, answer.weights_version)
                seen.add(answer.weights_version)
        assert len(seen) > 1
        nothing_under_way(cluster)


# ---- one version for a step of the model -----------------------------------------------------------------------------


class Both(Versioned):
    """Of two layers."""

    def __init__(self, experts, **options):
        super().__init__({0: experts, 1: experts}, **options)


def layers_of(cluster, step):
    return [RemoteExperts(cluster, n, weights_version=step).eval() for n in (0, 1)]


def one_step(layers, began, between=lambda: None):
    """The version of each layer's answer, read from its values, too."""
    tensors, found = [torch.from_numpy(t) for t in (X, IDS, W)], []
    for layer in layers:
        y = layer.wait(layer.start(*tensors)) if began else layer(*tensors)
        found.append(layer.weights_version_seen)
        np.testing.assert_allclose(y, WANT * found[-1], rtol=1e-5, atol=1e-5)
        between()
    return found


@pytest.mark.parametrize("began", [False, True])
def test_servers_that_switch_between_two_layers_give_a_step_of_one_version(began):
    servers = {"a": Both(range(4)), "b": Both(range(4, 8))}

    def serve(*versions):
        for server in servers.values():
            server.versions = [*versions]
        knows(cluster, versions[0], versions[0])

    with cluster_of(servers) as cluster, torch.inference_mode():
        found = one_step(layers_of(cluster, 0), began, lambda: serve(2, 1))
        assert found == [1, 2], "the control: so it is without a StepVersion"
        serve(1)
        step = StepVersion()
        layers = layers_of(cluster, step)
        assert one_step(layers, began, lambda: serve(2, 1)) == [1, 1]
        step.begin()
        assert one_step(layers, began) == [2, 2]
        assert step.least == 2


def test_a_server_that_comes_back_with_old_weights_ends_steps_and_is_warned_of_once(caplog):
    servers = {"a": Both(range(4), versions=(2, 1)), "b": Both(range(4, 8), versions=(2, 1))}
    with cluster_of(servers, timeout_s=0.5) as cluster, torch.inference_mode():
        knows(cluster, 2, 2)
        step = StepVersion()
        layers, free = layers_of(cluster, step), layers_of(cluster, 0)
        assert one_step(layers, False) == [2, 2]
        servers["b"].versions = [1]  # without --held; a holds version 1 still
        knows(cluster, 2, 1)
        assert one_step(free, False) == [1, 1], "the control: calls alone go back to it"
        step.begin()
        with pytest.raises(WeightsVersionNotHeldError, match=r"got 1, want 2.*b: 1") as raised:
            one_step(layers, False)
        assert "expertctl update" in raised.value.message
        for server in servers.values():  # expertctl update b --version 2
            server.versions = [2, 1]
        knows(cluster, 2, 2)
        step.begin()
        assert one_step(layers, False) == [2, 2]
    warned = [r.getMessage() for r in caplog.records if "computed by version 1 of the weights" in r.getMessage()]
    assert len(warned) == 1
    assert "after version 2" in warned[0]
    assert "a: 2 and 1; b: 1" in warned[0]


def test_a_usual_switch_is_not_warned_of(caplog):
    servers = {"a": Both(range(4)), "b": Both(range(4, 8))}
    with cluster_of(servers) as cluster:
        knows(cluster, 1, 1)
        for name, known in (("a", (2, 1)), ("b", (2, 2))):
            servers[name].switch(2)
            knows(cluster, *known)
        check(cluster.forward(0, X, IDS, W), 2)
    assert "computed by version" not in caplog.text
