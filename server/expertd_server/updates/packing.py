"""The layers of a new version, made one after another on a thread that stands back behind those that serve."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import Assignment, BootError
from expertd_server.boot.layers import Booted, Stopped
from expertd_server.residence.background import stand_back
from expertd_server.residence.residence import Residence
from expertd_server.updates.sources import alike, require_alike

__all__ = ["Packing"]


Take = Callable[[], "tuple[int, Checkpoint] | None"]
"""The next layer that is complete with its source; None: there is none yet."""
Keep = Callable[[int, Checkpoint, "Sequence[int]"], None]
"""Writes the tensors of a layer's experts for a restart.  Raises OSError."""


class Packing:
    """take: asked for layers after wake().  keep: called with each layer before it is made.  failed: called once, on
    the thread, with the reason.

    layers    to be made
    booted    layers that are ready; busy: whether one is being made; packing_s: what they took, one after another
    ended     set when all of them are ready, after a failure, and after stop()
    """

    def __init__(self, residence: Residence, take: Take, keep: Keep, failed: Callable[[Exception], None]) -> None:
        self._residence, self._take, self._keep, self._failed = residence, take, keep, failed
        served = residence.weights
        self._served = dict(served.booted)
        self.layers = len(self._served)
        self._assigner = served.assigner
        self._workshop = replace(
            served.workshop,
            cache=None,
            seconds=defaultdict(float),
            reading=defaultdict(float),
            lookups=Counter(),
        )
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
            while len(self.booted) < self.layers:
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
            self._served.clear()  # or what was served would stay until somebody looks for garbage
            self.ended.set()

    def _make(self, layer: int, source: Checkpoint) -> None:
        begin, self.busy = time.perf_counter(), True
        served: Assignment = self._served[layer].assignment
        found: ExpertSource = alike(source, layer, served.info, self._workshop.device)
        try:
            self._keep(layer, source, served.held)
            assigner = self._assigner.of(found)
            require_alike(assigner.layer(layer, served.held), served)
        except (ValueError, OSError) as e:
            raise BootError(f"layer {layer}: {e}") from e
        self.booted[layer] = self._residence.make(assigner, replace(self._workshop, source=found), layer, served.held)
        self.packing_s += time.perf_counter() - begin
        self.busy = False
