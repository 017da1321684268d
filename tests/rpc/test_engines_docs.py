"""docs/engines.md: its snippets run as they stand there, but for the address."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import hosts

from expertd.errors import BadDtypeError, BadShapeError, UnavailableError, WeightsVersionNotHeldError
from expertd_client import AsyncExpertClient, ExpertClient, RemoteExperts, StepVersion
from expertd_server.config.values import Shard

TEXT = (Path(__file__).parents[2] / "docs/engines.md").read_text()
TORCH, GRAPH, NUMPY, ASYNC, CLUSTER, STEP, AGREE, ASKED = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def serve():
    with hosts(synthetic="tiny:int4_g128") as start:
        yield start


def run(snippet: str, *addresses: str) -> dict[str, object]:
    """What the snippet has named; its addresses are replaced in their order."""
    for found, address in zip(dict.fromkeys(re.findall(r"\d+\.\d+\.\d+\.\d+:\d{5}", snippet)), addresses, strict=True):
        snippet = snippet.replace(found, address)
    names: dict[str, object] = {}
    exec(snippet, names)
    return names


def test_a_torch_module(serve):
    named = run(TORCH, str(serve().address))
    experts, shared = named["y"] - named["shared"], named["shared"]
    assert experts.shape == shared.shape == (4, 256)
    assert float(experts.abs().max()) > 0


def names(snippet: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Name)}


def test_a_cuda_graph_is_captured_with_names_of_the_first_snippet():
    """It runs with two GPUs alone: tests/gpu/test_remote_graphs.py."""
    assert names(GRAPH) <= {*names(TORCH), "graph"}
    assert ".check()" in GRAPH
    assert callable(RemoteExperts.check)


def test_numpy(serve, capsys):
    run(NUMPY, str(serve().address))
    assert capsys.readouterr().out.split() == ["(4,", "256)", "8"]


def test_an_event_loop(serve, capsys):
    run(ASYNC, str(serve().address))
    assert capsys.readouterr().out == "[8, 8]\n"


async def test_an_event_loop_takes_torch_tensors(serve):
    async with AsyncExpertClient(str(serve().address)) as client:
        answer = await client.forward(0, torch.ones(4, 256), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
    assert isinstance(answer.output, torch.Tensor)


def test_the_torch_snippet_keeps_to_a_server_with_a_small_limit(serve):
    named = run(TORCH, str(serve(max_tokens=64).address))
    assert named["experts"].max_tokens == 64


def test_a_step_of_one_version_and_a_step_that_is_computed_again(serve):
    named = run(STEP, *(str(serve(shard=Shard(n, 2)).address) for n in (0, 1)))
    layers, step, began = named["layers"], named["step"], []

    def model(x):
        began.append(step.number)
        if len(began) == 1:
            raise WeightsVersionNotHeldError("it is gone")
        for layer in layers:
            x = x + layer(x, torch.tensor([[0, 7]] * 4), torch.full((4, 2), 0.5))
        return x

    with named["client"], torch.inference_mode():
        assert named["computed"](model, torch.ones(4, 256)).shape == (4, 256)
        assert (began, step.number) == ([0, 0], 1)
        assert [layer.weights_version_seen for layer in layers] == [1, 1]

        def lost(_):
            raise UnavailableError("away")

        with pytest.raises(UnavailableError):
            named["computed"](lost, None)


def test_ranks_agree_by_a_collective():
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        named = {"ranks": 1, "cpu_group": None, "torch": torch, "StepVersion": StepVersion}
        exec(AGREE, named)
        assert [named["agree"](version) for version in (0, 3)] == [0, 3]
        assert named["step"].answered(3)
    finally:
        group.destroy_process_group()


def test_a_step_of_calls_with_numpy(serve):
    with ExpertClient(str(serve().address)) as client:
        named = {"client": client, "step": StepVersion()}
        exec(ASKED, named)
        x, ids, weights = np.ones((4, 256), np.float32), np.tile(np.int32([0, 1]), (4, 1)), np.ones((4, 2), np.float32)
        answers = [named["forward"](layer, x, ids, weights) for layer in (0, 1)]
        assert [a.weights_version for a in answers] == [1, 1]
        named["step"].begin()
        named["step"].least = 2
        with pytest.raises(WeightsVersionNotHeldError):
            named["forward"](0, x, ids, weights)


def test_a_cluster_has_the_same_methods(serve):
    halves = [str(serve(shard=Shard(n, 2)).address) for n in (0, 1)]
    named = run(CLUSTER, *halves)
    assert list(named["transports"]) == halves
    assert named["described"].model.hidden_size == 256
    answer = named["answer"]
    assert answer.routes_computed == 8
    assert {part.server for part in answer.parts} == set(halves)
    assert torch.equal(named["y"], torch.from_numpy(answer.output))


TAKEN = {
    "hidden states": "float64 float32 float16 bfloat16 int32",
    "expert ids": "int8 int16 uint8 int32 int64 uint16 float32",
    "router weights": "float64 float32 float16 bfloat16",
}
"""Dtypes that are tried; the table says which are taken."""
NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def said(argument: str, column: int) -> set[str]:
    """The dtypes of a row of the table; column: 1 for ExpertClient, 2 for modules."""
    cell = re.search(rf"^\| {argument} \|(.*)$", TEXT, re.MULTILINE)[1].split("|")[column - 1]
    if "any integer" in cell:
        return {"int8", "int16", "uint8", "int32", "int64", "uint16"}
    return {NAMES.get(word, word) for word in re.findall(r"\b(?:b?f|int)\d+\b", cell.replace("sent as f32", ""))}


@pytest.mark.parametrize("column", [1, 2])
def test_the_table_of_dtypes_and_shapes(serve, column):
    with ExpertClient(str(serve().address)) as client, torch.inference_mode():
        module = RemoteExperts(client, 0).eval()

        def call(*tensors):
            return client.forward(0, *tensors).output if column == 1 else module(*tensors)

        def taken(*tensors) -> bool:
            try:
                answer = call(*tensors)
            except (BadDtypeError, BadShapeError):
                return False
            assert (answer.shape, answer.dtype) == (tensors[0].shape, tensors[0].dtype)
            return True

        whole = [torch.ones(4, 256), torch.tensor([[0, 1, 7]] * 4), torch.full((4, 3), 0.5)]
        for at, (argument, dtypes) in enumerate(TAKEN.items()):
            for dtype in dtypes.split():
                tensors = [*whole]
                tensors[at] = tensors[at].to(getattr(torch, dtype))
                assert taken(*tensors) == (dtype in said(argument, column)), (argument, dtype)
        assert taken(*(t[:0] for t in whole))
        assert taken(*(t.repeat(1, 2)[:, ::2] for t in whole))
        assert taken(*(t.view(2, 2, -1) for t in whole)) == (column == 2)
        assert not taken(whole[0], whole[1][:2], whole[2])
