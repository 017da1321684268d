"""Whether the servers of a model are those of this one: waited for, and compared, one or several."""

from __future__ import annotations

import threading

import pytest
from cluster_kit import E, Fake, H, transports
from waiting import until

from expertd.errors import PlacementError, UnavailableError
from expertd.placement import Placement, Server
from expertd_client import ExpertClient, ExpertCluster, FunctionTransport, OnMissing
from expertd_client.engines.served import DEFAULT_MAX_TOKENS, Found, max_tokens_of

LAYER, INNER = 3, 32
pytestmark = pytest.mark.timeout(60)
FOREVER_S = 50.0
"""Longer than a test may take."""


def halves(**options):
    return {
        "a": Fake({LAYER: range(4)}, inner=INNER, **options),
        "b": Fake({LAYER: range(4, 8)}, inner=INNER, **options),
    }


def found(layer=LAYER, **other):
    sizes = {"experts": E, "hidden_size": H, "intermediate_size": INNER, **other}
    return [Found("layers.3.experts", layer, **sizes)]


def cluster_of(servers, **options):
    return ExpertCluster(list(servers), transport=transports(servers, FunctionTransport), **options)


def test_servers_that_hold_the_layer_together_fit():
    with cluster_of(halves()) as cluster:
        assert max_tokens_of(found(), cluster, FOREVER_S) == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"intermediate_size": 999}, "want 8 experts, hidden size 16, intermediate size 999 as in layers.3.experts"),
        ({"experts": 16}, "want 16 experts, hidden size 16, "),
        ({"experts": 4}, "want 4 experts, hidden size 16, "),
        ({"hidden_size": 17}, "want 8 experts, hidden size 17, "),
    ],
)
@pytest.mark.parametrize("away", ["", "b"])
def test_sizes_of_several_servers_are_compared_whether_all_are_there_or_not(other, says, away):
    servers = halves()
    if away:
        servers[away].away = True
    with cluster_of(servers) as cluster, pytest.raises(PlacementError) as refused:
        max_tokens_of(found(**other), cluster, FOREVER_S)
    assert "a: layer 3: got 8 experts (4 held), hidden size 16, intermediate size 32, " in str(refused.value)
    assert says in str(refused.value)


def test_a_layer_that_no_server_has_is_refused_at_once():
    with cluster_of(halves()) as cluster, pytest.raises(PlacementError, match="layer 4: got no server of this layer"):
        max_tokens_of(found(layer=4), cluster, FOREVER_S)


def test_experts_that_no_server_has_are_refused_at_once():
    servers = {"a": halves()["a"]}
    with cluster_of(servers) as cluster, pytest.raises(PlacementError, match="no server for experts 4-7"):
        max_tokens_of(found(), cluster, FOREVER_S)


def test_a_server_of_another_model_is_no_server_that_is_waited_for():
    servers = halves()
    with cluster_of(servers) as cluster:
        max_tokens_of(found(), cluster, FOREVER_S)
        servers["b"].fingerprint = "another"
        until(lambda: cluster.servers["b"])
        with pytest.raises(PlacementError, match=r"no server for experts 4-7.*b: fingerprint: got another"):
            max_tokens_of(found(), cluster, FOREVER_S)


def test_one_of_two_servers_that_is_dead_is_named_with_the_reason():
    servers = halves()
    servers["b"].away = True
    with cluster_of(servers) as cluster:
        with pytest.raises(UnavailableError, match=r"layer 3: got no server for experts 4-7.*b: away") as refused:
            max_tokens_of(found(), cluster, 0.2)
        assert refused.value.retryable
        servers["b"].away = False
        max_tokens_of(found(), cluster, FOREVER_S)


def test_a_server_that_comes_late_is_waited_for():
    servers = halves()
    servers["b"].away = True
    answers = []
    with cluster_of(servers) as cluster:
        waits = threading.Thread(target=lambda: answers.append(max_tokens_of(found(), cluster, FOREVER_S)))
        waits.start()
        before = servers["b"].describes
        until(lambda: servers["b"].describes > before + 3)
        assert not answers
        servers["b"].away = False
        waits.join(FOREVER_S)
    assert answers == [DEFAULT_MAX_TOKENS]


def test_a_placement_says_who_must_be_there():
    servers = halves()
    servers["b"].away = True
    placed = Placement((Server("a", {LAYER: (0, 1, 2, 3)}), Server("b", {LAYER: (4, 5, 6, 7)})), {LAYER: E}, 1, "f00d")
    made = transports(servers, FunctionTransport)
    away = pytest.raises(UnavailableError, match=r"experts 4-7.*b: away")
    with ExpertCluster(placed, transport=made) as cluster, away:
        max_tokens_of(found(), cluster, 0.2)


def test_a_list_of_servers_that_changes_is_waited_for():
    class Growing:
        every_s, addresses = 0.02, ("a",)

        def read(self):
            return self.addresses

    servers, source = halves(), Growing()
    with ExpertCluster(source, transport=transports(servers, FunctionTransport)) as cluster:
        with pytest.raises(PlacementError, match="no server for experts 4-7"):
            max_tokens_of(found(), cluster, 0.2)
        source.addresses = ("a", "b")
        max_tokens_of(found(), cluster, FOREVER_S)


def test_who_leaves_out_what_is_missing_waits_for_nobody():
    servers = halves()
    servers["b"].away = True
    with cluster_of(servers, on_missing=OnMissing.SKIP) as cluster:
        assert max_tokens_of(found(), cluster, FOREVER_S) == DEFAULT_MAX_TOKENS


def test_one_server_that_is_dead_is_unavailable_and_not_a_deadline():
    says = (
        r"^127\.0\.0\.1:9: no answer within 0\.2 s: got Connection refused, want an expertd server that listens there$"
    )
    with ExpertClient("127.0.0.1:9") as client, pytest.raises(UnavailableError, match=says) as refused:
        max_tokens_of(found(), client, 0.2)
    assert refused.value.retryable
