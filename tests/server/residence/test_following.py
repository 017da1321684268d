"""Which experts change devices: those that make a layer quicker, and none by chance."""

import numpy as np
import pytest

from expertd.common.surface import Surface
from expertd_server.residence.following import Counted, Following, better_shares, site_us

E, K = 64, 4


def plane(start, expert, route):
    grid = [(e, e * r) for e in (1, 2, 4, 8, 16, 32, E) for r in (1, 4, 16, 64)]
    return Surface(tuple((e, n, start + expert * e + route * n) for e, n in grid))


FAST, SLOW = plane(10, 1, 0.01), plane(20, 10, 1)


def counted(routes, batches):
    out = Counted(len(routes))
    out.add(np.asarray(routes), batches, 0.0)
    return out


def where(fast):
    return np.array([0 if e in fast else 1 for e in range(E)])


def test_even_routes_move_nothing_whatever_chance_makes_of_them():
    rng = np.random.default_rng(0)
    for batches in (1, 10, 1000, 30000):
        for _ in range(20):
            drawn = rng.multinomial(batches * 8 * K, np.full(E, 1 / E))
            assert better_shares(counted(drawn, batches), where(range(16)), [FAST, SLOW]) is None, batches


def test_what_is_used_most_changes_places_with_what_is_used_least():
    routes = np.full(E, 1000)
    routes[[20, 30, 40]] = 50000
    routes[[2, 5, 9]] = 10
    found = better_shares(counted(routes, 10000), where(range(16)), [FAST, SLOW])
    assert found.where[[20, 30, 40]].tolist() == [0, 0, 0]
    assert found.where[[2, 5, 9]].tolist() == [1, 1, 1]
    assert (found.where == 0).sum() == 16, "each device has as many as before"
    assert found.moved == 6
    share = routes / routes.sum()
    us = site_us(share, routes.sum() / 10000, found.where, [FAST, SLOW])
    assert found.after_us == pytest.approx(us.max())
    assert found.after_us < 0.97 * found.before_us


def test_devices_that_are_alike_get_alike_much():
    routes = np.full(E, 100)
    routes[:8] = 20000
    found = better_shares(counted(routes, 5000), where(range(32)), [SLOW, SLOW])
    assert 3 <= (found.where[:8] == 0).sum() <= 5
    a, b = site_us(routes / routes.sum(), routes.sum() / 5000, found.where, [SLOW, SLOW])
    assert a == pytest.approx(b, rel=0.1)


def test_what_gains_little_moves_nothing():
    routes = np.full(E, 10000)
    routes[40], routes[3] = 14000, 10000
    assert better_shares(counted(routes, 10000), where(range(16)), [FAST, SLOW]) is None


def test_what_moved_does_not_move_back_for_a_wavering():
    rng = np.random.default_rng(1)
    share = np.arange(1, E + 1) ** -1.1
    share /= share.sum()
    place = where(range(40, 56))
    moves = []
    for _ in range(30):
        found = better_shares(counted(rng.multinomial(40000, share), 1250), place, [FAST, SLOW])
        moves.append(0 if found is None else found.moved)
        place = place if found is None else found.where
    assert moves[0] > 0
    assert sum(moves[2:]) == 0, moves


def test_experts_of_no_device_stay_out():
    place = where(range(16))
    place[[50, 51]] = -1
    routes = np.full(E, 1000)
    routes[20], routes[[50, 51]] = 90000, 0
    found = better_shares(counted(routes, 10000), place, [FAST, SLOW])
    assert found.where[[50, 51]].tolist() == [-1, -1]


def test_of_several_layers_the_one_that_gains_most_is_first_and_old_routes_fade():
    f = Following(rate=1000, half_s=10.0)
    mild, strong = np.full(E, 1000), np.full(E, 1000)
    mild[20], strong[[20, 21, 22]] = 8000, 80000
    f.count(0, mild, 3000, 0.0)
    f.count(1, strong, 3000, 0.0)
    layers = {n: (where(range(16)), [FAST, SLOW]) for n in (0, 1, 2)}
    assert f.best(layers, 0.0)[0] == 1
    assert f.best({2: layers[2]}, 0.0) is None, "nothing was counted there"
    turned = np.full(E, 1000)
    turned[0] = 60000
    for i in range(20):
        f.count(1, turned // 20, 150, 100.0 + i)
    found = f.best({1: layers[1]}, 120.0)
    assert found is None, "what is used now is on the quick device; what was used once is forgotten"


def test_bytes_a_second_bound_how_often():
    f = Following(rate=1000)
    assert f.rest_s(5000, 2.0) == pytest.approx(3.0)
    assert f.rest_s(5000, 9.0) == 0
