"""What the keeper says of its servers, and when: with servers that are played."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the room imports it; pip install ray (the extra `deploy` has it)")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from expertd_client.ray import keeper as module
from expertd_client.ray.keeper import Keeper
from expertd_client.ray.spec import Place, Spec

pytestmark = pytest.mark.timeout(20)


class Played:
    """A server's actor: says what `said` is, or raises it; nothing before it is set."""

    def __init__(self, number: int) -> None:
        self.said: object = None
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
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class WithoutRay(Keeper):
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


@pytest.fixture
async def keeper(monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.1)
    keeper = WithoutRay(Spec("a", (), shards=2))
    yield keeper
    keeper._running.cancel()


async def listed(keeper, wanted, after=0):
    """What is said as soon as it is `wanted`."""
    for _ in range(1000):
        said = await keeper.servers(after)
        if said is not None and said[1] == wanted:
            return said
        await asyncio.sleep(0.02)
    raise AssertionError(said)


async def test_a_keeper_that_was_started_again_says_nothing_before_it_knows(keeper, monkeypatch):
    one, two = keeper.played.values()
    assert await keeper.servers(0) is None
    one.said = one.serving
    await asyncio.sleep(0.2)
    assert await keeper.servers(0) is None, "clients would drop the other one, which serves"
    two.said = two.serving
    version, _ = await listed(keeper, ("10.0.0.1:70", "10.0.0.2:70"))
    assert version > 0


async def test_who_does_not_answer_a_new_keeper_is_waited_for_no_longer_than_that(keeper):
    one = keeper.played[Place(0, 0)]
    one.said = one.serving
    await asyncio.sleep(0.2)
    assert await keeper.servers(0) is None
    keeper._knows_s -= module._LEARN_S
    await listed(keeper, ("10.0.0.1:70",))


async def test_news_come_at_once_and_only_news(keeper):
    for played in keeper.played.values():
        played.said = played.serving
    version, both = await listed(keeper, ("10.0.0.1:70", "10.0.0.2:70"))
    assert await keeper.servers(version) == (version, both), "after a while"
    one, two = keeper.played.values()
    one.said = ActorUnavailableError("gone", None)
    later, _ = await listed(keeper, ("10.0.0.2:70",), version)
    assert later > version
    rows = await keeper.rows()
    assert [(row["part"], row["replica"], row["phase"]) for row in rows] == [(0, 0, "away"), (1, 0, "serving")]
    two.said = ActorDiedError()
    await listed(keeper, (), later)
    one.said = one.serving
    await listed(keeper, ("10.0.0.1:70",))
    for _ in range(1000):
        if len(keeper.made) == 3:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(module._LOOK_S + 1.2)
    assert keeper.made == [Place(0, 0), Place(1, 0), Place(1, 0)], "who is gone for good is made anew, once"
