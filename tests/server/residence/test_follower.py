"""The layer that gains most is moved; what fails or is not to be touched stays."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from expertd_kernels.measure.surface import Point
from expertd_server.boot.assignment import BootError
from expertd_server.residence.follower import Follower

E = 16
FAST = tuple(Point(e, e * r, 10.0 + e) for e in (1, 4, E) for r in (1, 16))
SLOW = tuple(Point(e, e * r, 20.0 + 20 * e) for e in (1, 4, E) for r in (1, 16))


def booted(layer, fast=range(4), surfaces=(FAST, SLOW)):
    rest = [e for e in range(E) if e not in fast]
    parts = [
        (site, SimpleNamespace(surface=surface, assignment=SimpleNamespace(held=tuple(held), decision=NONE)))
        for site, (held, surface) in enumerate(zip((fast, rest), surfaces, strict=True))
        if held
    ]
    info = SimpleNamespace(layer=layer, num_experts=E)
    each = [part for _, part in parts]
    return SimpleNamespace(parts=parts, each=each, assignment=SimpleNamespace(info=info, held=tuple(range(E))))


NONE = SimpleNamespace(chosen=None)


@dataclass
class Residence:
    booted: dict = field(default_factory=dict)
    before: object = None
    error: Exception | None = None
    changed: bool = False
    moved: list = field(default_factory=list)

    def rearrange(self, layer, where, stopped):
        if self.error is not None:
            raise self.error
        if not self.changed:
            self.moved.append((layer.assignment.info.layer, where))
        return not self.changed


def report(layer, hot):
    routes = np.full(E, 1000)
    routes[hot] = 60000
    return SimpleNamespace(
        layer=SimpleNamespace(layer=layer, num_experts=E, held=range(E)), expert_tokens=routes, batches=5000, tokens=8
    )


@pytest.fixture
def residence():
    return Residence({0: booted(0), 1: booted(1)})


@pytest.fixture
def follower(residence):
    return Follower(residence, ("cuda:0", "cpu"), 1 << 20, clock=lambda: 5.0)


def test_it_moves_what_is_used_and_counts_it(residence, follower, caplog):
    assert follower.step() > 0
    assert residence.moved == []
    follower.count(report(0, [1]))
    follower.count(report(1, [8, 9]))
    with caplog.at_level("INFO"):
        follower.step()
    ((layer, where),) = residence.moved
    assert layer == 1
    assert [e for e in range(E) if where[e] == 0] == [2, 3, 8, 9]
    assert follower.moves._replace(nbytes=0) == (4, 1, 0, 0)
    assert "layer 1: experts 8,9 to cuda:0, 0,1 to cpu" in caplog.text.replace("8-9", "8,9").replace("0-1", "0,1")


@pytest.mark.parametrize("why", ["before", "surface", "one device", "changed"])
def test_it_leaves_alone_what_it_must(residence, follower, why):
    follower.count(report(1, [8, 9]))
    if why == "before":
        residence.before = object()
    elif why == "surface":
        residence.booted[1] = booted(1, surfaces=(FAST, ()))
    elif why == "one device":
        residence.booted[1] = booted(1, fast=())
    else:
        residence.changed = True
    follower.step()
    assert residence.moved == []
    assert follower.moves == (0, 0, 0, 0)


def test_a_move_that_fails_is_counted_and_not_tried_again_at_once(residence, follower, caplog):
    follower.count(report(1, [8, 9]))
    residence.error = BootError("no room for a layer beside those held")
    assert follower.step() >= 30
    assert follower.moves == (0, 0, 0, 1)
    assert "layer 1: experts could not be moved: no room" in caplog.text


def test_it_ends(follower):
    follower.start()
    follower.close()
    assert not follower._thread.is_alive()
