"""A cluster's answers: whoever holds what, they are those of one server, and their bits depend on nobody's pace."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from cluster_kit import E, Fake, H, Threaded, batch, experts_of, transports
from waiting import until

from expertd.errors import (
    BadDtypeError,
    BadShapeError,
    DeadlineExceededError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    PlacementError,
    QueueFullError,
    RequestCancelledError,
    UnsupportedCombinationError,
)
from expertd.placement import Placement, Server
from expertd_client import Forwarder, Synthetic
from expertd_client.cluster import ExpertCluster, OnMissing
from expertd_client.exchange.session import Session

ALL = range(E)
LAYOUTS = {
    "one": [ALL],
    "two": [range(4), range(4, 8)],
    "uneven": [range(1), range(1, 8)],
    "three": [(0, 3, 6), (1, 4, 7), (2, 5)],
    "eight": [(e,) for e in ALL],
    "replicas": [range(4), range(4, 8), range(4)],
    "whole replicas": [ALL, ALL],
    "overlapping": [range(6), range(3, 8), (0, 7)],
}


def servers_of(layout, **options):
    return {f"s{n}": Fake({0: tuple(held), 3: tuple(held)}, **options) for n, held in enumerate(layout)}


def cluster_of(servers, kind=Threaded, **options):
    return ExpertCluster(list(servers), transport=transports(servers, kind), timeout_s=10.0, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_the_answer_is_that_of_one_server(name, tokens):
    servers = servers_of(LAYOUTS[name])
    x, ids, w = batch(tokens)
    ids[::7, 1] = -1
    want, routes = experts_of(x, ids, w, ALL)
    with cluster_of(servers) as cluster:
        assert isinstance(cluster, Forwarder)
        for layer in (0, 3):
            answer = cluster.forward(layer, x, ids, w)
            assert answer.output.shape == (tokens, H)
            assert answer.output.dtype == np.float32
            np.testing.assert_allclose(answer.output, want, rtol=1e-5, atol=1e-6)
            assert answer.routes_computed == routes == sum(part.routes for part in answer.parts)
            assert answer.missing.shape == (0, 2)
    for address, server in servers.items():
        for _, _, sent, _ in server.asked:
            assert (sent >= 0).any(axis=1).all() or name == "one" or name == "whole replicas", "a token without a route"
            assert set(sent.ravel().tolist()) <= {-1, *server.held[0]}, (
                f"{address} was sent routes that it does not hold"
            )


@pytest.mark.timeout(60)
def test_it_says_what_each_server_said_and_how_messages_travel():
    servers = servers_of(LAYOUTS["three"])
    servers["s1"].away = True
    with cluster_of(servers) as cluster:
        described, sessions = cluster.describe(), cluster.session()
        assert {a: d.layers[0].held[0].first for a, d in described.items()} == {"s0": 0, "s2": 2}
        assert sessions == {"s0": Session(), "s2": Session()}
        servers["s1"].away = False
        cluster.wait_for_layers([0, 3])
        assert list(cluster.session()) == list(cluster.describe()) == list(servers)
        servers["s1"].away = True
        until(lambda: cluster.servers["s1"])
        assert list(cluster.describe()) == list(servers), "what it said last"
    with pytest.raises(RequestCancelledError):
        cluster.wait_for_layers([0, 9])


@pytest.mark.timeout(60)
def test_bits_do_not_depend_on_the_order_of_answers_nor_on_the_replica():
    servers = servers_of([(0, 3, 6), (1, 4, 7), (2, 5), (1, 4, 7), (0, 3, 6)])
    rng = np.random.default_rng(0)
    x, ids, w = batch(33)
    for server in servers.values():
        server.does = lambda request: time.sleep(rng.random() * 0.01)
    outputs, who = set(), set()
    with cluster_of(servers) as cluster:
        for _ in range(30):
            answer = cluster.forward(0, x, ids, w)
            outputs.add(answer.output.tobytes())
            who.add(tuple(part.server for part in answer.parts))
    assert len(outputs) == 1
    assert len(who) > 1, "both replicas were asked"


@pytest.mark.timeout(60)
def test_one_message_for_each_server_and_batches_are_cut_to_what_it_takes():
    servers = servers_of([range(4), range(4, 8)], max_tokens=7)
    servers["s1"].max_tokens = 16
    x, ids, w = batch(40)
    with cluster_of(servers) as cluster:
        answer = cluster.forward(0, x, ids, w)
        np.testing.assert_allclose(answer.output, experts_of(x, ids, w, ALL)[0], rtol=1e-5, atol=1e-6)
        assert [len(part[1]) for part in servers["s1"].asked] == [16, 16, sum(p.tokens for p in answer.parts[6:]) - 32]
        for server in servers.values():
            server.asked.clear()
        cluster.forward(0, x[:7], ids[:7], w[:7])
    assert [len(server.asked) for server in servers.values()] == [1, 1]


DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f32_sums", [False, True])
def test_dtypes_and_torch(dtype, f32_sums):
    x, ids, w = batch(9, dtype=DTYPES[dtype])
    want, _ = experts_of(x, ids, w, ALL)
    bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[dtype]
    name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    tx = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, name))
    with cluster_of(servers_of([range(4), range(4, 8), range(4)]), f32_sums=f32_sums) as cluster:
        plain = cluster.forward(0, x, ids.astype(np.int64), w.astype(DTYPES[dtype])).output
        tensor = cluster.forward(0, tx, torch.from_numpy(ids), torch.from_numpy(w)).output
        wide = cluster.forward(0, x, ids, w, output_dtype="f32").output
        out, tout = np.full_like(x, 7), torch.full_like(tx, 7.0)
        assert cluster.forward(0, x, ids, w, out=out).output is out
        assert cluster.forward(0, tx, torch.from_numpy(ids), torch.from_numpy(w), out=tout).output is tout
    assert plain.dtype == x.dtype
    assert tensor.dtype == tx.dtype
    assert wide.dtype == np.float32
    error = np.linalg.norm(wide - want) / np.linalg.norm(want)
    assert error < 1e-6
    for got in (plain, out, tensor.float().numpy(), tout.float().numpy()):
        assert np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want) < bound
    assert (tout.float().numpy() == out.astype(np.float32)).all()


@pytest.mark.timeout(60)
def test_sums_in_f32_round_once():
    """Eight parts in bf16, each rounded: the difference must show, or f32_sums does nothing."""
    servers = servers_of(LAYOUTS["eight"])
    x, ids, w = batch(64, dtype=ml_dtypes.bfloat16, top_k=8)
    want = experts_of(x, ids, w, ALL)[0]
    errors = {}
    for f32_sums in (False, True):
        with cluster_of(servers, f32_sums=f32_sums) as cluster:
            got = cluster.forward(0, x, ids, w).output.astype(np.float32)
        errors[f32_sums] = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert errors[True] < 2e-3
    assert errors[False] > errors[True]


@pytest.mark.timeout(60)
def test_what_is_refused_says_why():
    x, ids, w = batch(4)
    with cluster_of(servers_of([range(4), range(4, 8)])) as cluster:
        with pytest.raises(LayerNotHeldError, match=r"layer 1, want one of layers 0,3"):
            cluster.forward(1, x, ids, w)
        with pytest.raises(ExpertIdOutOfRangeError, match="got 8, want 0 to 7"):
            cluster.forward(0, x, np.full_like(ids, 8), w)
        with pytest.raises(ExpertIdOutOfRangeError, match="got -2"):
            cluster.forward(0, x, np.full_like(ids, -2), w)
        with pytest.raises(UnsupportedCombinationError, match="Synthetic"):
            cluster.forward(0, Synthetic((4, H), 1), ids, w)
        with pytest.raises(UnsupportedCombinationError, match="digest"):
            cluster.forward(0, x, ids, w, digest=True)
        with pytest.raises(BadShapeError, match="out"):
            cluster.forward(0, x, ids, w, out=np.empty((3, H), np.float32))
        with pytest.raises(BadDtypeError, match="out"):
            cluster.forward(0, x, ids, w, out=np.empty((4, H), np.float16))
        with pytest.raises(BadDtypeError, match="out"):
            cluster.forward(0, x, ids, w, out=torch.empty((4, H)))
    with pytest.raises(RequestCancelledError, match="closed"):
        cluster.forward(0, x, ids, w)
    for wrong, says in (([], "at least one"), ("s0", "a list of addresses"), (["a", "a"], "each address once")):
        with pytest.raises(PlacementError, match=says):
            ExpertCluster(wrong)


@pytest.mark.timeout(60)
def test_experts_without_a_server():
    servers = servers_of([range(3), range(5, 8)])
    x, ids, w = batch(20)
    ids[0] = (3, 4, -1)
    held = [0, 1, 2, 5, 6, 7]
    gone = np.isin(ids, [3, 4])
    with cluster_of(servers) as cluster:
        with pytest.raises(PlacementError, match="no server for experts 3-4"):
            cluster.forward(0, x, ids, w)
        skipped = cluster.forward(0, x, ids, w, on_missing=OnMissing.SKIP)
        scaled = cluster.forward(0, x, ids, w, on_missing=OnMissing.RENORMALIZE)
    want, routes = experts_of(x, ids, w, held)
    np.testing.assert_allclose(skipped.output, want, rtol=1e-5, atol=1e-6)
    assert (skipped.output[0] == 0).all()
    for answer in (skipped, scaled):
        assert answer.routes_computed == routes
        assert answer.missing.tolist() == [[t, int(ids[t, k])] for t, k in np.argwhere(gone)]
    left = np.where(gone | (ids < 0), 0, w).sum(axis=1)
    factor = np.where(left > 0, np.where(ids >= 0, w, 0).sum(axis=1) / np.maximum(left, 1e-9), 1.0)
    assert factor.max() > 1.2
    np.testing.assert_allclose(scaled.output, want * factor[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(60)
def test_a_placement_says_who_is_asked_for_what():
    servers = servers_of([ALL, ALL])
    placement = Placement((Server("s0", {0: (0, 1, 2)}), Server("s1", {0: (3, 4, 5, 6, 7)})), {0: E}, 4, "f00d")
    x, ids, w = batch(10)
    with ExpertCluster(placement, transport=transports(servers), timeout_s=10.0) as cluster:
        answer = cluster.forward(0, x, ids, w)
        np.testing.assert_allclose(answer.output, experts_of(x, ids, w, ALL)[0], rtol=1e-5, atol=1e-6)
        assert answer.placement_epoch == 4
    for server in servers.values():
        ((_, _, sent, _),) = server.asked
        assert set(sent.ravel().tolist()) - {-1} <= ({0, 1, 2} if server is servers["s0"] else {3, 4, 5, 6, 7})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("what", "says"), [({"fingerprint": "bad"}, "fingerprint"), ({"experts": 9}, "experts of layer")]
)
def test_a_server_of_another_model_is_not_asked(what, says):
    servers = servers_of([range(4), range(4, 8)]) | {"odd": Fake({0: tuple(ALL)}, **what)}
    placement = Placement(tuple(Server(a, {0: s.held[0]}) for a, s in servers.items()), {0: E}, 1, "f00d")
    x, ids, w = batch(10)
    with ExpertCluster(placement, transport=transports(servers), timeout_s=10.0) as cluster:
        until(lambda: not cluster.servers["s0"] and not cluster.servers["s1"])
        for _ in range(10):
            cluster.forward(0, x, ids, w)
        assert says in cluster.servers["odd"] or "experts of layer" in cluster.servers["s0"] + cluster.servers["s1"]
    assert not servers["odd"].asked


@pytest.mark.timeout(60)
def test_futures_and_deadlines():
    servers = servers_of([range(4), range(4, 8)])
    hold = threading.Event()
    servers["s1"].does = lambda request: hold.wait(5)
    x, ids, w = batch(10)
    with cluster_of(servers) as cluster:
        late = cluster.submit(0, x, ids, w)
        gone = cluster.submit(0, x, ids, w)
        with pytest.raises(DeadlineExceededError):
            cluster.forward(0, x, ids, w, timeout_s=0.1)
        partial = cluster.forward(0, x, ids, w, timeout_s=0.1, on_missing=OnMissing.SKIP)
        np.testing.assert_allclose(partial.output, experts_of(x, ids, w, range(4))[0], rtol=1e-5, atol=1e-6)
        assert partial.missing.tolist() == [[t, int(ids[t, k])] for t, k in np.argwhere(ids >= 4)]
        assert gone.cancel()
        assert gone.cancelled()
        assert not late.done()
        hold.set()
        np.testing.assert_allclose(late.result(5).output, experts_of(x, ids, w, ALL)[0], rtol=1e-5, atol=1e-6)
        assert not late.cancel()
        stuck = threading.Event()
        servers["s1"].does = lambda request: stuck.wait(1)
        waiting = cluster.submit(0, x, ids, w)
    with pytest.raises(RequestCancelledError):
        waiting.result(5)
    stuck.set()


@pytest.mark.timeout(60)
def test_a_full_queue_is_waited_for():
    servers = servers_of([range(4), range(4, 8)])
    refusals = iter([True, True, True])

    def full(request):
        if next(refusals, False):
            raise QueueFullError("full", retry_after_us=20_000)

    servers["s1"].does = full
    x, ids, w = batch(10)
    with cluster_of(servers) as cluster:
        begin_s = time.monotonic()
        answer = cluster.forward(0, x, ids, w)
        assert time.monotonic() - begin_s >= 0.06, "the server's advice was kept"
    np.testing.assert_allclose(answer.output, experts_of(x, ids, w, ALL)[0], rtol=1e-5, atol=1e-6)
    assert len(servers["s1"].asked) == 4
    assert len(servers["s0"].asked) == 1
