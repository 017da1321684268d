"""Moves experts among the devices that share layers while they are served, as routing changes (--move-rate).

    follower = Follower(residence, ("cuda:0", "cpu"), rate=200 << 20)
    follower.count(report)          each batch: which experts it used
    follower.start()                a thread of its own looks, and moves the layer that gains most
    follower.close()

A layer whose experts move is packed anew beside the one that is served, checked, and then served instead, so no call
waits for it or fails.  The bytes of the packed weights bound how often that is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from expertd.common.ranges import format_ranges
from expertd.common.surface import Surface
from expertd_kernels.backends.footprint import footprint
from expertd_server.boot.assignment import BootError
from expertd_server.boot.layers import Booted, Stopped
from expertd_server.engine.report import BatchReport, Moves
from expertd_server.residence.background import stand_back
from expertd_server.residence.following import Better, Following
from expertd_server.residence.residence import Residence

__all__ = ["Follower"]

log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""How often it looks whether a layer would gain."""
_FAILED_S = 60.0
"""How long nothing is tried after a move failed."""


class Follower:
    """devices: as in --device, in their order; rate: bytes of packed weights a second; clock: seconds."""

    def __init__(
        self,
        residence: Residence,
        devices: Sequence[str],
        rate: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moves = Moves()
        self._residence, self._devices, self._clock = residence, tuple(devices), clock
        self._following = Following(rate)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expertd-follow", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def close(self) -> None:
        """A layer that is being made is let go of first."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def count(self, b: BatchReport) -> None:
        """Batches of a layer were computed."""
        layer = b.layer
        routes = np.zeros(layer.num_experts, np.int64)
        routes[np.asarray(layer.held, np.int64)] = b.expert_tokens
        self._following.count(layer.layer, routes, b.batches, self._clock())

    def step(self) -> float:
        """Move the layer that gains most, if any does.  After how many seconds to look again."""
        begin_s = self._clock()
        found = self._best()
        if found is None:
            return _LOOK_S
        booted, better = found
        nbytes = _nbytes(booted)
        if not self._move(booted, better):
            return _FAILED_S
        m = self.moves
        self.moves = Moves(m.experts + better.moved, m.layers + 1, m.nbytes + nbytes, m.failed)
        return self._following.rest_s(nbytes, self._clock() - begin_s)

    def _run(self) -> None:
        stand_back()
        wait_s = _LOOK_S
        while not self._closed.wait(wait_s):
            try:
                wait_s = self.step()
            except Exception:  # following must not end the serving
                log.exception("experts could not be moved")
                self._fail()
                wait_s = _FAILED_S

    def _best(self) -> tuple[Booted, Better] | None:
        if self._residence.before is not None:
            return None  # a move would let go of the weights that a rollback goes back to
        layers, booted = {}, dict(self._residence.booted)
        for layer, b in booted.items():
            surfaces = _surfaces(b, len(self._devices))
            if surfaces is not None:
                layers[layer] = _where(b), surfaces
        found = self._following.best(layers, self._clock())
        return None if found is None else (booted[found[0]], found[1])

    def _move(self, booted: Booted, better: Better) -> bool:
        """False: it could not be made, and nothing has changed."""
        layer = booted.assignment.info.layer
        before, begin_s = _where(booted), self._clock()
        where = {e: int(better.where[e]) for e in booted.assignment.held}
        try:
            if not self._residence.rearrange(booted, where, self._closed.is_set):
                return False
        except Stopped:
            return False
        except (BootError, TimeoutError) as e:
            log.warning("layer %d: experts could not be moved: %s", layer, e)
            self._fail()
            return False
        came = [
            f"{format_ranges(new)} to {name}"
            for s, name in enumerate(self._devices)
            if (new := [e for e in booted.assignment.held if where[e] == s != before[e]])
        ]
        log.info(
            "layer %d: experts %s in %.1f s: %.0f us a batch expected, %.0f before",
            layer,
            ", ".join(came),
            self._clock() - begin_s,
            better.after_us,
            better.before_us,
        )
        return True

    def _fail(self) -> None:
        self.moves = self.moves._replace(failed=self.moves.failed + 1)


def _surfaces(booted: Booted, devices: int) -> list[Surface] | None:
    """Of each device; None: not every one has experts of the layer and was measured."""
    found = {site: part.surface for site, part in booted.parts}
    if len(found) < devices or not all(found.values()):
        return None
    return [Surface(tuple((p.experts, p.routes, p.microseconds) for p in found[s])) for s in range(devices)]


def _where(booted: Booted) -> NDArray[np.int64]:
    """[num_experts] device of each expert, -1 = of none."""
    out = np.full(booted.assignment.info.num_experts, -1, np.int64)
    for site, part in booted.parts:
        out[list(part.assignment.held)] = site
    return out


def _nbytes(booted: Booted) -> int:
    """Of the packed weights of a layer."""
    total = 0
    for part in booted.each:
        chosen = part.assignment.decision.chosen
        if chosen is not None:
            total += footprint(chosen.name, part.assignment.decision.problem, 1).weights_bytes
    return total
