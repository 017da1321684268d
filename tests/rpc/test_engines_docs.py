"""docs/engines.md: its snippets run as they stand there, but for the address."""

import re
from pathlib import Path

import numpy as np
import pytest
from in_process import hosts

from expertd_client import RemoteExperts
from expertd_server.config.values import Shard

TEXT = (Path(__file__).parents[2] / "docs/engines.md").read_text()
TORCH, NUMPY, CLUSTER, PIN = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def serve():
    with hosts(synthetic="tiny:int4_g128") as start:
        yield start


def run(snippet: str, *addresses: str) -> dict[str, object]:
    """What the snippet has named; its addresses are replaced in their order."""
    for found, address in zip(dict.fromkeys(re.findall(r"\d+\.\d+\.\d+\.\d+:50051", snippet)), addresses, strict=True):
        snippet = snippet.replace(found, address)
    names: dict[str, object] = {}
    exec(snippet, names)
    return names


def test_a_torch_module(serve):
    named = run(TORCH, str(serve().address))
    experts, shared = named["y"] - named["shared"], named["shared"]
    assert experts.shape == shared.shape == (4, 256)
    assert float(experts.abs().max()) > 0


def test_numpy(serve, capsys):
    run(NUMPY, str(serve().address))
    assert capsys.readouterr().out.split() == ["(4,", "256)", "8"]


def test_all_layers_of_a_step_are_pinned_to_one_version():
    layers = [RemoteExperts(None, n) for n in range(3)]
    layers[0].weights_version_seen = 7
    exec(PIN, {"experts": layers})
    assert [layer.weights_version for layer in layers] == [7, 7, 7]


def test_a_cluster_has_the_same_methods(serve):
    halves = [str(serve(shard=Shard(n, 2)).address) for n in (0, 1)]
    named = run(CLUSTER, *halves)
    experts = named["experts"]
    with experts:
        assert list(named["transports"]) == halves
        assert named["described"].model.hidden_size == 256
        answer = experts.forward(
            0, np.ones((2, 256), np.float32), np.tile(np.int32([0, 7]), (2, 1)), np.full((2, 2), 0.5, np.float32)
        )
    assert answer.routes_computed == 4
    assert {part.server for part in answer.parts} == set(halves)
