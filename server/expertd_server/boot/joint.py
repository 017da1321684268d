"""A layer's experts shared among several devices: where each of them goes, and whether that fits.

    places   = resolve_places(config)                       what --device names, refused where it is not there
    assigner = JointAssigner(config, source, places)        as Assigner; its assignments have parts
    assigner.settle(free)                                   how many experts of a layer each place takes

The experts that are used most go to the place that is named first.  Places of one kind take equal numbers, up to what
their memory allows; what is left goes to the next kind.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.common.ranges import format_ranges
from expertd_kernels.common.problem import Device, Package
from expertd_kernels.native.cores import physical_cores
from expertd_kernels.oracle import table
from expertd_kernels.oracle.probe import packages_for
from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import Assigner, Assignment, WrongOptionError, resolve_device
from expertd_server.boot.memory import fits_into, largest, most_that_fits, site_config
from expertd_server.config.serve import ServeConfig

if TYPE_CHECKING:
    import torch

# Why it is so: decision 175 in DECISIONS.md.
__all__ = ["JointAssigner", "Place", "read_stats", "resolve_places"]


@dataclass(frozen=True)
class Place:
    """A device of --device: its name there, what the oracle and what torch call it, and the memory node of a CPU,
    None = all."""

    name: str
    kind: Device
    device: torch.device
    node: int | None = None


def resolve_places(config: ServeConfig) -> list[Place]:
    """Raises BootError where one is not there."""
    nodes = sorted({core.node for core in physical_cores()})
    out = []
    for name in config.devices:
        kind, _, number = name.partition(":")
        if kind != "cpu" or not number:
            out.append(Place(name, *resolve_device(name)))
            continue
        if not number.isdigit() or int(number) not in nodes:
            raise WrongOptionError(
                f"device {name!r} is not on this machine, whose memory nodes are {format_ranges(nodes)}: want cpu:N for"
                " one of them, or cpu for all"
            )
        out.append(Place(name, *resolve_device("cpu"), int(number)))
    return out


def read_stats(path: Path) -> dict[int, list[float]]:
    """Layer -> routes to each expert, as `expertctl plan --record` writes it.  Raises WrongOptionError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        stats = {int(layer): [float(n) for n in row] for layer, row in found.items()}
    except OSError as e:
        raise WrongOptionError(f"--routing-stats {path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, TypeError, AttributeError):
        raise WrongOptionError(
            f'--routing-stats {path}: got something else, want JSON: {{"0": [routes of each expert], ...}} as'
            " expertctl plan --record writes it"
        ) from None
    bad = next((layer for layer, row in stats.items() if not all(0 <= n < float("inf") for n in row)), None)
    if bad is not None:
        raise WrongOptionError(f"--routing-stats {path}: layer {bad} has a number below 0 or none, want routes >= 0")
    return stats


class JointAssigner(Assigner):
    """As Assigner, for layers that the places share.  Before settle() every place is taken to have room for all."""

    def __init__(
        self,
        config: ServeConfig,
        source: ExpertSource,
        places: Sequence[Place],
        packages: Sequence[Mapping[str, Package]] | None = None,
    ) -> None:
        """packages: by place, default: those that are installed here.  Raises BootError for statistics of another
        model."""
        if packages is None:
            packages = [packages_for(p.kind, table.BACKENDS, config.cache) for p in places]
        super().__init__(config, source, places[0].kind, packages[0])
        self.places = tuple(places)
        self._each = [
            Assigner(config, source, p.kind, found, joint=True) for p, found in zip(places, packages, strict=True)
        ]
        self._stats = {} if config.routing_stats is None else read_stats(config.routing_stats)
        self._counts: tuple[int, ...] | None = None
        self._moved: dict[int, Mapping[int, int]] = {}
        self.why = ""
        """How it was decided which experts go where, for people."""

    def of(self, source: ExpertSource) -> Assigner:
        out = super().of(source)
        assert isinstance(out, JointAssigner)
        out._each = [a.of(source) for a in self._each]
        return out

    def layer(self, n: int, held: Collection[int] | None = None) -> Assignment:
        whole = super().layer(n, held)
        parts = []
        for site, experts in enumerate(self._shares(whole)):
            if experts:
                parts.append((site, replace(self._each[site].layer(n, experts), why=self._reason(n))))
        decisions = [a.decision for _, a in parts]
        found = next((d for d in decisions if d.chosen is None), decisions[0])
        pin = self._pins(n)
        if pin is not None and pin not in [d.pin for d in decisions]:
            found = whole.decision  # which refuses it for what the first place is
        problem = replace(found.problem, num_experts=len(whole.held))
        return replace(whole, decision=replace(found, problem=problem), parts=tuple(parts))

    def settle(self, free: Sequence[int]) -> None:
        """Decide how many experts of a layer each place takes.  free: bytes of each place, 0 = not known.  Raises
        BootError where the experts do not fit, with what would."""
        layers = super().all()
        held = max((len(a.held) for a in layers), default=0)
        self._check_stats(layers)
        most = [self._most(site, layers, held, free[site]) for site in range(len(self.places))]
        if self._config.split is not None:
            self._counts = self._as_asked(layers, most)
            self.why = f"--split {self._config.split}"
            return
        if sum(most) < held:
            raise WrongOptionError(self._what_fits(layers, held, most, free))
        self._counts = _filled(held, most, [p.kind.kind for p in self.places])
        limited = [p.name for p, n, m in zip(self.places, self._counts, most, strict=True) if n == m < held]
        self.why = f"as many as fit into {', '.join(limited)}" if limited else "everything fits"

    def shares_text(self) -> str:
        """ "96 on cuda:0, 32 on cpu (--split 96,32)"."""
        shares = ", ".join(f"{n} on {p.name}" for n, p in zip(self._counts or (), self.places, strict=True))
        return f"{shares} ({self._reason()})"

    def arrange(self, layer: int, where: Mapping[int, int]) -> Mapping[int, int]:
        """From now on each expert of that layer is at the place of that number, as many as each place has; {}: as it
        was at the start.  Returns what was said before."""
        before = self._moved.pop(layer, {})
        if where:
            self._moved[layer] = where
        return before

    def _reason(self, layer: int = -1) -> str:
        order = "the most used first" if self._stats else "in order of their ids"
        return f"{self.why}; {'moved as routing changed' if layer in self._moved else order}"

    def _shares(self, whole: Assignment) -> list[tuple[int, ...]]:
        """Ids of the experts at each place, ascending."""
        row, moved = self._stats.get(whole.info.layer, []), self._moved.get(whole.info.layer, {})

        def rank(e: int) -> tuple[int, float, int]:
            return moved.get(e, len(self.places)), -row[e] if e < len(row) else 0.0, e

        ranked = sorted(whole.held, key=rank)
        counts = self._counts or (len(ranked),)
        out, at = [], 0
        for n in counts[:-1]:
            out.append(tuple(sorted(ranked[at : at + n])))
            at += n
        return [*out, tuple(sorted(ranked[at:]))]

    def _what_fits(self, layers: Sequence[Assignment], held: int, most: Sequence[int], free: Sequence[int]) -> str:
        """Why not everything does, and what would."""

        def fit(n: int) -> bool:
            rooms = [self._most(site, layers[:n], held, free[site]) for site in range(len(self.places))]
            return sum(rooms) >= held

        rooms = ", ".join(f"{n} at {p.name}" for n, p in zip(most, self.places, strict=True))
        options = []
        if few := largest(len(layers) - 1, fit):
            numbers = format_ranges(a.info.layer for a in layers[:few])
            options.append(f"the first {few} of {len(layers)} layers would fit (--layers {numbers})")
        if sum(most):
            options.append(f"{sum(most)} of the experts would fit (--shard 0/{-(-held // sum(most))})")
        options.append("allow more (--memory-limit), or name a further device")
        return (
            f"--device {self._config.device}: a layer has {held} experts, and with {len(layers)} layers there is room"
            f" for {rooms}: {'; '.join(options)}"
        )

    def _most(self, site: int, layers: Sequence[Assignment], held: int, free: int) -> int:
        """The most experts of each layer that fit there beside the others at places of the same memory, and beside one
        layer more where experts are moved."""
        same = [i for i, p in enumerate(self.places) if p.device == self.places[site].device]
        config = site_config(self._config, self.places[site].name)
        alone = [self._each[site].layer(a.info.layer, a.held) for a in layers]
        if self._config.move_rate and alone:
            alone.append(max(alone, key=lambda a: len(a.held)))
        return most_that_fits(held, alone, lambda these: fits_into(config, these, free // len(same)))

    def _as_asked(self, layers: Sequence[Assignment], most: Sequence[int]) -> tuple[int, ...]:
        split = self._config.split
        assert split is not None
        odd = next((a for a in layers if len(a.held) != sum(split.counts)), None)
        if odd is not None:
            raise WrongOptionError(
                f"--split {split}: got {sum(split.counts)} experts, but layer {odd.info.layer} has {len(odd.held)} to"
                " be served; want numbers that add up to that"
            )
        for place, n, fit in zip(self.places, split.counts, most, strict=True):
            if n > fit:
                raise WrongOptionError(
                    f"--split {split}: {n} experts of each of {len(layers)} layers do not fit into {place.name}: {fit}"
                    " would"
                )
        return split.counts

    def _check_stats(self, layers: Sequence[Assignment]) -> None:
        """Raises WrongOptionError for those of another model."""
        path = self._config.routing_stats
        if path is None:
            return
        for a in layers:
            got = len(self._stats.get(a.info.layer, []))
            if got != a.info.num_experts:
                what = f"{got} numbers for layer {a.info.layer}" if got else f"nothing for layer {a.info.layer}"
                raise WrongOptionError(
                    f"--routing-stats {path}: got {what}, want {a.info.num_experts}, one for each expert: is it another"
                    " model's?"
                )


def _filled(held: int, most: Sequence[int], kinds: Sequence[str]) -> tuple[int, ...]:
    """Experts of a layer at each place: kinds in order of their first place, the same number at all of a kind, as far
    as each has room."""
    counts, left = [0] * len(most), held
    for kind in dict.fromkeys(kinds):
        open_ = [i for i, k in enumerate(kinds) if k == kind]
        while left and open_:
            each, more = divmod(left, len(open_))
            for j, i in enumerate(list(open_)):
                n = min(most[i] - counts[i], each + (j < more), left)
                counts[i] += n
                left -= n
            open_ = [i for i in open_ if counts[i] < most[i]]
    return tuple(counts)
