"""What the coordinator says of its servers, and when: with servers that are played."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the room imports it; pip install ray (the extra `deploy` has it)")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from expertctl.ray import coordinator as module
from expertctl.ray.coordinator import Coordinator
from expertctl.ray.spec import Place, Spec

pytestmark = pytest.mark.timeout(60)


class Played:
    """A server's actor: says what `said` is, or raises it; nothing before it is set."""

    def __init__(self, number: int) -> None:
        self.said: object = None
        self.asked = 0
        self.serving = {
            "phase": "serving",
            "why": "",
            "address": f"10.0.0.{number}:70",
            "metrics": "",
            "node": f"10.0.0.{number}",
            "pid": number,
        }
        self.state = SimpleNamespace(remote=self._state)

    async def _state(self):
        while self.said is None:
            await asyncio.sleep(0.01)
        self.asked += 1
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class WithoutRay(Coordinator):
    """Its servers are played; made: which were, in order."""

    def __init__(self, spec: Spec) -> None:
        self.made: list[Place] = []
        self.played = {place: Played(n) for n, place in enumerate(spec.places(), 1)}
        super().__init__(spec)

    def _made(self, place: Place) -> Played:
        self.made.append(place)
        return self.played[place]

    def _again(self, place: Place) -> None:
        self._made(place)


class Clock:
    """The coordinator's: it stands until a test moves it."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    time_ns = staticmethod(time.time_ns)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
async def coordinator(monkeypatch, clock):
    monkeypatch.setattr(module, "WATCH_S", 0.1)
    monkeypatch.setattr(module, "_LOOK_S", 0.005)
    coordinator = WithoutRay(Spec("a", (), shards=2))
    yield coordinator
    coordinator._running.cancel()


async def until(so):
    while not so():  # pytest ends it
        await asyncio.sleep(0.005)


async def listed(coordinator, wanted, after=0):
    """What is said as soon as it is `wanted`."""
    while True:  # pytest ends it
        said = await coordinator.servers(after)
        if said is not None and said[1] == wanted:
            return said
        await asyncio.sleep(0.005)


async def asked_again(*played, times=3):
    """Waits until the coordinator has heard each so many times more, so that it had to act on what they say."""
    wanted = [each.asked + times for each in played]
    await until(lambda: all(each.asked >= n for each, n in zip(played, wanted, strict=True)))


async def test_a_coordinator_that_was_started_again_says_nothing_before_it_knows(coordinator, monkeypatch):
    one, two = coordinator.played.values()
    assert await coordinator.servers(0) is None
    one.said = one.serving
    await asked_again(one)
    assert await coordinator.servers(0) is None, "clients would drop the other one, which serves"
    two.said = two.serving
    version, _ = await listed(coordinator, ("10.0.0.1:70", "10.0.0.2:70"))
    assert version > 0


async def test_who_does_not_answer_a_new_coordinator_is_waited_for_no_longer_than_that(coordinator, clock):
    one = coordinator.played[Place(0, 0)]
    one.said = one.serving
    await asked_again(one)
    clock.now_s += module._LEARN_S
    assert await coordinator.servers(0) is None
    clock.now_s += 0.001
    await listed(coordinator, ("10.0.0.1:70",))


async def test_news_come_at_once_and_only_news(coordinator, clock):
    for played in coordinator.played.values():
        played.said = played.serving
    version, both = await listed(coordinator, ("10.0.0.1:70", "10.0.0.2:70"))
    assert await coordinator.servers(version) == (version, both), "after a while"
    one, two = coordinator.played.values()
    one.said = ActorUnavailableError("gone", None)
    later, _ = await listed(coordinator, ("10.0.0.2:70",), version)
    assert later > version
    rows = await coordinator.rows()
    assert [(row["part"], row["replica"], row["phase"]) for row in rows] == [(0, 0, "away"), (1, 0, "serving")]
    two.said = ActorDiedError()
    await listed(coordinator, (), later)
    one.said = one.serving
    await listed(coordinator, ("10.0.0.1:70",))
    first = [Place(0, 0), Place(1, 0)]
    await asked_again(one, two)
    assert coordinator.made == first, "its time has not come"
    for _ in range(3):
        clock.now_s += 100.0
        await asked_again(one, two)
    assert coordinator.made == [*first, Place(1, 0)], "who is gone for good is made anew, once"
