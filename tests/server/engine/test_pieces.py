"""Which pieces of a batch are captured: as many as the plan of memory counts, and a bounded number of others."""

from itertools import product
from types import SimpleNamespace

import pytest

from expertd_server.engine import core as c
from expertd_server.engine.pieces import Pieces
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import BATCH_SLOTS, MOST_OTHERS, graph_count, sizes_up_to


def layer(number=0, top_k=8, H=2048, coded=False):
    return ServedLayer(
        number, 128, range(128), top_k, H, 768, experts=None, backend="b", capturable=True, takes_e4m3=coded
    )


def came(pieces, served, *, batch_slot=0, rows=1, top_k=8, on_input=0, whole=0, nbytes=100):
    """A batch of this size has run; what is wanted is captured.  How many."""
    ran = SimpleNamespace(batch_slot=batch_slot, top_k=top_k, router_weight_on_input=on_input, whole=whole)
    wanted = pieces.wanted(served, ran, rows)
    for piece in wanted:
        pieces.add(served, piece, f"{piece}", nbytes)
    return len(wanted)


def every(pieces, layers, tokens, routes):
    for _, served, batch_slot, rows, k in product(range(3), layers, range(BATCH_SLOTS), sizes_up_to(tokens), routes):
        came(pieces, served, batch_slot=batch_slot, rows=rows, top_k=k)


@pytest.mark.parametrize(("layers", "tokens", "warm"), [(1, 1, ()), (4, 300, ()), (3, 4096, (1, 6)), (48, 4096, ())])
def test_what_is_captured_is_what_the_plan_counts(layers, tokens, warm):
    pieces = Pieces(warm)
    every(pieces, [layer(n) for n in range(layers)], tokens, (8, *warm))
    assert len(pieces) == graph_count([(2048, {8, *warm}, False)] * layers, tokens)
    assert pieces.others == 0


def test_layers_that_take_e4m3_share_what_brings_it_with_their_like_alone():
    pieces, layers = Pieces(), [layer(0), layer(1, coded=True), layer(2, coded=True)]
    every(pieces, layers, 300, (8,))
    assert len(pieces) == graph_count([(2048, {8}, s.takes_e4m3) for s in layers], 300)
    assert pieces.others == 0
    parts = {p.part for p in pieces._kept}
    assert parts == set(range(7)), "of both kinds"
    came(pieces, layers[1], top_k=3)
    came(pieces, layers[1], top_k=3)
    assert pieces.others == 3, "experts, what brings them, and the whole of a number of routes that nobody planned"


def test_a_size_is_captured_when_it_comes_again_and_once():
    pieces, served = Pieces(), layer()
    assert came(pieces, served) == 0, "once is no reason to capture"
    assert came(pieces, served) == 4, "experts, collect, deliver, the whole"
    assert came(pieces, served) == 0
    other = layer(1)
    assert came(pieces, other) == 0
    assert came(pieces, other) == 2, "collect and deliver serve all layers of a hidden size"
    assert came(pieces, served, rows=256) + came(pieces, served, rows=256) == 4, "routes alone instead of the whole"
    assert pieces.nbytes == 10 * 100


def test_callers_who_vary_their_routes_get_graphs_up_to_a_bound():
    pieces, served = Pieces(most_others=30), layer()
    for k, _ in product(range(1, 129), range(3)):
        came(pieces, served, top_k=k)
    assert 30 <= pieces.others < 30 + 4, "a batch that was begun is captured whole"
    planned = len(pieces) - pieces.others
    assert planned == 4, "the layer's own number of routes"
    for k, _ in product(range(1, 129), range(3)):
        assert came(pieces, served, top_k=k, batch_slot=1) == 0 or k == 8, "eager from now on, but what the plan counts"
    assert MOST_OTHERS == 1024


@pytest.mark.parametrize("more", [{"on_input": 1}, {"top_k": 3}, {"whole": 1, "rows": 64}])
def test_what_the_plan_does_not_count_is_an_other(more):
    pieces, served = Pieces(most_others=1), layer()
    came(pieces, served, **more)
    came(pieces, served, **more)
    assert pieces.others >= 1
    assert pieces.full
    size = {**more, "batch_slot": 1}
    came(pieces, served, **size)
    taken = came(pieces, served, **size)
    assert taken == (3 if "whole" in more else 0), "experts, collect and deliver of a known size are planned"


def test_a_warm_number_of_routes_is_no_other():
    pieces = Pieces(warm_routes=(3,), most_others=0)
    came(pieces, layer(), top_k=3)
    assert came(pieces, layer(), top_k=3) == 0, "another layer's first"
    served = layer(1)
    came(pieces, served, top_k=3)
    assert came(pieces, served, top_k=3) == 4
    assert pieces.others == 0


def test_layers_that_go_take_their_graphs_and_make_room():
    pieces, gone, stays = Pieces(most_others=2), layer(0), layer(1)
    for served in (gone, stays):
        came(pieces, served)
        came(pieces, served)
    came(pieces, gone, top_k=3)
    came(pieces, gone, top_k=3)
    assert pieces.full
    destroyed = pieces.forget({gone.generation})
    assert len(destroyed) == 4, "experts and the whole, of two numbers of routes"
    assert all(f"generation={gone.generation}," in graph for graph in destroyed)
    assert (len(pieces), pieces.nbytes) == (5, 500), "what all layers share stays, its collect of 3 routes among it"
    assert not pieces.full
    assert len(pieces.clear()) == 5
    assert (len(pieces), pieces.nbytes, pieces.others) == (0, 0, 0)
    assert came(pieces, stays) == 4, "addresses have changed, so what comes again is captured again"


def test_what_was_seen_is_bounded(monkeypatch):
    monkeypatch.setattr("expertd_server.engine.pieces._MOST_SEEN", 10)
    pieces, served = Pieces(), layer()
    for k in range(1, 100):
        came(pieces, served, top_k=k)
    assert len(pieces._seen) <= 11


def test_the_parts_are_those_of_the_core():
    pieces, served = Pieces(), layer()
    ran = SimpleNamespace(batch_slot=1, top_k=8, router_weight_on_input=0, whole=0)
    pieces.wanted(served, ran, 128)
    parts = {p.part: (p.generation, *p[2:]) for p in pieces.wanted(served, ran, 128)}
    own = served.generation
    assert parts == {
        c.EXPERTS: (own, 1, 128, 8, 0),
        c.COLLECT: (0, 1, 128, 8, 2048),
        c.DELIVER: (0, 1, 128, 0, 2048),
        c.COLLECT_ROUTES: (0, 1, 128, 8, 2048),
    }


def test_a_layer_that_replaces_another_is_to_have_its_graphs():
    pieces, old, new = Pieces(), layer(), layer()
    for rows in (1, 16):
        for _ in range(2):
            came(pieces, old, rows=rows)
    wanted = pieces.like(new, old.generation)
    assert {(p.part, p.rows) for p in wanted} == {(c.WHOLE, 1), (c.EXPERTS, 1), (c.EXPERTS, 16)}
    assert {p.generation for p in wanted} == {new.generation}
    pieces.add(new, wanted[0], "graph", 100)
    assert pieces.like(new, old.generation) == wanted[1:]
    assert pieces.of(new.generation) == {wanted[0]: "graph"}


def test_graphs_that_the_plan_does_not_count_are_not_made_for_a_new_layer_beyond_their_bound():
    pieces, old, new = Pieces(most_others=2), layer(), layer()
    for _ in range(2):
        came(pieces, old, top_k=3)
    assert pieces.full
    assert pieces.like(new, old.generation) == []
