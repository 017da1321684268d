"""Ray as a source: an actor of the wanted name that is no coordinator, or says what is no list of servers."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the source imports it; pip install ray (the extra `deploy` has it)")

from ray.exceptions import RayActorError

from expertd.errors import PlacementError
from expertd.placement import MOST_SERVERS
from expertd_client.cluster import ray as module
from expertd_client.cluster.ray import RayServers


@pytest.fixture
def says(monkeypatch):
    """Sets what the actor says; an exception: what asking it raises."""
    said = []

    def get(found, timeout):
        if isinstance(found, Exception):
            raise found
        return found

    servers = SimpleNamespace(remote=lambda version: said[-1])
    actor = SimpleNamespace(servers=servers)
    monkeypatch.setattr(module, "connect", lambda address: False)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(module.ray, "get", get)
    return said.append


def test_servers_are_read_and_their_going_too(says):
    source = RayServers()
    says((4, ("10.0.0.1:70", "10.0.0.2:70")))
    assert source.read() == ("10.0.0.1:70", "10.0.0.2:70")
    says((5, ()))
    assert source.read() == ()


@pytest.mark.parametrize(
    "answer",
    [
        7,
        "ab",
        (1,),
        (1, 2, 3),
        ("1", ("a:1",)),
        (1, "a:1"),
        (1, ["a:1"]),
        (1, (b"a:1",)),
        (1, ("a:1", "a:1")),
        (1, tuple(f"a:{n}" for n in range(MOST_SERVERS + 1))),
        {"version": 1},
    ],
    ids=lambda answer: repr(answer)[:20],
)
def test_what_is_no_list_of_servers_is_refused(says, answer):
    says(answer)
    with pytest.raises(PlacementError, match="servers 'experts': got"):
        RayServers().read()


def test_an_actor_that_is_no_coordinator(says, monkeypatch):
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: SimpleNamespace())
    with pytest.raises(PlacementError, match="got another actor named 'experts'"):
        RayServers().read()


def test_one_that_fails_or_does_not_know_yet(says):
    says(RayActorError())
    with pytest.raises(PlacementError, match="does not answer"):
        RayServers().read()
    says(None)
    with pytest.raises(PlacementError, match="is asking its servers"):
        RayServers().read()
    says((1, ()))
    with pytest.raises(PlacementError, match="got none that serves"):
        RayServers().read()
