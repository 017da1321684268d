"""Which layers and experts a server holds, changed while it serves.

    residence.add(3, 4)                     hold two layers more: read, packed, checked, warm, then served
    residence.add(3, experts=range(8))      hold more experts of a layer
    residence.remove(3, experts=range(4))   let go of some, or of whole layers

    change = residence.prepare({3: range(8), 4: ()})    the same in two steps: all of these layers that is to be held
    residence.commit(change, linger_s=3)                or residence.abort(change)

A change is all or nothing.  Layers that are held are served meanwhile, by what was held before; a request is computed
by what was held when it was taken, and memory goes when no request uses it any more.  A layer that gets or loses
experts is packed anew from its source, so for a while both are there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from expertd.common.ranges import format_ranges
from expertd_kernels.native.memory import available_bytes
from expertd_kernels.oracle.probe import use_device
from expertd_server.boot.assignment import Assigner, Assignment, BootError
from expertd_server.boot.autotuning import Autotuning
from expertd_server.boot.joint import JointAssigner
from expertd_server.boot.layers import Booted, Stopped, boot_layer, boot_layers
from expertd_server.boot.memory import MemoryPlan, by_site, free_bytes, hold, plan_memory, require_room
from expertd_server.boot.prepare import Workshop
from expertd_server.config.serve import ServeConfig
from expertd_server.engine.engine import Engine
from expertd_server.engine.served import ServedLayer

# Why it is so: decision 85 in DECISIONS.md.
__all__ = ["FIRST", "Change", "Residence", "Room", "Weights"]

FIRST = 1
"""Number of the weights that a server is started with."""
_RELEASE_S = 60.0
"""How long a change waits for another one, and for requests that still use the weights before."""

Experts = Mapping[int, Collection[int]]
"""Ids of experts by layer."""


@dataclass(frozen=True, eq=False)
class Change:
    """What is ready.  new: layers that are held anew; whole: layers that are held no more."""

    new: dict[int, Booted]
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Weights:
    """A version of the weights: its number, where its layers come from, and those that are ready, by layer."""

    assigner: Assigner
    workshop: Workshop
    booted: Mapping[int, Booted]
    version: int


@dataclass(frozen=True)
class Room:
    """For other weights of what is held.

    plan     of memory with them; None = nothing is held
    before   whether the weights before stay
    rolling  there is room for one layer beside those held, and layers are replaced one after another
    """

    plan: MemoryPlan | None
    before: bool
    rolling: bool = False


class Residence:
    """From any thread; one change at a time, others wait.  While new weights are made (claim()) changes are refused.

    booted   what is held now, by layer, ascending; memory: the plan of it, None = nothing.  Both never change, but are
             replaced
    version  number of the weights that are served; set before boot()
    before   the weights that switch() replaced, for switch() back and for requests that ask for their version; a change
             of what is held lets go of them
    others   versions of layers that are not of `version`, while roll() replaces one after another; changes of what is
             held are refused then
    changed  called after each change with what is held then, and what of it is to be told no more
    """

    def __init__(
        self,
        config: ServeConfig,
        assigner: Assigner,
        workshop: Workshop,
        engine: Engine,
        oracle: Autotuning | None = None,
        changed: Callable[[Mapping[int, Booted], Experts], None] = lambda booted, leaving: None,
    ) -> None:
        self._config, self._assigner, self._workshop, self._engine = config, assigner, workshop, engine
        self._oracle, self._changed = oracle, changed
        self._changing = threading.Lock()
        self._claimed = ""
        self._moving = False
        self.version = FIRST
        self.before: Weights | None = None
        self.others: Mapping[int, int] = MappingProxyType({})
        self.booted: Mapping[int, Booted] = MappingProxyType({})
        self.memory: MemoryPlan | None = None

    def boot(
        self,
        assignments: Sequence[Assignment],
        done: Callable[[Booted], None] = lambda b: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """What is held at first, before the engine starts; done() after each layer.  Raises BootError, or Stopped once
        stopped() says so."""
        with self._changing:
            use_device(self._workshop.device)
            memory = plan_memory(self._config, assignments) if assignments else None
            workshop = replace(self._workshop, memory=memory)
            new = boot_layers(assignments, workshop, oracle=self._oracle, done=done, stopped=stopped)
            self._hold({b.served.layer: b for b in new})

    def add(self, *layers: int, experts: Collection[int] | None = None) -> None:
        """Hold these layers, with these experts besides those that are held; None: those that the configuration asks
        for.  Returns when they are served.  Raises BootError, and then nothing has changed."""
        self._assigner.require_layers(layers, f"layers to add: got {format_ranges(layers)}")
        self._require_unclaimed()
        with self._changing:
            held = {n: set(b.assignment.held) for n, b in self.booted.items()}
            wanted = []
            for n in dict.fromkeys(layers):
                a = self._assigner.layer(n, experts)
                if not held.get(n, set()) >= set(a.held):
                    wanted.append(a if n not in held else self._assigner.layer(n, held[n] | set(a.held)))
            gone = self._replace(wanted, ())
        self._release(gone, None)

    def remove(self, *layers: int, experts: Collection[int] | None = None, timeout_s: float | None = None) -> None:
        """Let go of these layers, or of some of their experts, and wait until their memory is free.  What is not held
        is no error.  Raises BootError, and then nothing has changed; TimeoutError where requests still use a layer that
        is let go of: its memory goes with the last of them."""
        self._require_unclaimed()
        with self._changing:
            gone = self._replace(*self._without(layers, experts))
        self._release(gone, timeout_s)

    def _without(self, layers: Collection[int], experts: Collection[int] | None) -> tuple[list[Assignment], list[int]]:
        """(layers of which some experts stay, layers of which none does)."""
        some, none = [], []
        for n in dict.fromkeys(layers):
            b = self.booted.get(n)
            held = set() if b is None else set(b.assignment.held)
            left = set() if experts is None else held - set(experts)
            if held and not left:
                none.append(n)
            elif left < held:
                some.append(self._assigner.layer(n, left))
        return some, none

    def prepare(
        self,
        wanted: Experts,
        ready: Callable[[int, int], None] = lambda done, layers: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Change:
        """Make ready that these experts of these layers are held, () = none, instead of what is held of them.  Until
        commit() or abort() every other change waits.  ready: called with how many layers are, of how many.  Raises
        BootError, or Stopped once stopped() says so, and then nothing has changed."""
        self._require_unclaimed()
        self._changing.acquire()
        try:
            some, none = self._other(wanted)
            ready(0, len(some))
            return Change(self._prepare(some, lambda done: ready(done, len(some)), stopped), tuple(none))
        except BaseException:
            self._changing.release()
            raise

    def room_for(self, wanted: Experts) -> MemoryPlan | None:
        """The plan of what prepare(wanted) would take beside what is held; None = nothing.  Raises BootError where that
        does not fit."""
        some, _ = self._other(wanted)
        return self._require_room(some) if some else self.memory

    def commit(
        self,
        change: Change,
        linger_s: float = 0.0,
        timeout_s: float | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Hold it.  linger_s: so long what goes is computed still, but told no more; pause: waits for that.  Raises
        TimeoutError as remove() does."""
        try:
            leaving = self._leaving(change)
            if leaving and linger_s:
                self._changed(self.booted, leaving)
                pause(linger_s)
            gone = self._swap(change)
        finally:
            self._changing.release()
        self._release(gone, timeout_s)

    def rearrange(self, booted: Booted, where: Mapping[int, int], stopped: Callable[[], bool] = lambda: False) -> bool:
        """Share a layer among its devices in another way: packed anew, and served instead of `booted`.  where: number
        of the device of each expert held.  False: what is held has changed meanwhile, or the weights before are kept.
        The packed weights are not cached: there would be as many entries as moves.  Raises BootError, or Stopped once
        stopped() says so, and then nothing has changed."""
        self._require_unclaimed()
        layer = booted.assignment.info.layer
        self._moving = True
        try:
            with self._changing:
                if self.booted.get(layer) is not booted or self.before is not None:
                    return False
                assigner = self._assigner
                assert isinstance(assigner, JointAssigner)
                before = assigner.arrange(layer, where)
                try:
                    a = assigner.layer(layer, booted.assignment.held)
                    gone = self._swap(Change(self._prepare([a], stopped=stopped, cached=False)))
                except BaseException:
                    assigner.arrange(layer, before)
                    raise
        finally:
            self._moving = False
        self._release(gone, _RELEASE_S)
        return True

    def abort(self, change: Change) -> None:
        """Let go of it."""
        change.new.clear()
        self._changing.release()
        self._workshop.alone(self._workshop.give_back)

    # ---- new weights of what is held ---------------------------------------------------------------------------------

    def claim(self, why: str) -> None:
        """What is held stays so until unclaim(): changes are refused with `why`.  Raises BootError where one is under
        way."""
        if not self._changing.acquire(timeout=_RELEASE_S if self._moving else 0):
            raise BootError("a change of what this server holds is under way; want that done first")
        self._claimed = why

    def unclaim(self) -> None:
        """Changes may be made again."""
        self._claimed = ""
        self._changing.release()

    def room_beside(self, rolling: bool = False) -> Room:
        """For as much as is held, beside it; `before` goes where all three do not fit, and the plan is without it.
        rolling: for the largest layer alone.  Raises BootError where that does not fit."""
        held = [b.assignment for b in self.booted.values()]
        if not held:
            return Room(None, True, rolling)
        if rolling:
            unlike = {plan_memory(self._config, [a]): a for a in held}
            plans = [self._require_room([a], advise=False) for a in unlike.values()]
            return Room(max(plans, key=lambda plan: plan.peak), self.before is None, True)
        if self.before is not None:
            with contextlib.suppress(BootError):
                return Room(self._require_room([*self._assignments_before(), *held], advise=False), True)
        return Room(self._require_room(held, advise=False), self.before is None)

    @property
    def weights(self) -> Weights:
        """Those that are served."""
        return Weights(self._assigner, self._workshop, self.booted, self.version)

    def make(self, assigner: Assigner, workshop: Workshop, layer: int, held: Collection[int]) -> Booted:
        """A layer of other weights: read, packed, checked and warm, and not served.  Memory that this took is kept for
        the next layer until give_back().  Raises BootError."""
        use_device(workshop.device)
        with workshop.preparing():
            return boot_layer(assigner.layer(layer, held), workshop, measure=False, like=self.booted.get(layer))

    def switch(self, weights: Weights) -> Weights | None:
        """Serve these instead of those that are served, which become `before`, unless they are of several versions;
        between claim() and unclaim().  They hold the same layers and experts.  What was taken before is computed by the
        others.  Returns what is served no more and is for release(); None: nothing, or these."""
        assert {n: b.assignment.held for n, b in weights.booted.items()} == {
            n: b.assignment.held for n, b in self.booted.items()
        }, "other experts than those that are held"
        older = None if self.before is weights else self.before
        mixed = bool(self.others)
        if mixed:
            older = self.weights
        else:
            self.before = self.weights
        self.others = MappingProxyType({})
        self._assigner, self._workshop, self.version = weights.assigner, weights.workshop, weights.version
        self._hold(weights.booted, keep=not mixed)
        return older

    def version_of(self, layer: int) -> int:
        """Of the weights that a layer which is held is served with."""
        return self.others.get(layer, self.version)

    def roll(self, weights: Weights, booted: Booted) -> list[ServedLayer]:
        """Serve this layer, of these weights, instead of the one that is served; between claim() and unclaim(), with
        nothing `before`.  The first one makes `version` theirs.  Returns the layer that is served no more, for
        let_go(); what was taken before is computed by it."""
        layer = booted.served.layer
        others = {n: self.version_of(n) for n in self.booted if self.version_of(n) != weights.version}
        others.pop(layer, None)
        gone = [self.booted[layer].served]
        self.others = MappingProxyType(others)
        self._assigner, self._workshop, self.version = weights.assigner, weights.workshop, weights.version
        self._hold({**self.booted, layer: booted})
        return gone

    def let_go(self, gone: list[ServedLayer]) -> None:
        """Wait until no request uses these layers, and give their memory back.  gone: emptied.  Raises TimeoutError,
        and then their memory goes with the last of them."""
        self._release(gone, _RELEASE_S)

    def drop_before(self) -> None:
        """Let go of the weights before, and give their memory back as soon as no request uses them."""
        before, self.before = self.before, None
        if before is None:
            return
        gone = [b.served for b in before.booted.values()]
        del before
        self._hold(self.booted)
        self.release(gone)

    def release(self, gone: list[ServedLayer]) -> None:
        """Give the memory of layers back that are held no more, as soon as no request uses them.  gone: emptied."""
        alive = [weakref.ref(s.experts) for s in gone]
        self._engine.forget(gone, _RELEASE_S)
        gone.clear()
        self.give_back(alive)

    def give_back(self, alive: Sequence[weakref.ref[Any]] = ()) -> None:
        """Memory of layers that nothing refers to any more.  alive: of their experts; where some are, garbage is looked
        for."""
        if any(ref() is not None for ref in alive):
            _collect_garbage()
        self._workshop.alone(self._workshop.give_back)

    def _require_unclaimed(self) -> None:
        """Raises BootError."""
        if self._claimed:
            raise BootError(self._claimed)
        if self.others:
            versions = ", ".join(map(str, sorted({self.version, *self.others.values()})))
            raise BootError(
                f"layers are of versions {versions} of the weights, since a rolling update stopped in the middle;"
                " publish a higher version first (expertctl update --rolling)"
            )

    def _other(self, wanted: Experts) -> tuple[list[Assignment], list[int]]:
        """(layers to be made, layers that go) where what is held differs from `wanted`.  Raises BootError."""
        self._assigner.require_layers(wanted, f"layers to hold: got {format_ranges(wanted)}")
        held = {n: set(b.assignment.held) for n, b in self.booted.items()}
        changed = {n: set(e) for n, e in sorted(wanted.items()) if set(e) != held.get(n, set())}
        some = [self._assigner.layer(n, experts) for n, experts in changed.items() if experts]
        refused = next((a for a in some if a.decision.chosen is None), None)
        if refused is not None:
            why = "; ".join(r for v in refused.decision.verdicts for r in v.refusals[:1])
            raise BootError(f"layer {refused.info.layer}: no backend serves {len(refused.held)} experts of it: {why}")
        return some, [n for n, experts in changed.items() if not experts]

    def _leaving(self, change: Change) -> dict[int, tuple[int, ...]]:
        """Experts that are held now and would not be afterwards."""
        out = {n: tuple(self.booted[n].assignment.held) for n in change.whole if n in self.booted}
        for n, b in change.new.items():
            if n in self.booted:
                out[n] = tuple(sorted(set(self.booted[n].assignment.held) - set(b.assignment.held)))
        return {n: experts for n, experts in out.items() if experts}

    def _replace(self, wanted: Sequence[Assignment], whole: Collection[int]) -> list[ServedLayer]:
        """Serve `wanted` instead of what is held of those layers, and the layers `whole` not at all.  Returns what is
        not served any more."""
        return self._swap(Change(self._prepare(wanted), tuple(whole)))

    def _swap(self, change: Change) -> list[ServedLayer]:
        new, whole = change.new, change.whole
        gone = [b.served for n, b in self.booted.items() if n in new or n in whole]
        if new or gone:
            self.drop_before()
            self._hold({**{n: b for n, b in self.booted.items() if n not in whole}, **new})
        return gone

    def _prepare(
        self,
        assignments: Sequence[Assignment],
        ready: Callable[[int], None] = lambda done: None,
        stopped: Callable[[], bool] = lambda: False,
        cached: bool = True,
    ) -> dict[int, Booted]:
        """Read, pack, check and warm up, while the engine serves.  cached: whether packed weights may be those of the
        cache, and are kept there."""
        if not assignments:
            return {}
        self.drop_before()  # what is held will be other experts, and they may need the room
        workshop, out = self._workshop, dict[int, Booted]()
        if not cached:
            workshop = replace(workshop, cache=None)
        use_device(workshop.device)
        memory = self._require_room(assignments)
        for at in replace(workshop, memory=memory).each:
            if at.memory is not None:
                at.call(functools.partial(hold, at.memory, at.device))
        with workshop.preparing():
            for a in assignments:
                if stopped():
                    raise Stopped
                # measuring competes with requests: what was not measured at boot follows the platform's order
                out[a.info.layer] = boot_layer(a, workshop, self._oracle, measure=False)
                workshop.alone(workshop.give_back)
                ready(len(out))
        return out

    def _require_room(self, assignments: Sequence[Assignment], advise: bool = True) -> MemoryPlan:
        """The plan of what is held and of `assignments` beside it, the weights before perhaps among them.  Raises
        BootError where that does not fit.  advise: with how many layers or experts would."""
        held = [b.assignment for b in self.booted.values()]
        both = [*held, *assignments]
        now_there = [*held, *self._assignments_before()]
        there = {name: plan_memory(own, these) for name, own, these in by_site(self._config, now_there)} if held else {}
        devices = [w.device for w in self._workshop.each]
        for name, own, these in by_site(self._config, both):
            free = free_bytes(devices[self._config.devices.index(name)] if self._config.joins else devices[0])
            if free and name in there:  # what is there is not free, and counts; of the graphs, those that are there yet
                now = there[name]
                free += now.weights + now.scratch + now.buffers
                if now.graphs:
                    free += min(now.graphs, self._engine.graph_bytes)
            require_room(plan_memory(own, these), own, these, free, available_bytes(), advise)
        return plan_memory(self._config, both)

    def _assignments_before(self) -> list[Assignment]:
        """Of the weights before, which are in memory."""
        return [] if self.before is None else [b.assignment for b in self.before.booted.values()]

    def _hold(self, booted: Mapping[int, Booted], keep: bool = False) -> None:
        """keep: what is replaced can still be asked for by its version."""
        after = MappingProxyType(dict(sorted(booted.items())))
        self.memory = plan_memory(self._config, [b.assignment for b in after.values()]) if after else None
        self._engine.hold((b.served for b in after.values()), self.version, keep, self.others)
        self.booted = after
        self._changed(after, {})

    def _release(self, gone: list[ServedLayer], timeout_s: float | None) -> None:
        """Wait until nothing uses `gone` any more, and free its memory."""
        if not gone:
            return
        layers = format_ranges(s.layer for s in gone)
        alive = [weakref.ref(s.experts) for s in gone]
        if not self._engine.forget(gone, timeout_s):
            raise TimeoutError(f"layers {layers}: requests still use them after {timeout_s:g} s; want them done first")
        gone.clear()
        self.give_back(alive)


def _collect_garbage() -> None:
    """Also among what was frozen when the boot ended."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
