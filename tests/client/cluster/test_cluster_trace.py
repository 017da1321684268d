"""trace() of a cluster: a part for each server that answered, none for those that were asked in vain."""

import asyncio
import time

import pytest
from cluster_kit import Fake, Looped, Threaded, batch, later, transports
from trace_kit import checked

from expertd.errors import OverloadedError
from expertd_client import AsyncExpertCluster, ExpertCluster, trace

pytestmark = pytest.mark.timeout(30)


def servers():
    return {"a": Fake({0: range(4)}), "b": Fake({0: range(4, 8)})}


def test_every_part_and_the_slower_one_decides():
    found = servers()
    found["b"].does = lambda request: time.sleep(0.02)
    with ExpertCluster(list(found), transport=transports(found, Threaded)) as cluster:
        cluster.forward(0, *batch(9))
        with trace() as t:
            answer = cluster.forward(0, *batch(9))
    document, tracks = checked(t)
    [call] = t.finished
    assert sorted((p.server, p.tokens) for p in call.answers) == sorted((p.server, p.tokens) for p in answer.parts)
    assert document["otherData"]["clocks"] == dict.fromkeys("ab", "the midpoint of each round trip")
    names = {name for (process, _), events in tracks.items() if "caller" in process for *_, name, _ in events}
    assert names == {"call 0", "split", "send a", "send b", "wait", "join"}
    [wait] = [e - b for events in tracks.values() for b, e, name, _ in events if name == "wait"]
    assert wait > 15e6
    assert {process.partition(" ")[0] for process, _ in tracks} == {"caller", "a", "b"}


def test_a_server_that_refused_has_no_part():
    found = {"a": Fake({0: range(8)}), "b": Fake({0: range(8)})}

    def refuse(request):
        raise OverloadedError("not now")

    found["a"].does = refuse
    with ExpertCluster(list(found), transport=transports(found, Threaded)) as cluster, trace() as t:
        for seed in range(12):
            cluster.forward(0, *batch(2, seed=seed))
    assert len(t.finished) == 12
    assert {p.server for c in t.finished for p in c.answers} == {"b"}
    assert {p.server for c in t.finished for p in c.parts} == {"a", "b"}
    checked(t)


async def test_in_an_event_loop():
    found = servers()
    later(found["a"], 0.01)
    async with AsyncExpertCluster(list(found), transport=transports(found, Looped)) as cluster:
        with trace() as t:
            await asyncio.gather(*(cluster.forward(0, *batch(9, seed=n)) for n in range(3)))
    document, tracks = checked(t)
    assert document["otherData"]["calls"] == 3
    callers = [track for process, track in tracks if "caller" in process]
    assert len(callers) == 3  # they overlap
