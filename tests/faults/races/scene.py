"""Rounds of calls while a replica is killed or hangs, under one schedule: what must not come of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import asking
import numpy as np
import virtual
import world
from virtual import Scheduler, StuckError

from expertd_client.cluster import ExpertCluster, Policy, native
from expertd_client.requests.request import Request

REPLICAS = ("a", "b")
_BACK_S = 30.0


@dataclass
class Found:
    """What a schedule led to.  wrong: what should not have come; log: the end of what happened before the first."""

    seed: int
    calls: int = 0
    kills: int = 0
    points: int = 0
    switches: int = 0
    wrong: list[str] = field(default_factory=list)
    log: Sequence[tuple[float, str, str]] = ()

    def say(self, scheduler: Scheduler, what: str) -> None:
        scheduler.note(f"WRONG: {what}")
        if not self.wrong:
            self.log = list(scheduler.log)
        self.wrong.append(what)


def requests(seed: int) -> list[tuple[Request, Any]]:
    """Some with experts of both halves, and of one; and their answers."""
    rng, made = np.random.default_rng(seed), []
    for low, high in ((0, 8), (0, 8), (0, 4), (4, 8)):
        x = rng.integers(-8, 8, (3, world.H)).astype(np.float32)
        ids = np.stack([rng.permutation(np.arange(low, high))[: world.K] for _ in range(3)]).astype(np.int32)
        weights = (rng.integers(1, 8, ids.shape) / 8).astype(np.float32)
        made.append((Request(0, x, ids, weights), world.answer_to(x, ids, weights, range(world.E))[0]))
    return made


REQUESTS = requests(0)


def explore(seed: int, rounds: int, callers: int = 3) -> Found:
    """One schedule."""
    rng, found = random.Random(seed), Found(seed)
    scheduler = Scheduler(seed, pace=rng.choice((3, 10, 50, 200)), stalls=rng.choice((0.0, 0.1, 0.5)))
    with virtual.scheduled(scheduler):
        main = virtual.Thread(target=_play, args=(scheduler, rng, found, rounds, callers), name="main")
        main.start()
        try:
            scheduler.run(main)
        except StuckError as stuck:
            found.say(scheduler, f"nobody can go on: {stuck}")
        except world.ViolationError as violation:
            found.say(scheduler, str(violation))
        for name, why in scheduler.crashes:
            found.say(scheduler, f"{name} died: {why}")
    found.points, found.switches = scheduler.points, scheduler.switches
    world.Memory.by_session.clear()
    return found


def _play(scheduler: Scheduler, rng: random.Random, found: Found, rounds: int, callers: int) -> None:
    spread_s, service_s = rng.choice((1e-5, 3e-4, 3e-3)), rng.choice((2e-5, 1e-4, 4e-4))
    late = rng.choice((0.05, 0.5))
    servers = {name: world.Server(scheduler, name, service_s, spread_s, late) for name in world.HOLDINGS}
    sessions, policy = rng.random() < 0.8, Policy(hedge=rng.choice((0.0, 0.05, 1.0)), stall_s=rng.choice((0.2, 0.005)))
    cluster = ExpertCluster(
        list(servers), transport=lambda name: world.Transport(servers[name], sessions), policy=policy
    )
    cluster._state.rng = random.Random(rng.random())
    try:
        _call(scheduler, cluster, found, 0)
        _ready(cluster, servers)
        late_s = rng.choice((1e-4, 1e-3))
        for _ in range(20):
            for tokens in (1, 2, 3):
                cluster._state.latencies.add(tokens, late_s)
        for _ in range(rounds):
            _round(scheduler, rng, cluster, servers, found, callers)
            if found.wrong:
                return
        _quiet(cluster, found, scheduler)
    finally:
        cluster.close()
        for thread in scheduler.threads:
            if thread.is_alive() and thread is not scheduler.current:
                thread.join(40.0)
        if left := [t.name for t in scheduler.threads if t.is_alive() and t is not scheduler.current]:
            found.say(scheduler, f"threads that are left: {', '.join(left)}")


def _round(
    scheduler: Scheduler,
    rng: random.Random,
    cluster: ExpertCluster,
    servers: dict[str, world.Server],
    found: Found,
    callers: int,
) -> None:
    """Some calls of each caller, and something that happens to one replica meanwhile."""
    which, numbers = rng.choice(REPLICAS), [rng.randrange(len(REQUESTS)) for _ in range(2 * callers)]

    def caller(mine: list[int]) -> None:
        virtual.sleep(rng.random() * 2e-4)
        for number in mine:
            _call(scheduler, cluster, found, number)

    threads = [virtual.Thread(target=caller, args=(numbers[n::callers],), name=f"caller-{n}") for n in range(callers)]
    for thread in threads:
        thread.start()
    virtual.sleep(rng.random() * 1e-3)
    kills = rng.random() < 0.8
    if kills:
        servers[which].kill()
        found.kills += 1
    else:
        servers[which].hang(rng.choice((0.002, 0.02, 0.3)))
    virtual.sleep(rng.random() * rng.choice((1e-3, 0.1)))
    servers[which].rise()
    for thread in threads:
        thread.join(_BACK_S)
        if thread.is_alive():
            found.say(scheduler, f"a call does not end: {thread.where()}")
            return
    _ready(cluster, servers)


def _ready(cluster: ExpertCluster, servers: dict[str, world.Server]) -> None:
    """Until all servers are asked again, and have their sessions."""
    end_s, pause_s = virtual.monotonic() + _BACK_S, 0.02
    while virtual.monotonic() < end_s:
        known = cluster._members.by_address.values()
        links = [m.exchange._link for m in known]
        now_s = virtual.monotonic()
        asked = not any(cluster.servers.values()) and all(m.usable(now_s) for m in known)
        if asked and all(link is not None and link.alive and link.agreed for link in links):
            return
        virtual.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


def _call(scheduler: Scheduler, cluster: ExpertCluster, found: Found, number: int) -> None:
    request, want = REQUESTS[number]
    found.calls += 1
    try:
        answer = cluster.forward_request(request)
        output = np.array(answer.output)
    except Exception as error:
        found.say(scheduler, f"a call failed: {type(error).__name__}: {error}")
        return
    if not np.array_equal(output, want):
        found.say(scheduler, f"a wrong answer: {output.tolist()}, want {want.tolist()}")


def _quiet(cluster: ExpertCluster, found: Found, scheduler: Scheduler) -> None:
    """Nothing is under way, lent or used any more, once what was given up was answered."""
    gc.collect()
    end_s = virtual.monotonic() + _BACK_S
    while (left := _left(cluster)) and virtual.monotonic() < end_s:
        virtual.sleep(0.05)
    if left:
        found.say(scheduler, f"left over: {left}")


def _left(cluster: ExpertCluster) -> str:
    for m in cluster._members.by_address.values():
        link = m.exchange._link
        way = None if link is None else link.session_connection
        if m.outstanding or m.outstanding_tokens:
            return f"{m.address}: {m.outstanding} parts under way, with {m.outstanding_tokens} tokens"
        if link is not None and link.pending:
            return f"{m.address}: requests that nobody answers: {list(link.pending)}"
        if way is not None and (way._client.taken or way._users != 1 or way._tickets or way._waiting):
            return f"{m.address}: {way._client.taken} tickets, {way._users} users, {way._waiting} waited for"
    return "calls under way" if cluster._state.flights else ""


def prepare() -> None:
    """Before the first explore()."""
    library = native.library()
    if library is None:
        raise SystemExit("the cluster's library is not built: python -m expertd.cxx")
    own = asking.Asking(library)
    native.library = lambda: own  # type: ignore[assignment]
