"""The layers of a new version, made one after another on a thread that stands back behind those that serve."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import Assigner, Assignment, BootError
from expertd_server.boot.layers import Booted, Stopped
from expertd_server.boot.prepare import Workshop
from expertd_server.residence.background import stand_back
from expertd_server.residence.residence import Residence, Weights
from expertd_server.updates.sources import alike, require_alike

__all__ = ["Made", "Packing", "made", "workshop_of"]

Take = Callable[[], "tuple[int, Checkpoint] | None"]
"""The next layer that is complete with its source; None: there is none yet."""
Keep = Callable[[int, Checkpoint, "Sequence[int]"], None]
"""Writes the tensors of a layer's experts for a restart.  Raises OSError."""


@dataclass(frozen=True, eq=False)
class Made:
    """A layer that was made and checked.  digests: of its experts' weights."""

    assignment: Assignment
    digests: tuple[int, ...]


def workshop_of(weights: Weights) -> Workshop:
    """Where other weights than these are made: nothing of them is cached, or counts as of the start."""
    return replace(
        weights.workshop,
        cache=None,
        seconds=defaultdict(float),
        reading=defaultdict(float),
        lookups=Counter(),
    )


def made(
    residence: Residence, assigner: Assigner, workshop: Workshop, source: Checkpoint, served: Assignment
) -> Booted:
    """A layer of `source`, as it is served.  Raises BootError."""
    layer = served.info.layer
    found: ExpertSource = alike(source, layer, served.info, workshop.device)
    try:
        assigner = assigner.of(found)
        require_alike(assigner.layer(layer, served.held), served)
    except (ValueError, OSError) as e:
        raise BootError(f"layer {layer}: {e}") from e
    return residence.make(assigner, replace(workshop, source=found), layer, served.held)


class Packing:
    """take: asked for layers after wake().  keep: called with each layer before it is made.  failed: called once, on
    the thread, with the reason.  drops: layers are let go of once they are checked, and Rollout makes them again.

    layers    to be made
    done      layers that are checked; booted: those that are ready, none of them where it drops them
    busy      whether one is being made; packing_s: what they took, one after another
    ended     set when all of them are ready, after a failure, and after stop()
    """

    def __init__(
        self,
        residence: Residence,
        take: Take,
        keep: Keep,
        failed: Callable[[Exception], None],
        drops: bool = False,
    ) -> None:
        self._residence, self._take, self._keep, self._failed = residence, take, keep, failed
        self._drops = drops
        served = residence.weights
        self._served = {n: b.assignment for n, b in served.booted.items()}
        self.layers = len(self._served)
        self._assigner, self._workshop = served.assigner, workshop_of(served)
        self.done: dict[int, Made] = {}
        self.booted: dict[int, Booted] = {}
        self.busy = False
        self.packing_s = 0.0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expertd-update", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be a layer to take."""
        self._wake.set()

    def stop(self) -> None:
        """Make no further layer; returns when the one under way is done.  What was made is dropped."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.booted.clear()

    def _run(self) -> None:
        stand_back()
        try:
            while len(self.done) < self.layers:
                self._wake.wait()
                self._wake.clear()
                while not self._stop.is_set() and (found := self._take()) is not None:
                    self._make(*found)
                    del found
                if self._stop.is_set():
                    raise Stopped
            self._residence.give_back()
        except Stopped:
            pass
        except Exception as e:
            self._failed(e)
        finally:
            self.ended.set()

    def _make(self, layer: int, source: Checkpoint) -> None:
        begin, self.busy = time.perf_counter(), True
        served = self._served[layer]
        try:
            self._keep(layer, source, served.held)
        except (ValueError, OSError) as e:
            raise BootError(f"layer {layer}: {e}") from e
        booted = made(self._residence, self._assigner, self._workshop, source, served)
        if self._drops:
            alive = [weakref.ref(booted.served.experts)]
            self.done[layer] = Made(booted.assignment, booted.digests)
            del booted
            self._residence.give_back(alive)
        else:
            self.booted[layer] = booted
            self.done[layer] = Made(booted.assignment, booted.digests)
        self.packing_s += time.perf_counter() - begin
        self.busy = False
