"""The servers of a cluster, and from what they hold the table of each layer.

Members follows what the placement source says and what the servers answer to Describe.  Who asks them, a thread or a
task for each, stands in `watch`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from expertd.common.ranges import format_ranges
from expertd.errors import ExpertdError, LayerNotHeldError, PlacementError, UnavailableError
from expertd.placement import MOST_SERVERS, Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.identity import Identity
from expertd_client.cluster.member import Member
from expertd_client.cluster.table import LayerTable, layer_table
from expertd_client.exchange.exchange import Exchange
from expertd_client.exchange.session import Session
from expertd_client.transports.protocol import Transport

# Why it is so: decision 105 in DECISIONS.md.
__all__ = ["Members", "Targets", "addresses_of"]

log = logging.getLogger(__name__)

Targets = Placement | Sequence[str]
"""What a source says: which server holds what, or addresses of servers that say it themselves."""

PROBE_S, AWAY_S = 1.0, 0.1
"""Between two Describes of a server: that is in use, and that is away."""


def addresses_of(targets: Targets) -> tuple[str, ...]:
    """Of its servers, in order."""
    return tuple(s.address for s in targets.servers) if isinstance(targets, Placement) else tuple(targets)


class Members:
    """Thread-safe.  make: the way to the server at an address.

    by_address  the servers, in the order of the source; never changed in place
    epoch       of the placement; 0 = none
    version     of the weights that calls ask for that name none: 0 while all servers serve the same one
    clock       time.monotonic, or a simulation's
    """

    def __init__(
        self,
        make: Callable[[str], tuple[Transport, Exchange]],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.by_address: Mapping[str, Member] = {}
        self.epoch = 0
        self.version = 0
        self._versions: frozenset[int] = frozenset()
        self._rolls = False
        self._newest = 0
        self._fell: set[tuple[int, int]] = set()
        self._make = make
        self._stall_s = stall_s
        self._identity = Identity()
        self._placed_experts: Mapping[int, int] = {}
        self._lock = threading.Lock()
        self._tables: dict[int, LayerTable] = {}
        self._all_known: Mapping[str, Member] | None = None
        self._alike: dict[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], LayerTable] = {}

    def apply(self, targets: Targets) -> tuple[list[Member], list[Member]]:
        """Takes what a source says: (members that are new, members that left).  Who left gets no new work.  Raises
        PlacementError for more servers than a placement may have."""
        placed: Mapping[str, Mapping[int, tuple[int, ...]]] = {}
        addresses = addresses_of(targets)
        if len(addresses) > MOST_SERVERS:  # each costs a channel and a thread
            raise PlacementError.about("servers", got=len(addresses), want=f"at most {MOST_SERVERS}")
        ways = {a: self._make(a) for a in addresses if a not in self.by_address}
        with self._lock:
            if isinstance(targets, Placement):
                placed = {s.address: s.layers for s in targets.servers}
                if not self.by_address:
                    self._identity = Identity(targets.fingerprint)
                self.epoch, self._placed_experts = targets.epoch, targets.num_experts
            before, after, new = self.by_address, dict[str, Member](), list[Member]()
            for address in addresses:
                known = before.get(address)
                if known is None:
                    known = Member(address, *ways[address], placed.get(address), self._stall_s, self.clock)
                    new.append(known)
                else:
                    known.place(placed.get(address))
                after[address] = known
            left = [m for m in before.values() if m.address not in after]
            for member in left:
                member.leaving = True
                self._identity.forget(member.address)
            self.by_address = after
            self._renew()
        return new, left

    def _renew(self) -> None:
        """Makes the tables that calls use anew, in the thread that learned of a change: calls go by the old ones
        meanwhile, and wait for nothing."""
        tables: dict[int, LayerTable] = {}
        self._alike = {}
        for layer in list(self._tables):
            with contextlib.suppress(ExpertdError):
                tables[layer] = self._table(layer)
        self._tables = tables

    def table(self, layer: int) -> LayerTable:
        """Who holds the experts of a layer.  Raises LayerNotHeldError where nobody has said that there is such one."""
        table = self._tables.get(layer)
        if table is None:
            with self._lock:
                table = self._tables[layer] = self._table(layer)
        return table

    def _table(self, layer: int) -> LayerTable:
        num_experts = self._placed_experts.get(layer) or self._identity.num_experts(layer)
        held = {a: m.held[layer] for a, m in self.by_address.items() if layer in m.held}
        if num_experts is None:
            if self.unknown:
                raise UnavailableError(f"cluster: got no server that answers, want one: {self.troubles()}")
            layers = {n for m in self.by_address.values() for n in m.held}
            raise LayerNotHeldError.about(
                "cluster",
                got=f"layer {layer}",
                want=f"one of layers {format_ranges(layers)}",
                remedy=self.troubles(),
            )
        alike = num_experts, tuple(held.items())
        if alike not in self._alike:  # most layers are held alike
            inside = {a: tuple(e for e in experts if e < num_experts) for a, experts in held.items()}
            self._alike[alike] = layer_table(num_experts, {a: experts for a, experts in inside.items() if experts})
        return self._alike[alike]

    def troubles(self, addresses: Sequence[str] | None = None) -> str:
        """Why servers are not asked now, for people; "" = all are.  addresses: of these servers; None = of all."""
        now_s, known = self.clock(), self.by_address
        found = {a: known[a].trouble(now_s) if a in known else "it left the placement" for a in addresses or known}
        return "; ".join(f"{a}: {why}" for a, why in found.items() if why)

    def all_away(self, addresses: Sequence[str]) -> bool:
        """Whether none of the servers takes requests: each is down, drains, is another model's, or left."""
        known = self.by_address
        return all(a not in known or known[a].away() for a in addresses)

    @property
    def settled(self) -> bool:
        """Whether every server was asked what it holds, and answered or did not."""
        return all(m.asked for m in self.by_address.values())

    @property
    def unknown(self) -> bool:
        """Whether a server that may hold anything has not said yet what it holds."""
        if self._all_known is not self.by_address:
            now = self.by_address
            if not all(m.known or m.leaving for m in now.values()):
                return True
            self._all_known = now  # who has said it once is known for good
        return False

    @property
    def take_e4m3(self) -> bool:
        """Whether every server that has said what it is takes hidden states as e4m3."""
        said = [m.takes_e4m3 for m in self.by_address.values() if m.takes_e4m3 is not None]
        return bool(said) and all(said)

    def knows(self, layer: int) -> bool:
        """Whether a call of that layer need not wait for a server's first word."""
        return layer in self._tables or self._identity.num_experts(layer) is not None or not self.unknown

    def described(self) -> dict[str, pb.DescribeResponse]:
        """What each server said last, by address; without those that have never answered."""
        return {a: m.description for a, m in self.by_address.items() if m.description is not None}

    def sessions(self) -> dict[str, Session]:
        """How messages travel to each server, by address; without those that there is no connection to."""
        found = {a: m.exchange.agreed for a, m in self.by_address.items()}
        return {a: session for a, session in found.items() if session is not None}

    def lacking(self, layers: Sequence[int]) -> ExpertdError | None:
        """Why calls of these layers could not be answered now; None: each of their experts has a server that may be
        asked.  PlacementError where no server would change that by coming back, else UnavailableError."""
        now_s, known = self.clock(), list(self.by_address.values())
        usable = [m for m in known if m.usable(now_s)]
        for layer in layers:
            most = self._placed_experts.get(layer) or self._identity.num_experts(layer)
            missing = set(range(most or 0)).difference(*(m.held.get(layer, ()) for m in usable))
            if most and not missing:
                continue
            away = any(m not in usable and not m.misfit for m in known)
            kind: type[ExpertdError] = UnavailableError if away or not known else PlacementError
            return kind.about(
                f"layer {layer}",
                got=f"no server for experts {format_ranges(missing)}" if most else "no server of this layer",
                want="a replica for every expert",
                remedy=self.troubles() or "start servers for them",
            )
        return None

    def probed(self, member: Member, answer: pb.DescribeResponse | ExpertdError) -> float:
        """A Describe ended.  Seconds until the next one."""
        if isinstance(answer, ExpertdError):
            member.silent(answer)
        else:
            if member.described(answer, self._identity):
                with self._lock:
                    self._renew()
            self.agree()
            member.known = True  # not before the tables say it: a call in between would find nobody, and fail
        if member.leaving and self.by_address.get(member.address) is None:
            self._identity.forget(member.address)  # what it has just said
        return AWAY_S if member.refused else PROBE_S

    # ---- versions of the weights -------------------------------------------------------------------------------------

    def agree(self, layer: int | None = None) -> int:
        """Chooses `version` anew, by what the servers hold.  Returns the version that calls are computed by: the one
        that all servers serve; while they serve several, the newest one of which every expert is held, served or not;
        where there is none, the newest one that is served.  layer: that the calls are for; only this layer counts while
        servers switch one layer after another."""
        there = [m for m in self.by_address.values() if m.versions and not m.leaving]
        there = [m for m in there if not m.refused] or there
        self._versions = frozenset(v for m in there for v in m.versions)
        self._rolls = any(m.rolling for m in there)
        if self._rolls:
            self.version = 0
            return self._version_of(layer, there)[0] if layer is not None else 0
        served = {m.versions[0] for m in there}
        if len(served) < 2:
            self.version, chosen = 0, next(iter(served), 0)
        else:
            every = _experts_of(there)
            whole = [v for v in self._versions if _experts_of([m for m in there if v in m.versions]) == every]
            self.version = chosen = max(whole or served)
        if chosen < self._newest:
            self._warn(chosen)
        self._newest = max(self._newest, chosen)
        return chosen

    def _warn(self, version: int) -> None:
        """Once for each fall: a rollback, or a server that started without its --held, which nobody would notice."""
        fall = self._newest, version
        if version and fall not in self._fell:
            self._fell.add(fall)
            log.warning(
                "calls are computed by version %d of the weights, after version %d: %s; after a rollback this is as it"
                " should be; else a server started again without --held: expertctl update SERVER --checkpoint DIR"
                " --version %d",
                version, self._newest, self.versions_text(), self._newest,
            )  # fmt: skip

    def pin(self, layer: int) -> int:
        """The version that calls for a layer ask for that name none; 0 = none, as all servers serve the same one."""
        if not self._rolls:
            return self.version
        there = [m for m in self.by_address.values() if m.versions and not m.leaving and not m.refused]
        version, several = self._version_of(layer, there)
        return version if several else 0

    def _version_of(self, layer: int, there: Sequence[Member]) -> tuple[int, bool]:
        """(the version that calls for a layer are computed by, whether servers serve several of it)."""
        there = [m for m in there if layer in m.held]
        served = {v for m in there if (v := m.serves(layer))}
        if len(served) < 2:
            return next(iter(served), 0), False
        every = _experts_of(there).get(layer)
        holding = {v: [m for m in there if m.holds(v, layer)] for v in self._versions}
        whole = [v for v, those in holding.items() if _experts_of(those).get(layer) == every]
        return max(whole or served), True

    def learned(self, member: Member, version: int, layer: int) -> None:
        """A server answered with that version of the weights, and was asked for none."""
        if member.computed(version, layer):
            self.agree()

    def versions_text(self) -> str:
        """Which server holds which versions of the weights, for people, the one that it serves first."""
        servers: dict[tuple[int, ...], list[str]] = {}
        for address, member in self.by_address.items():
            if member.versions and not member.leaving:
                servers.setdefault(member.versions, []).append(address)
        found = sorted(servers.items(), reverse=True)
        return "; ".join(f"{', '.join(those)}: {' and '.join(map(str, held))}" for held, those in found)

    def usable(
        self, addresses: Sequence[str], without: Sequence[Member] = (), version: int = 0, layer: int = 0
    ) -> list[Member]:
        """Those of the servers that may be asked now.  version: of the layer's weights, that they must hold where some
        server is known to hold it of any layer; 0 = any."""
        now_s, known = self.clock(), self.by_address
        there = [m for a in addresses if (m := known.get(a)) is not None and m.usable(now_s)]
        if version and version in self._versions:
            there = [m for m in there if m.holds(version, layer)]
        return [m for m in there if m not in without] if without else there


def _experts_of(members: Sequence[Member]) -> dict[int, set[int]]:
    """By layer, what they hold together."""
    out: dict[int, set[int]] = {}
    for member in members:
        for layer, experts in member.held.items():
            out.setdefault(layer, set()).update(experts)
    return out
