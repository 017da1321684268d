"""expertctl trace and trace() against a real server, by the transports that there are."""

import json

import numpy as np
import pytest
from trace_kit import checked

from expertctl.cli import main
from expertctl.pictures.trace import by_layer
from expertd.shm.region import supported
from expertd_client import AsyncExpertClient, ExpertClient, ExpertCluster, trace

pytestmark = pytest.mark.timeout(120)

X = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
IDS = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.int32)
W = np.full((4, 2), 0.5, np.float32)


def facts(t):
    """What holds on this host, by whatever transport."""
    document, tracks = checked(t)
    assert set(document["otherData"]["clocks"].values()) == {"the clock of this host"}
    for call in t.finished:
        for part in call.answers:
            assert part.timing.kernel_ns > 0
            assert part.timing.backend
            assert part.begin_ns <= part.sent_ns <= part.answered_ns
    for (process, _), events in tracks.items():
        if "caller" not in process:
            assert sum(name == "kernel" for *_, name, _ in events) > 0
    return document


@pytest.mark.parametrize("unary", [False, True])
def test_a_client(tiny_server, unary):
    with ExpertClient(tiny_server, unary=unary) as client:
        want = client.forward(0, X, IDS, W).output.copy()
        if not unary:
            client.session()
        with trace() as t:
            assert np.array_equal(client.forward(0, X, IDS, W).output, want)
            assert np.array_equal(client.submit(1, X, IDS, W).result().output, client.forward(1, X, IDS, W).output)
    facts(t)
    shm = not unary and not supported()
    assert {p.transport for c in t.finished for p in c.parts} == {"shm" if shm else "inline"}
    assert [c.layer for c in t.finished] == [0, 1, 1]


def test_a_slot(tiny_server):
    with ExpertClient(tiny_server) as client, trace() as t:
        client.session()
        slot = client.slot(4, 256, 2, "f32")
        slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = X, IDS, W
        slot.forward(1)
    facts(t)
    assert [(c.layer, c.tokens) for c in t.finished] == [(1, 4)]


async def test_in_an_event_loop(tiny_server):
    async with AsyncExpertClient(tiny_server) as client:
        with trace() as t:
            await client.forward(0, X, IDS, W)
    facts(t)
    assert len(t.finished) == 1


def test_a_cluster(tiny_server):
    with ExpertCluster([tiny_server]) as cluster, trace() as t:
        cluster.forward(0, X, IDS, W)
    facts(t)
    assert len(t.finished) == 1


def test_the_command(tiny_server, tmp_path, capsys):
    out = tmp_path / "step.json"
    assert main(["trace", tiny_server, "--json", "--steps", "2", "--m", "3", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["calls"] == 4
    assert set(said["layers_us"]) == {"0", "1"}
    assert all(layer["kernel"] > 0 for layer in said["layers_us"].values())
    assert json.loads(out.read_text())["otherData"]["calls"] == 4
    assert (tmp_path / "step.svg").read_text().count("2 calls, 6 tokens, 1 server<") == 2
    replica = tiny_server.replace("127.0.0.1", "localhost")
    assert main(["trace", tiny_server, replica, "--layers", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "placed by the clock of this host" in said
    assert str(out) in said
    for words in (["--layers", "7"], ["--out", "a.svg"]):
        assert main(["trace", tiny_server, *words]) == 2


def test_layers_add_up_to_their_calls(tiny_server):
    with ExpertClient(tiny_server) as client, trace() as t:
        for _ in range(3):
            client.forward(0, X, IDS, W)
    whole_us = sum(c.end_ns - c.begin_ns for c in t.finished) / 3000
    assert sum(by_layer(t)[0].values()) == pytest.approx(whole_us)
