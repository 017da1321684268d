"""The layers of a version that was checked, served one after another: there is no memory for all of them at once.

    rollout = Rollout(residence, weights, checked, began, ended)
    rollout.start()            makes the first layer
    rollout.allow(3)           serves the layers up to index 3; the one after them is made ready meanwhile
    rollout.reached(3)         whether that is so; raises why it stopped

Each layer is made again from its source, checked once more, and served; then the layer that it replaced is let go of,
and the next one is made in its place.  What stopped goes on where it was after start().
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from expertd.errors import ExpertdError
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_server.boot.assignment import BootError
from expertd_server.boot.layers import Booted
from expertd_server.engine.served import ServedLayer
from expertd_server.residence.background import stand_back
from expertd_server.residence.residence import Residence, Weights
from expertd_server.updates.packing import Made, made, workshop_of
from expertd_server.updates.sources import checkpoint_of

# Why it is so: decision 179 in DECISIONS.md.
__all__ = ["LAST", "Rollout"]

LAST = (1 << 63) - 1
"""Above the index of every layer."""


class Rollout:
    """weights: the new ones, without layers; checked: what is to be made, by layer.  On the thread are called: began(),
    once, before the first layer is served; what it raises stops that.  failed(), with the reason; gives what reached()
    raises.  ended(), after the last layer.

    switched   layers that are served with the new version; seconds: that making them took
    begun      whether began() was called and raised nothing
    """

    def __init__(
        self,
        residence: Residence,
        weights: Weights,
        checked: Mapping[int, Made],
        began: Callable[[], None],
        failed: Callable[[Exception], ExpertdError],
        ended: Callable[[], None],
    ) -> None:
        self._residence, self._weights, self._checked = residence, weights, checked
        self._began, self._failed, self._ended = began, failed, ended
        source = checkpoint_of(weights.workshop.source)
        assert source is not None
        self._source: Checkpoint = source
        self._left = sorted(checked)
        self._through = -1
        self._error: ExpertdError | None = None
        self._gone: list[ServedLayer] = []
        self._stopped = self._over = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self.switched = 0
        self.seconds = 0.0
        self.begun = False

    def start(self) -> None:
        """Make the next layer.  Again after it stopped with an error, and then it goes on; nothing while it runs."""
        with self._change:
            if self._stopped or self._over or (self._thread is not None and self._error is None):
                return
            self._error = None
            self._thread = threading.Thread(target=self._run, name="expertd-rolling", daemon=True)
            self._thread.start()

    def allow(self, through: int = LAST) -> None:
        """Layers up to this index may be served."""
        with self._change:
            self._through = max(self._through, through)
            self._change.notify_all()

    def reached(self, through: int = LAST) -> bool:
        """Whether layers up to this index are served with the new version.  Raises the reason why it stopped."""
        with self._change:
            if self._over or (self._left and self._left[0] > through):
                return True
            error = self._error
        if error is not None:
            raise error
        return False

    def waits(self, through: int = LAST) -> bool:
        """Whether reached() may say something else later."""
        with self._change:
            return not (self._over or self._error or self._stopped or (self._left and self._left[0] > through))

    @property
    def failed(self) -> bool:
        """Whether it stopped with an error."""
        return self._error is not None

    def stop(self) -> None:
        """Serve no further layer; returns when the one under way is let go of, or served."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- on its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        stand_back()
        try:
            self._residence.let_go(self._gone)
            while self._left and not self._stopped:
                booted = self._make(self._left[0])
                if self._may(self._left[0]):
                    self._switch(booted)
                del booted
            if not self._left:
                self._ended()
                with self._change:
                    self._over = True
        except Exception as e:
            error = self._failed(e)  # and not e, whose frames have the layers
            with self._change:
                self._error = error

    def _make(self, layer: int) -> Booted:
        """Raises BootError."""
        begin, checked, weights = time.perf_counter(), self._checked[layer], self._weights
        booted = made(self._residence, weights.assigner, workshop_of(weights), self._source, checked.assignment)
        if booted.digests != checked.digests:
            raise BootError(f"layer {layer}: its tensors are not those any more that were checked; publish them again")
        self.seconds += time.perf_counter() - begin
        return booted

    def _may(self, layer: int) -> bool:
        """Waits until the layer may be served.  False: it was stopped."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or layer <= self._through)
            return not self._stopped

    def _switch(self, booted: Booted) -> None:
        """Raises TimeoutError where requests use the layer before for too long; it is served then all the same."""
        if not self.begun:
            self._began()
            self.begun = True
        self._gone = self._residence.roll(self._weights, booted)
        with self._change:
            self._left.pop(0)
            self.switched += 1
        self._residence.let_go(self._gone)
