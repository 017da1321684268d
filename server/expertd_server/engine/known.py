"""The layers that the core knows, and what it has computed for them.

A layer is known by its generation from hold() until nothing waits for it any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import numpy as np

from expertd_kernels.common.protocol import Direct, DirectExperts
from expertd_server.engine import core as c
from expertd_server.engine.executor import Executor
from expertd_server.engine.report import BatchReport, Waits
from expertd_server.engine.request import Array, Stages
from expertd_server.engine.served import ServedLayer

__all__ = ["KnownLayers", "BatchTally"]

log = logging.getLogger(__name__)

_COUNT_S = 0.5
"""How often a device's counts of routes are fetched at most."""


class KnownLayers:
    """By generation.  direct: the core may call a layer's experts by itself."""

    def __init__(self, core: c.Core, executor: Executor, direct: bool) -> None:
        self._core, self._executor, self._direct = core, executor, direct
        self._found: dict[int, tuple[ServedLayer, Array]] = {}
        self._backends: list[str] = []

    def layer(self, generation: int) -> ServedLayer:
        """Raises KeyError."""
        return self._found[generation][0]

    def get(self, generation: int) -> ServedLayer | None:
        found = self._found.get(generation)
        return None if found is None else found[0]

    def backend(self, number: int) -> str:
        """The name of what the core calls `number`."""
        return self._backends[number]

    def routes(self, generation: int) -> Array | None:
        """[held] routes that were computed by expert since the layer came; None: it is not known any more."""
        found = self._found.get(generation)
        if found is None:
            return None
        counts = self._executor.counts(generation)
        return (found[1] if counts is None else counts).astype(np.int64)

    def add(self, s: ServedLayer, version: int = 0, keeps: bool = False) -> None:
        """version: of its weights.  keeps: see Core.add_layer."""
        counts = np.zeros(len(s.held), np.uint64)
        self._found[s.generation] = (s, counts)
        plan = s.plan or ((None, s.backend),)
        for _, name in plan:
            if name not in self._backends:
                self._backends.append(name)
        device_slots, device_counts = self._executor.facts(s)
        direct = s.experts.direct() if self._direct and isinstance(s.experts, DirectExperts) else Direct(0, 0, 0)
        facts = c.LayerFacts(
            layer=s.layer,
            generation=s.generation,
            hidden_size=s.hidden_size,
            num_experts=s.num_experts,
            held=len(s.held),
            top_k=s.top_k,
            takes_e4m3=s.takes_e4m3,
            slots=s.slot_of.ctypes.data,
            expert_tokens=counts.ctypes.data,
            device_slots=device_slots,
            device_counts=device_counts,
            call=direct.function,
            context=direct.context,
            experts=direct.experts,
            weights_version=version,
        )
        backends = [(most or 0, self._backends.index(name), name) for most, name in plan]
        self._core.add_layer(facts, backends, s.measured, keeps)

    def drop_one_but(self, held: Collection[int]) -> tuple[int, ...]:
        """Drop a layer that is not among `held` and is not waited for; its generation, () = there is none."""
        unused = next((g for g in self._found if g not in held and not self._core.waited_for(g)), None)
        if unused is None:
            return ()
        self._executor.forget((unused,))
        del self._found[unused]
        return (unused,)


class BatchTally:
    """Turns the core's records of batches into reports.  One thread at a time.

    observe: called with each report; answered: with a reason and how many requests of sessions were
    answered with it since the last time; None: of no interest
    """

    def __init__(
        self,
        core: c.Core,
        layers: KnownLayers,
        observe: Callable[[BatchReport], None] | None,
        answered: Callable[[str, int], None] | None,
        on_device: bool,
    ) -> None:
        self._core, self._layers, self._on_device = core, layers, on_device
        self._observe, self._answered = observe, answered
        self._counted: dict[int, Array] = {}  # routes by expert that were reported, by generation
        self._due_s = 0.0
        self._used: set[int] = set()  # generations that computed since the last look at the counts

    def report(self, scraped: bool) -> None:
        """Count the batches that have ended.  scraped: somebody looks at the numbers now."""
        try:
            if self._answered is not None:
                for reason, n in zip(c.REASONS, self._core.answered(), strict=True):
                    if n:
                        self._answered(reason, n)
            if self._observe is not None:
                records: list[c.BatchRecord] = []
                while more := self._core.records():
                    records.extend(c.BatchRecord.from_buffer_copy(r) for r in more)
                self._used.update(b.generation for b in records)
                routes = self._routes(scraped)
                for b in records:
                    self._report(b, routes, self._observe)
        except Exception:  # counting must not end the computing
            log.exception("batches could not be counted")

    def forget(self, generations: Collection[int]) -> None:
        for generation in generations:
            self._counted.pop(generation, None)

    def _report(self, b: c.BatchRecord, routes: dict[int, Array], observe: Callable[[BatchReport], None]) -> None:
        served = self._layers.get(b.generation)
        if b.failed or served is None:
            return
        stages = Stages(*(ns // b.batches for ns in (b.collect_ns, b.kernel_ns, b.deliver_ns)))
        experts = routes.pop(b.generation, None)
        if experts is None:
            experts = np.zeros(len(served.held), np.int64)
        observe(
            BatchReport(
                served,
                self._layers.backend(b.backend),
                b.tokens,
                b.requests,
                Waits(list(b.waits), b.queue_ns),
                stages,
                experts,
                b.batches,
            )
        )

    def _routes(self, scraped: bool) -> dict[int, Array]:
        """New routes by expert since the last look, by generation; a device is asked rarely."""
        now_s = time.monotonic()
        if self._on_device and not scraped and now_s < self._due_s:
            return {}
        self._due_s = now_s + _COUNT_S
        out = {}
        for generation in self._used:
            now = self._layers.routes(generation)
            if now is not None:
                out[generation] = now - self._counted.get(generation, 0)
                self._counted[generation] = now
        self._used.clear()
        return out
