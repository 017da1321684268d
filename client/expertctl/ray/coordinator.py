"""The actor that starts a Spec's servers, starts them again, and says which of them serve.

It has a name and outlives whoever made it, and so do its servers: where it ends, Ray starts another one, which finds
them by their names; calls go on meanwhile.  Replicas of a part are a placement group: Ray keeps its bundles apart, and
brings them to other nodes where one is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from expertctl.ray.server import ServerActor
from expertctl.ray.spec import Place, Spec, strategy_of
from expertctl.ray.watched import Watched
from expertd_client.cluster.ray import NAMESPACE, WATCH_S

# Why it is so: decision 139 in DECISIONS.md.
__all__ = ["Coordinator"]

_LOOK_S = 0.1
"""Between two questions to a server where it stands."""
_LEARN_S = 15.0
"""How long servers have to answer a coordinator that is new, before it says which there are without them."""
_SETTLE_S = 0.5
"""Until clients, which wait for news, have taken a server off their lists."""


class Coordinator:
    """An actor with an event loop; all of it runs there, but what waits for Ray."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._watched = {place: Watched() for place in spec.places()}
        self._handles: dict[Place, Any] = {}
        self._groups: dict[int, Any] = {}
        self._version = time.time_ns()  # never one that an earlier coordinator of this name has told
        self._news = asyncio.Event()
        self._ending = False
        self._knows_s = time.monotonic() + _LEARN_S
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def spec(self) -> Spec:
        """What it was made for."""
        return self._spec

    async def servers(self, after: int) -> tuple[int, tuple[str, ...]] | None:
        """(version, addresses of those that serve); where `after` is the version now, at the next change or after
        WATCH_S.  None: it does not know yet, because it was started again; what was said before holds."""
        if after == self._version or not self._knows():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), WATCH_S)
        if not self._knows():
            return None
        serving = () if self._ending else tuple(w.address for w in self._watched.values() if w.phase == "serving")
        return self._version, serving

    async def rows(self) -> list[dict[str, Any]]:
        """Every server, for status."""
        return [{"part": p.part, "replica": p.replica, **w.as_row()} for p, w in self._watched.items()]

    async def down(self, grace_s: float) -> bool:
        """Clients are told, what was taken is answered, and every server ends.  Whether all was answered in time."""
        self._running.cancel()
        self._ending = True
        self._changed()
        await asyncio.sleep(_SETTLE_S)
        answered = await asyncio.gather(*(self._end(place, grace_s) for place in self._handles))
        for group in self._groups.values():
            await asyncio.to_thread(ray.util.remove_placement_group, group)
        return all(answered)

    # ---- servers -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        for place in self._watched:
            self._handles[place] = await asyncio.to_thread(self._made, place)
        await asyncio.gather(*(self._watch(place) for place in self._watched))

    async def _watch(self, place: Place) -> None:
        """Follows one server for ever.  A question to one that Ray has not started, or starts again, waits there."""
        watched = self._watched[place]
        while True:
            try:
                news = watched.heard(await self._handles[place].state.remote(), time.monotonic())
            except ActorDiedError as error:
                news = watched.ended(_last_line(error), time.monotonic())
            except RayError:
                news = watched.lost()
            if news:
                self._changed()
            if watched.due(time.monotonic()):
                await asyncio.to_thread(self._again, place)
            await asyncio.sleep(_LOOK_S)

    def _made(self, place: Place) -> Any:
        """The actor of a place: the one that is there, or a new one."""
        needs = self._spec.needs_of(place.part)
        strategy = PlacementGroupSchedulingStrategy(self._group(place.part), place.replica)
        return (
            ray.remote(ServerActor)
            .options(
                name=f"{self._spec.name}/{place}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_concurrency=4,
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                memory=needs.pop("memory", None),
                resources=needs,
                scheduling_strategy=strategy,
            )
            .remote(self._spec, place)
        )

    def _group(self, part: int) -> Any:
        name = f"{self._spec.name}/{part}"
        if part not in self._groups:
            try:
                self._groups[part] = ray.util.get_placement_group(name)
            except ValueError:  # there is none yet
                needs = self._spec.needs_of(part)
                apart = strategy_of(needs, self._spec.replicas, [n["Resources"] for n in ray.nodes() if n["Alive"]])
                bundles = [needs] * self._spec.replicas
                self._groups[part] = ray.util.placement_group(bundles, apart, name=name, lifetime="detached")
        return self._groups[part]

    def _again(self, place: Place) -> None:
        """Starts a server that could not serve in a new process."""
        with contextlib.suppress(RayError):
            ray.kill(self._handles[place], no_restart=False)
        self._handles[place] = self._made(place)

    async def _end(self, place: Place, grace_s: float) -> bool:
        answered = True
        if self._watched[place].phase == "serving":
            try:
                answered = await asyncio.wait_for(self._handles[place].drain.remote(grace_s), grace_s + 5)
            except (RayError, asyncio.TimeoutError):
                answered = False
        await asyncio.to_thread(ray.kill, self._handles[place])
        return answered

    def _knows(self) -> bool:
        """Whether every server was heard of, or had time to answer."""
        return time.monotonic() > self._knows_s or all(w.phase != "pending" for w in self._watched.values())

    def _changed(self) -> None:
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
