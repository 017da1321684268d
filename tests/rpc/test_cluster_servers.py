"""A cluster of real servers in this process, whole model or parts of it, equals one server that has all."""

from __future__ import annotations

import re
from pathlib import Path

import in_process
import pytest
import torch

from expertd_client import ExpertClient, Grouped, GrpcTransport
from expertd_client.cluster import AsyncExpertCluster, ExpertCluster
from expertd_client.cluster.cluster import Outcome
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import open_source
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Ranges

H, E, K, LAYER = 256, 8, 2, 1
TINY = {"synthetic": "tiny:int4_g128"}
LAYOUTS = {
    "one": ["0-7"],
    "two": ["0-3", "4-7"],
    "three, uneven": ["0", "1-3", "4-7"],
    "eight": [str(e) for e in range(E)],
    "replicas": ["0-3", "4-7", "0-3", "4-7"],
    "a whole replica": ["0-7", "0-3", "4-7"],
}


@pytest.fixture(scope="module")
def hosts():
    """hosts(experts, backend): the address of a server of them; each is started once."""
    with in_process.hosts(**TINY, layers=Ranges.parse("1")) as serve:
        made: dict[tuple[str, str], list[str]] = {}

        def start(experts: str, backend: str) -> str:
            return serve(experts=Ranges.parse(experts), backend=backend).address

        def get(layout, backends):
            found: list[str] = []
            for n, experts in enumerate(layout):
                kept = made.setdefault((experts, backends[n % len(backends)]), [])
                if not any(a not in found for a in kept):
                    kept.append(start(experts, backends[n % len(backends)]))
                found.append(next(a for a in kept if a not in found))
            return found

        yield get


@pytest.fixture(scope="module")
def weights():
    return open_source(ServeConfig(**TINY)).load(LAYER, range(E))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backends", [("reference",), ("reference", "cpu_torch")], ids=["reference", "mixed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cluster_equals_one_server(hosts, weights, name, backends):
    (alone,) = hosts(["0-7"], backends[:1])
    with ExpertClient(alone) as one, ExpertCluster(hosts(LAYOUTS[name], backends), timeout_s=30.0) as cluster:
        for tokens, seed in ((1, 0), (7, 1), (64, 2)):
            x, ids, w = random_inputs(tokens, H, E, K, seed=seed)
            want = reference(weights, x, ids, w)
            for dtype, bound in ((torch.float32, tolerance("bf16")), (torch.bfloat16, tolerance("bf16"))):
                whole = one.forward(LAYER, x.to(dtype), ids, w)
                joined = cluster.forward(LAYER, x.to(dtype), ids, w)
                assert joined.output.dtype == dtype
                assert joined.routes_computed == whole.routes_computed == tokens * K
                assert relative_error(joined.output.float(), want) <= bound
                assert relative_error(joined.output.float(), whole.output.float()) <= bound


@pytest.mark.timeout(120)
def test_one_backend_in_float32_gives_the_same_bits_from_whichever_replica(hosts):
    addresses = hosts(LAYOUTS["replicas"], ("reference",))
    first, second, first_too, second_too = addresses
    x, ids, w = random_inputs(33, H, E, K, seed=3)
    answers, asked = set(), set()
    pairs = [[a, b] for a in (first, first_too) for b in (second, second_too)]
    for some in (*pairs, [second_too, first], addresses, addresses[::-1]):
        with ExpertCluster(some, timeout_s=30.0) as cluster:
            for _ in range(3):
                answer = cluster.forward(LAYER, x.float(), ids, w)
                answers.add(answer.output.numpy().tobytes())
                asked.update(part.server for part in answer.parts)
    assert len(answers) == 1
    assert asked == set(addresses)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", [None, GrpcTransport], ids=["best", "inline"])
def test_servers_of_this_host_are_asked_over_shared_memory(hosts, transport):
    addresses = hosts(LAYOUTS["two"], ("reference",))
    x, ids, w = random_inputs(9, H, E, K, seed=6)
    with ExpertCluster(addresses, timeout_s=30.0, transport=transport) as cluster:
        outputs = [cluster.forward(LAYER, x, ids, w).output for _ in range(50)]
        for member in cluster._members.by_address.values():
            agreed = Outcome()
            member.exchange.session(agreed)
            assert agreed.wait(5).transport == ("inline" if transport else "shm")
    assert all(torch.equal(output, outputs[0]) for output in outputs)


GROUPED = {
    "contiguous": (Grouped([5, 0, 3, 6], [2, 3, 1, 3]), [5, 5, 0, 0, 0, 3, 6, 6, 6]),
    "batched": (Grouped([5, 0, 3], [2, 3, 0], 3), [5, 5, -1, 0, 0, 0, -1, -1, -1]),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("name", ["one", "three, uneven", "replicas"])
def test_rows_grouped_by_expert_are_split_by_the_servers_of_their_experts(hosts, weights, name, kind):
    grouped, experts = GROUPED[kind]
    x = random_inputs(9, H, E, 1, seed=3)[0]
    ids = torch.tensor(experts)[:, None]
    x[ids[:, 0] < 0] = float("nan")
    want = reference(weights, x.nan_to_num(), ids, torch.ones(9, 1))
    (alone,) = hosts(["0-7"], ("reference",))
    with ExpertClient(alone) as one, ExpertCluster(hosts(LAYOUTS[name], ("reference",)), timeout_s=30.0) as cluster:
        whole = one.forward(LAYER, x.float(), grouped=grouped)
        for dtype in (torch.float32, torch.bfloat16):
            answer = cluster.forward(LAYER, x.to(dtype), grouped=grouped)
            assert answer.output.dtype == dtype
            assert relative_error(answer.output.float(), want) <= tolerance("bf16")
            assert not answer.output[ids[:, 0] < 0].any()
            assert answer.routes_computed == whole.routes_computed == int((ids >= 0).sum())
        assert torch.equal(cluster.forward(LAYER, x.float(), grouped=grouped).output, whole.output)
        if name == "three, uneven":
            assert len({part.server for part in answer.parts}) == (3 if kind == "contiguous" else 2)


@pytest.mark.timeout(120)
async def test_grouped_rows_in_an_event_loop(hosts):
    grouped, _ = GROUPED["batched"]
    x = random_inputs(9, H, E, 1, seed=3)[0].float()
    addresses = hosts(LAYOUTS["two"], ("reference",))
    with ExpertCluster(addresses, timeout_s=30.0) as cluster:
        want = cluster.forward(LAYER, x, grouped=grouped)
    async with AsyncExpertCluster(addresses, timeout_s=30.0) as cluster:
        got = await cluster.forward(LAYER, x, grouped=grouped)
    assert torch.equal(got.output, want.output)
    assert want.output.any()


@pytest.mark.timeout(120)
async def test_in_an_event_loop_the_bits_are_the_same(hosts):
    addresses = hosts(LAYOUTS["two"], ("reference",))
    x, ids, w = random_inputs(9, H, E, K, seed=4)
    with ExpertCluster(addresses, timeout_s=30.0) as cluster:
        want = cluster.forward(LAYER, x.float(), ids, w)
    async with AsyncExpertCluster(addresses, timeout_s=30.0) as cluster:
        got = await cluster.forward(LAYER, x.float(), ids, w)
    assert torch.equal(got.output, want.output)
    assert [part.server for part in got.parts] == [part.server for part in want.parts] == addresses


def test_the_example_in_the_docs_runs(hosts, capsys):
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    addresses = iter(hosts(LAYOUTS["replicas"][:3], ("reference",)))
    example = re.sub(r'"10\.0\.0\.\d:50051"', lambda found: repr(next(addresses)), example)
    x, ids, w = random_inputs(4, H, E, K, seed=5)
    exec(example.replace("forward(0,", f"forward({LAYER},"), {"hidden_states": x, "topk_ids": ids, "topk_weights": w})
    shown = capsys.readouterr().out
    assert "torch.Size([4, 256])" in shown
    assert shown.count("reference") == 2
