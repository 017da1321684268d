"""Which backends a layer takes, and what happens when one turns out not to serve it.

A choice that the user made (--backend) is kept or the boot stops.  Where the oracle chose, a backend that refuses the
weights or crashes gives way to the next one.  One that computes something wrong stops the boot in the platform's order,
because somebody must look at it; with `--oracle measure` it is refused with its figure like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from expertd_kernels.measure.autotuning import Result, choose, with_results
from expertd_kernels.oracle import table
from expertd_kernels.oracle.decision import Backend, Decision, NoBackendError, Refusal
from expertd_server.boot.assignment import BootError

# Why it is so: decision 36 in DECISIONS.md.
__all__ = ["BackendRejectedError", "Choice"]

log = logging.getLogger(__name__)


class BackendRejectedError(Exception):
    """A backend does not serve the layer; the text is the refusal.  stage: "packing", "the first call", ...; wrong: it
    computed, and its answer is wrong."""

    def __init__(self, stage: str, why: str, wrong: bool = False) -> None:
        super().__init__(f"when {stage}: {why}" if stage else why)
        self.why, self.wrong = why, wrong


class Choice:
    """The decision for one layer.  results: what measuring gave, None where nothing was measured; copies: how many
    packed copies of the weights a measured plan may take."""

    def __init__(
        self, layer: int, decision: Decision, results: Sequence[Result] | None = None, copies: int = 1
    ) -> None:
        self._layer, self._asked, self._copies = layer, decision, copies
        self._results = None if results is None else list(results)
        self.decision = decision
        self._decide()

    def plan(self) -> list[tuple[int | None, Backend]]:
        """[(tokens up to, backend)]: the last entry has no bound.  Raises BootError where nothing is left."""
        try:
            chosen = self.decision.require()
        except NoBackendError as e:
            raise BootError(f"layer {self._layer}: {e}") from e
        if self._results is None:
            return [(None, chosen)]
        return [(most, _row(name)) for most, name in choose(self._results, self._copies)]

    def refuse(self, backend: str, rejected: BackendRejectedError) -> None:
        """`backend` does not serve: its refusal stands in the table, the next one is chosen.  Raises BootError where
        that is not the oracle's to decide."""
        where = f"layer {self._layer}"
        if rejected.wrong and (self.decision.pinned or self._results is None):
            raise BootError(
                f"{where}: self-check of backend {backend} against the float32 reference: {rejected.why}; choose"
                " another --backend, and report this"
            ) from rejected
        if self.decision.pinned:
            raise BootError(
                f"{where}: the pinned backend {backend} cannot take the weights: {rejected.why}"
            ) from rejected
        log.warning("%s: backend %s cannot serve it: %s; trying the next backend", where, backend, rejected)
        if self._results is not None:
            self._results = [replace(r, refusal=str(rejected)) if r.backend == backend else r for r in self._results]
            self._decide()
            return
        verdicts = tuple(
            replace(v, refusals=(*v.refusals, Refusal(str(rejected)))) if v.backend == backend else v
            for v in self.decision.verdicts
        )
        eligible = [v.backend for v in verdicts if v.eligible]
        self.decision = replace(self.decision, verdicts=verdicts, chosen=_row(eligible[0]) if eligible else None)

    def _decide(self) -> None:
        if self._results is not None:
            self.decision = with_results(self._asked, self._results, table.BACKENDS)


def _row(name: str) -> Backend:
    return next(b for b in table.BACKENDS if b.name == name)
