"""What all servers of a cluster have in common: the model, and where they hold the same experts, the same weights."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertd.common.identity import comparable
from expertd.common.ranges import format_ranges
from expertd.errors import PlacementError
from expertd.placement import MOST_EXPERTS, MOST_OF_MODEL, expert_ids
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.result import FIRST_VERSION

__all__ = ["Identity", "held_by", "identities_of", "rolling_of", "version_of"]

log = logging.getLogger(__name__)

_SHOWN = 20
"""Characters of an identity that people get to see."""


def held_by(answer: pb.DescribeResponse) -> dict[int, tuple[int, ...]]:
    """Layer -> ids of the experts that a server says it holds.  Raises PlacementError where these cannot be."""
    return {layer.layer: expert_ids("Describe", layer) for layer in answer.layers if layer.held}


def version_of(answer: pb.DescribeResponse) -> int:
    """Of the weights that a server serves."""
    return answer.versions[0].number if answer.versions else FIRST_VERSION


def rolling_of(answer: pb.DescribeResponse) -> dict[int, int]:
    """Version of the weights by layer, while a server switches one layer after another; else empty."""
    return {layer: v.number for v in answer.versions for layer in v.layers}


def identities_of(answer: pb.DescribeResponse) -> dict[int, str]:
    """Of the versions of the weights that a server holds, by number, the one that it serves first; "" = not known."""
    return {v.number: v.identity for v in answer.versions} or {FIRST_VERSION: ""}


def _check_sizes(address: str, answer: pb.DescribeResponse) -> None:
    """Before a table is made of what a server says.  Raises PlacementError."""
    sizes = [layer.num_experts for layer in answer.layers]
    for what, got, most in (
        ("experts of a layer", max(sizes, default=0), MOST_EXPERTS),
        ("experts of all layers", sum(sizes), MOST_OF_MODEL),
    ):
        if got > most:
            raise PlacementError.about(f"{address}: {what}", got=got, want=f"at most {most}")
    for layer in answer.layers:
        expert_ids(address, layer)


@dataclass(slots=True, eq=False)
class _Known:
    """The digests of a layer's experts, [E] each: as they were told, and by how many servers."""

    digests: NDArray[np.uint32]
    told: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Said:
    """What a server said of a layer: the version of its weights, ids and digests of its experts."""

    version: int
    experts: NDArray[np.int64]
    digests: NDArray[np.uint32]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Said)
            and self.version == other.version
            and np.array_equal(self.experts, other.experts)
            and np.array_equal(self.digests, other.digests)
        )


class Identity:
    """Learned from the servers that came first.  Thread-safe.

    fingerprint   of the model, "" = not known yet
    """

    def __init__(self, fingerprint: str = "") -> None:
        self._fingerprint = fingerprint
        self._hidden_size = 0
        self._num_experts: dict[int, int] = {}
        self._weights: dict[tuple[int, int], _Known] = {}  # by version and layer
        self._said: dict[str, dict[int, _Said]] = {}  # by address and layer
        self._identities: dict[str, dict[int, str]] = {}  # by address and version
        self._warned: set[int] = set()  # versions
        self._lock = threading.Lock()

    def num_experts(self, layer: int) -> int | None:
        """Of the whole model; None: nobody told."""
        return self._num_experts.get(layer)

    def check(self, address: str, answer: pb.DescribeResponse) -> frozenset[int]:
        """The versions of its weights that it may be asked for.  Raises PlacementError where the server is one of
        another model, or serves other weights than a server that was there before, under the same number of their
        version: its sums must not be added to others', nor stand for them."""
        model = answer.model
        _check_sizes(address, answer)
        with self._lock:
            if not self._hidden_size:
                self._hidden_size = model.hidden_size
            for what, got, want in (
                ("fingerprint", model.fingerprint, self._fingerprint or model.fingerprint),
                ("hidden size", model.hidden_size, self._hidden_size),
                *(
                    (f"experts of layer {x.layer}", x.num_experts, self._num_experts.setdefault(x.layer, x.num_experts))
                    for x in answer.layers
                ),
            ):
                if got != want:
                    raise PlacementError.about(
                        f"{address}: {what}",
                        got=got,
                        want=f"{want}, as the cluster's other servers have",
                        remedy="it serves another model: its partial sums are not added to theirs",
                    )
            self._fingerprint = self._fingerprint or model.fingerprint
            versions = self._check_identities(address, answer)
            self._check_weights(address, answer)
            return versions

    def forget(self, address: str) -> None:
        """The server left: what it said of its weights binds nobody any more."""
        with self._lock:
            self._forget(address)
            self._identities.pop(address, None)

    def _check_identities(self, address: str, answer: pb.DescribeResponse) -> frozenset[int]:
        self._identities.pop(address, None)
        mine, fit = identities_of(answer), dict[int, str]()
        served = {version_of(answer), *rolling_of(answer).values()}
        for number, identity in mine.items():
            others = {a: said[number] for a, said in self._identities.items() if number in said}
            wrong = {a: i for a, i in others.items() if comparable(i, identity) and i != identity}
            if wrong and number in served:
                raise PlacementError.about(
                    f"{address}: version {number} of the weights",
                    got=identity[:_SHOWN],
                    want=f"{next(iter(wrong.values()))[:_SHOWN]}, which {', '.join(wrong)} serve under that number",
                    remedy="its sums are not added to theirs: start it with their checkpoint, or publish"
                    " one version to all of them (expertctl update)",
                )
            if not wrong:
                fit[number] = identity
            self._warn(address, number, identity, others)
        self._identities[address] = fit
        return frozenset(fit)

    def _warn(self, address: str, number: int, identity: str, others: dict[str, str]) -> None:
        """Once for each version, where nobody can tell whether the weights are the same."""
        unlike = [a for a, i in others.items() if not comparable(i, identity)]
        if unlike and number not in self._warned:
            self._warned.add(number)
            log.warning(
                "%s: version %d of the weights cannot be compared with that of %s (%s, %s): their sums are added as if"
                " the weights were the same",
                address, number, unlike[0], identity[:_SHOWN] or "no identity", others[unlike[0]][:_SHOWN] or "none",
            )  # fmt: skip

    def _check_weights(self, address: str, answer: pb.DescribeResponse) -> None:
        version, rolling = version_of(answer), rolling_of(answer)
        said = {
            layer.layer: _Said(
                rolling.get(layer.layer, version),
                np.array(expert_ids(address, layer), np.int64),
                np.array(layer.weight_digests, np.uint32),
            )
            for layer in answer.layers
            if layer.weight_digests and layer.held
        }
        if self._said.get(address) == said:
            return
        self._forget(address)
        for number, mine in said.items():
            known = self._weights.get((mine.version, number))
            most, experts, digests = self._num_experts[number], mine.experts, mine.digests
            if len(experts) != len(digests) or experts[-1] >= most:
                raise PlacementError.about(
                    f"{address}: layer {number}",
                    got=f"{len(digests)} digests of {len(experts)} experts up to {experts[-1]}",
                    want=f"one for each, of ids below {most}",
                )
            if known is not None:
                others = (known.told[experts] > 0) & (known.digests[experts] != digests)
                if others.any():
                    raise self._other_weights(address, mine.version, number, experts[others])
        self._said[address] = said
        for number, mine in said.items():
            most = self._num_experts[number]
            known = self._weights.setdefault(
                (mine.version, number), _Known(np.zeros(most, np.uint32), np.zeros(most, np.int32))
            )
            known.digests[mine.experts] = mine.digests
            known.told[mine.experts] += 1

    def _forget(self, address: str) -> None:
        said = self._said.pop(address, None)
        if said is None:
            return
        for number, mine in said.items():
            self._weights[mine.version, number].told[mine.experts] -= 1
        left = {(one.version, number) for other in self._said.values() for number, one in other.items()}
        self._weights = {key: known for key, known in self._weights.items() if key in left}

    def _other_weights(self, address: str, version: int, number: int, experts: NDArray[np.int64]) -> PlacementError:
        replicas = [
            a
            for a, said in self._said.items()
            if number in said and said[number].version == version and np.isin(experts, said[number].experts).any()
        ]
        return PlacementError.about(
            f"{address}: layer {number}, experts {format_ranges(experts.tolist())}",
            got="other weights than the cluster's other servers hold under the same name",
            want=f"those of {', '.join(replicas)}",
            remedy="it is not asked: look for a damaged or another copy of the checkpoint, on either side",
        )
