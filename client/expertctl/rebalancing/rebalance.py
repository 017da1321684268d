"""Brings a running cluster to a placement, step by step, and takes what it did back where a step fails.

Between two steps every expert has a replica and every server serves, so whoever stops here may go on later: what is
left to do is always found out from what the servers hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from expertctl.planner.observe import ask
from expertctl.rebalancing.admin import Admin
from expertctl.rebalancing.steps import Holdings, Step, changed, holdings, kept, loads, step_of
from expertd.errors import ChangeRefusedError, ExpertdError, PlacementError
from expertd.placement import Placement, Server
from expertd_client.cluster.sources import publish
from expertd_client.transports.admin import admin_address
from expertd_client.transports.credentials import Credentials

__all__ = ["RebalancingFailedError", "Rebalancer", "Options", "Progress"]

_T = TypeVar("_T")
_AT_ONCE = 32
_SETTLE_S = 2.0
"""Until clients know of new replicas: they ask each server once a second."""


class RebalancingFailedError(Exception):
    """A move did not come to its end.  The text says why, and what is held now."""


@dataclass(frozen=True)
class Options:
    """at_once: layers of one step; settle_s: until clients know of a change; publish: a file that clients follow; keep:
    where a step fails, what was done stays; abort: let go of what others have prepared; timeout_s: of a question."""

    at_once: int = 4
    settle_s: float = _SETTLE_S
    publish: Path | None = None
    keep: bool = False
    abort: bool = False
    timeout_s: float = 10.0


@dataclass
class Progress:
    """What a bar shows: layers packed, of how many, and what is done now.  changed: called after each change."""

    total: int = 0
    done: int = 0
    text: str = ""
    changed: Callable[[], None] = field(default=lambda: None)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, text: str) -> None:
        self.text = text
        self.changed()

    def add(self, layers: int) -> None:
        with self._lock:
            self.done += layers
        self.changed()


class Rebalancer:
    """then: what is to be.  Raises the row of the error table where a server does not answer or has no AdminService."""

    def __init__(self, then: Placement, credentials: Credentials | None = None, options: Options | None = None) -> None:
        self.then = then
        self._options = options or Options()
        self._credentials = credentials
        self._addresses = [s.address for s in then.servers]
        described = ask(self._addresses, credentials, self._options.timeout_s)
        self.first = Placement.from_describe(described)
        if then.fingerprint and self.first.fingerprint != then.fingerprint:
            raise PlacementError.about("fingerprint", got=self.first.fingerprint, want=f"{then.fingerprint}, as placed")
        for layer, n in then.num_experts.items():
            if self.first.num_experts.get(layer, n) != n:
                got, want = self.first.num_experts[layer], f"{n}, as placed"
                raise PlacementError.about(f"experts of layer {layer}", got=got, want=want)
        then.check_complete()
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        self._admins: dict[str, Admin] = {}
        self.aborted: list[str] = []
        """Addresses where run() discarded what others had prepared."""
        for address, answer in described.items():
            admin = Admin(address, admin_address(address, answer), credentials)
            self._admins[address] = admin
            self._stack.callback(admin.close)

    def close(self) -> None:
        self._stack.close()

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """From what is held now.  Layers for which some server has no room are done fewer at a time.  Raises
        ChangeRefusedError where one layer is too much."""
        now, at_once = self.now(self.then), self._options.at_once
        layers = changed(now, self.then)
        groups = [layers[i : i + at_once] for i in range(0, len(layers), at_once)]
        return [step for group in groups for step in self._fitting(now, group)]

    def now(self, then: Placement) -> Placement:
        """What its servers say that they hold."""
        return Placement.from_describe(
            ask([s.address for s in then.servers], self._credentials, self._options.timeout_s)
        )

    def _fitting(self, now: Placement, layers: list[int]) -> list[Step]:
        step = step_of(now, self.then, layers)
        try:
            self._each(step.add, lambda admin, wanted: admin.prepare(wanted, self.then.fingerprint, dry_run=True))
        except ChangeRefusedError:
            if len(layers) == 1:
                raise
            half = len(layers) // 2
            return [*self._fitting(now, layers[:half]), *self._fitting(now, layers[half:])]
        return [step]

    # ---- doing it ----------------------------------------------------------------------------------------------------

    def run(self, progress: Progress) -> int:
        """Does all steps.  How many experts were moved.  Raises RebalancingFailedError."""
        try:
            self._clear()
            todo = self.steps()
        except ExpertdError as error:
            raise RebalancingFailedError(f"{error.message}; nothing was moved") from error
        progress.total = sum(loads(step) for step in todo)
        for n, step in enumerate(todo):
            try:
                self._do(step, self.then, progress, f"step {n + 1} of {len(todo)}")
            except ExpertdError as error:
                raise RebalancingFailedError(f"{error.message}; {self._take_back(step, n, progress)}") from error
            except KeyboardInterrupt:
                self._let_go(step)
                raise RebalancingFailedError(
                    f"stopped after {n} of {len(todo)} steps; the same command goes on"
                ) from None
        return sum(step.moves for step in todo)

    def _clear(self) -> None:
        """Lets go of what others have prepared, if that is wanted."""
        if self._options.abort:
            for address, admin in self._admins.items():
                status = admin.status()
                if status.change:
                    admin.abort(status.change)
                    self.aborted.append(address)

    def _do(self, step: Step, then: Placement, progress: Progress, which: str) -> None:
        """Raises ExpertdError; then some servers may hold more than before, and nobody less."""
        layers = f"{which}: layers {_text(step.layers)}"
        if step.add:
            progress.say(f"{layers}, loading")
            self._prepare(step.add, progress)
            progress.say(f"{layers}, more replicas")
            self._each(step.add, lambda admin, wanted: admin.commit(wanted))
        settled_s = time.monotonic() + self._options.settle_s * bool(step.add)
        self._publish(then, ())
        if step.drop:
            progress.say(f"{layers}, making fewer replicas ready")
            self._prepare(step.drop, progress)
        self._require_held(step, then)
        time.sleep(max(0.0, settled_s - time.monotonic()))
        self._publish(then, step.layers)
        if step.drop:
            progress.say(f"{layers}, fewer replicas")
            linger_s = self._options.settle_s
            self._each(step.drop, lambda admin, wanted: admin.commit(wanted, then.epoch, linger_s))

    def _prepare(self, part: Holdings, progress: Progress) -> None:
        def one(admin: Admin, wanted: Mapping[int, tuple[int, ...]]) -> None:
            told = 0

            def count(done: int) -> None:
                nonlocal told
                progress.add(done - told)
                told = done

            admin.prepare(wanted, self.then.fingerprint, told=count)

        self._each(part, one)

    def _require_held(self, step: Step, then: Placement) -> None:
        """Before anybody lets go: that those hold it who are to."""
        held = holdings(self.now(then))
        for server in then.servers:
            for n in step.layers:
                missing = set(server.layers.get(n, ())) - set(held[server.address].get(n, ()))
                if missing:
                    got = f"no expert {min(missing)} of layer {n}"
                    raise PlacementError.about(server.address, got=got, want="it, before others let go of it")

    def _publish(self, then: Placement, layers: Sequence[int]) -> None:
        """What clients that follow a file are to go by from now on: what is held, but these layers as they will be."""
        path = self._options.publish
        if path is not None:
            publish(path, _mixed(self.now(then), then, layers))

    def _take_back(self, step: Step, done: int, progress: Progress) -> str:
        """After a failure.  What it came to, in words."""
        self._let_go(step)
        if self._options.keep:
            return f"{done} steps are done and stay; the same command goes on"
        try:
            away = self._restore(progress)
        except ExpertdError as error:
            return f"what was done could not be taken back: {error.message}; no expert has lost a replica by that"
        return "everything is held as before" + f", but at {', '.join(away)}, which did not answer" * bool(away)

    def _restore(self, progress: Progress) -> list[str]:
        """What was held at first is held again, by the servers that answer; the others."""
        answers = self._pool.map(self._answers, self._addresses)
        alive = [address for address, ok in zip(self._addresses, answers, strict=True) if ok]
        servers = tuple(s for s in self.first.servers if s.address in alive)
        counts = {**self.first.num_experts, **self.then.num_experts}
        epoch = max(self.then.epoch, self.first.epoch) + 1
        first = Placement(servers, counts, epoch, self.first.fingerprint)
        now = self.now(first)
        first = kept(now, first)
        layers, at_once = changed(now, first), self._options.at_once
        for i in range(0, len(layers), at_once):
            step = step_of(now, first, layers[i : i + at_once])
            progress.total += loads(step)
            self._do(step, first, progress, "taking back")
        return [address for address in self._addresses if address not in alive]

    def _answers(self, address: str) -> bool:
        try:
            ask([address], self._credentials, self._options.timeout_s)
        except ExpertdError:
            return False
        return True

    def _let_go(self, step: Step) -> None:
        """Of whatever is prepared for a step, where a server can still be reached."""

        def one(address: str) -> None:
            with suppress(ExpertdError):
                status = self._admins[address].status()
                if status.change.startswith("apply-"):
                    self._admins[address].abort(status.change)

        list(self._pool.map(one, {*step.add, *step.drop}))

    def _each(self, part: Holdings, work: Callable[[Admin, Mapping[int, tuple[int, ...]]], _T]) -> list[_T]:
        """At all servers at once; waits for all, and then raises what one failed with."""
        futures = [self._pool.submit(work, self._admins[address], wanted) for address, wanted in part.items()]
        errors = [error for error in (f.exception() for f in futures) if error is not None]
        if errors:
            raise errors[0]
        return [f.result() for f in futures]


def _mixed(now: Placement, then: Placement, layers: Iterable[int]) -> Placement:
    """What is held now, but these layers as they will be."""
    before, new = holdings(now), set(layers)
    servers = []
    for server in then.servers:
        kept = {n: e for n, e in before.get(server.address, {}).items() if n not in new}
        kept |= {n: e for n, e in server.layers.items() if n in new}
        servers.append(Server(server.address, dict(sorted(kept.items()))))
    return Placement(tuple(servers), {**now.num_experts, **then.num_experts}, then.epoch, now.fingerprint)


def _text(layers: Sequence[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
