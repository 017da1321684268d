"""The composition root of loading: from assignments to layers that are ready to compute.

    plan -> (cache or load and pack) -> self-check -> warm-up, layer by layer

With `--oracle measure` the first layer of each distinct problem runs an autotuning run first.  Everything that may fail
before the first answer fails here, with one sentence (BootError).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from expertd_kernels.common.protocol import Experts, takes_e4m3
from expertd_kernels.measure.autotuning import BucketedExperts, MeasuringStoppedError
from expertd_kernels.measure.surface import Point
from expertd_kernels.oracle.probe import device_fault
from expertd_server.boot.ahead import ReadAhead, storage_bytes
from expertd_server.boot.assignment import Assignment, BootError
from expertd_server.boot.autotuning import Autotuning
from expertd_server.boot.choice import BackendRejectedError, Choice
from expertd_server.boot.memory import hold
from expertd_server.boot.prepare import LayerWeights, Prepared, Workshop, prepare, warm_up, will_read
from expertd_server.boot.slowed import slowed
from expertd_server.boot.surfaces import surface_of
from expertd_server.engine.joined import Part, join
from expertd_server.engine.served import ServedLayer

__all__ = ["Booted", "Stopped", "boot_layer", "boot_layers"]


class Stopped(Exception):  # noqa: N818 - asked for, not an error
    """SIGTERM came while the server was loading."""


@dataclass(frozen=True, eq=False)
class Booted:
    """A layer that passed its self-check.

    error, tolerance  relative, against the float32 reference; error: of the worst backend of the plan
    errors            of each backend that serves it
    digests           of the canonical weights, by expert held
    from_cache        whether all of its packed weights were found on disk
    parts             (number of its site, the part), of a layer that devices share
    device            as in --device
    surface           what batches took there, by experts that they have routes to
    """

    assignment: Assignment
    served: ServedLayer
    error: float
    tolerance: float
    seconds: float
    errors: dict[str, float]
    digests: tuple[int, ...]
    from_cache: bool
    parts: tuple[tuple[int, Booted], ...] = ()
    device: str = ""
    surface: tuple[Point, ...] = ()

    @property
    def each(self) -> tuple[Booted, ...]:
        """The parts, or this."""
        return tuple(part for _, part in self.parts) or (self,)


def boot_layer(
    assignment: Assignment,
    workshop: Workshop,
    oracle: Autotuning | None = None,
    ahead: ReadAhead | None = None,
    *,
    measure: bool = True,
    surfaces: bool = True,
    like: Booted | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Booted:
    """One layer.  The canonical weights, if they were loaded at all, are gone when it returns, so the peak of memory is
    the packed layers and one canonical one.  measure: whether the oracle may, or knows only what it has measured.
    surfaces: whether it is measured what batches take.  like: the same layer of other weights, which is served: its
    kernels are warm, and measured.  stopped: ends the oracle's measuring.  Raises BootError, Stopped."""
    if assignment.parts:
        return _boot_parts(assignment, workshop, ahead, measure)
    start = time.perf_counter()
    canonical = LayerWeights(assignment, workshop, ahead)
    choice = Choice(assignment.info.layer, assignment.decision)
    if oracle is not None and not assignment.decision.pinned:
        results = oracle.known(assignment.decision)
        if results is None and measure:
            weights = canonical.weights()
            with workshop.stage("measure"):
                try:
                    results = oracle.results(assignment.decision, lambda: weights, stopped)
                except MeasuringStoppedError as e:
                    raise Stopped from e
        choice = Choice(assignment.info.layer, assignment.decision, results, oracle.copies)
    parts = _prepared(choice, assignment, canonical, workshop, like)
    assignment = replace(assignment, decision=choice.decision)
    served = _served(assignment, parts, workshop)
    prepared = [m for _, m in parts]
    surface: tuple[Point, ...] = ()
    if surfaces:
        surface = surface_of(
            served.experts,
            range(len(assignment.held)),
            choice.decision.problem,
            workshop,
            device=workshop.name,
            capturable=served.capturable,
            measure=measure,
        )
    return Booted(
        assignment,
        served,
        max(m.check.relative_error for m in prepared),
        prepared[0].check.tolerance,
        time.perf_counter() - start,
        {m.backend.name: m.check.relative_error for m in prepared},
        prepared[0].digests,
        all(m.from_cache for m in prepared),
        device=workshop.name,
        surface=surface,
    )


def _boot_parts(assignment: Assignment, workshop: Workshop, ahead: ReadAhead | None, measure: bool) -> Booted:
    """Each part at its site, and then as one layer.  ahead, measure: see boot_layer().  Raises BootError."""
    start = time.perf_counter()
    parts: list[tuple[int, Booted]] = []
    for site, part in assignment.parts:
        at = workshop.at(site)
        with at.preparing():
            parts.append((site, boot_layer(part, at, ahead=ahead, surfaces=False)))
        workshop.alone(at.give_back)
    by_expert = {e: d for _, b in parts for e, d in zip(b.served.held, b.digests, strict=True)}
    decision = replace(parts[0][1].assignment.decision, problem=assignment.decision.problem)
    assignment = replace(assignment, decision=decision, parts=tuple((site, b.assignment) for site, b in parts))
    errors: dict[str, float] = {}
    for _, b in parts:
        errors |= {name: max(error, errors.get(name, 0.0)) for name, error in b.errors.items()}
    served = _joined(assignment, parts, workshop)
    parts = [(site, _with_surface(b, served, workshop, measure)) for site, b in parts]
    return Booted(
        assignment,
        served,
        max(b.error for _, b in parts),
        max(b.tolerance for _, b in parts),
        time.perf_counter() - start,
        errors,
        tuple(by_expert[e] for e in assignment.held),
        all(b.from_cache for _, b in parts),
        tuple(parts),
        workshop.name,
    )


def _with_surface(part: Booted, layer: ServedLayer, workshop: Workshop, measure: bool) -> Booted:
    """What batches with routes to a part alone take in the whole layer."""
    slots = layer.slot_of[list(part.served.held)].tolist()
    problem = part.assignment.decision.problem
    return replace(
        part, surface=surface_of(layer.experts, slots, problem, workshop, device=part.device, measure=measure)
    )


def _joined(assignment: Assignment, parts: Sequence[tuple[int, Booted]], workshop: Workshop) -> ServedLayer:
    space = workshop.space
    assert space is not None
    info, slot = assignment.info, {e: i for i, e in enumerate(assignment.held)}
    made = [Part(s, b.served.experts, [slot[e] for e in b.served.held], b.served.capturable) for s, b in parts]
    experts = workshop.alone(lambda: join(space, made, len(assignment.held), info.hidden_size, info.top_k))
    try:
        measured = warm_up(experts, assignment, workshop)
    except BackendRejectedError as e:
        raise BootError(f"layer {info.layer}: {e}") from e
    return ServedLayer(
        layer=info.layer,
        num_experts=info.num_experts,
        held=assignment.held,
        top_k=info.top_k,
        hidden_size=info.hidden_size,
        intermediate_size=info.intermediate_size,
        experts=experts,
        backend=experts.backend,
        measured=tuple(measured),
    )


def _prepared(
    choice: Choice, assignment: Assignment, canonical: LayerWeights, workshop: Workshop, like: Booted | None
) -> list[tuple[int | None, Prepared]]:
    """[(tokens up to, what serves them)], of backends that passed.  Raises BootError when the choice is exhausted."""
    prepared: dict[str, Prepared] = {}
    while True:
        wanted = choice.plan()
        row = next((b for _, b in wanted if b.name not in prepared), None)
        if row is None:
            return [(most, prepared[b.name]) for most, b in wanted]
        try:
            found = prepare(row, assignment, canonical, workshop)
            if like is not None and row.name in like.errors:
                measured = like.served.measured
            else:
                measured = tuple(warm_up(found.experts, assignment, workshop))
            prepared[row.name] = replace(found, measured=measured)
        except BackendRejectedError as e:
            if fault := device_fault(workshop.device):
                raise BootError(
                    f"layer {assignment.info.layer}: the device is lost to this process: {fault}, {e}; choose another"
                    f" --backend than {row.name}, and report this"
                ) from e
            choice.refuse(row.name, e)


def _served(assignment: Assignment, parts: Sequence[tuple[int | None, Prepared]], workshop: Workshop) -> ServedLayer:
    info, route_s = assignment.info, workshop.route_s
    experts: Experts = parts[0][1].experts
    if len(parts) > 1:
        experts = BucketedExperts([(most, m.experts) for most, m in parts])
    if route_s:
        experts = slowed(experts, route_s, beside_others=bool(workshop.parts_s))
    return ServedLayer(
        layer=info.layer,
        num_experts=info.num_experts,
        held=assignment.held,
        top_k=info.top_k,
        hidden_size=info.hidden_size,
        intermediate_size=info.intermediate_size,
        experts=experts,
        backend="+".join(dict.fromkeys(m.backend.name for _, m in parts)),
        capturable=not route_s and all(m.backend.capturable for _, m in parts),
        in_place=all(m.backend.in_place for _, m in parts),
        takes_e4m3=takes_e4m3(experts),
        plan=tuple((most, m.backend.name) for most, m in parts),
        measured=_measured(parts),
    )


def _measured(parts: Sequence[tuple[int | None, Prepared]]) -> tuple[tuple[int, int, int], ...]:
    """Of each backend what it was warmed up with, of the sizes that it serves."""
    found: list[tuple[int, int, int]] = []
    least = 0
    for most, m in parts:
        found += [took for took in m.measured if least < took[0] and (most is None or took[0] <= most)]
        least = most or least
    return tuple(found)


def boot_layers(
    assignments: Sequence[Assignment],
    workshop: Workshop,
    *,
    oracle: Autotuning | None = None,
    done: Callable[[Booted], None] = lambda b: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Booted]:
    """Boot the layers one after another; done() after each.  Raises BootError, or Stopped once stopped() says so."""
    out = []
    ahead = ReadAhead(workshop.source, *_ahead([part for a in assignments for part in a.each], workshop))
    fetched = storage_bytes()
    try:
        for at in workshop.each:
            if at.memory is not None:
                with at.computing():
                    hold(at.memory, at.device)
        with workshop.computing():
            for assignment in assignments:
                if stopped():
                    raise Stopped
                out.append(boot_layer(assignment, workshop, oracle, ahead, stopped=stopped))
                workshop.give_back()
                done(out[-1])
    finally:
        ahead.close()
        workshop.reading["seconds"] += ahead.seconds
        workshop.reading["fetched"] += storage_bytes() - fetched
    return out


def _ahead(
    assignments: Sequence[Assignment], workshop: Workshop
) -> tuple[Sequence[Assignment], Callable[[Assignment], bool]]:
    """What may be read ahead: nothing that is drawn on the device, where there is room for one layer."""
    on_device = getattr(workshop.source, "device", None) not in (None, torch.device("cpu"))
    return () if on_device else assignments, lambda a: will_read(a, workshop)
