"""Whole models with their experts in other processes: the same tokens, by one server and by several."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from hosts import Hosts, hosts
from test_attach import PROMPTS, relative
from tiny_models import generate, save, tiny_model
from waiting import until

from expertd.placement import Placement, Server
from expertd_client.cluster import ExpertCluster
from expertd_client.transformers import attach, load_without_experts

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
LAYOUTS = {"one server": ["0/1"], "two servers": ["0/2", "1/2"], "four servers": [f"{n}/4" for n in range(4)]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {f: save(tiny_model(f), tmp_path_factory.mktemp(f)) for f in FAMILIES}


@pytest.fixture(scope="module")
def served(checkpoints):
    """(family, layout) -> addresses"""
    configs = {
        (f, layout, shard): {"checkpoint": folder, "shard": shard, "max_tokens": 32}
        for f, folder in checkpoints.items()
        for layout, shards in LAYOUTS.items()
        for shard in shards
    }
    configs |= {(f, "bf16", ""): {"checkpoint": p, "compute_dtype": "bf16"} for f, p in checkpoints.items()}
    with hosts(list(configs.values())) as addresses:
        found = {}
        for (family, layout, _), address in zip(configs, addresses, strict=True):
            found.setdefault((family, layout), []).append(address)
        yield found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_are_the_same(family, layout, served):
    model, addresses = tiny_model(family), served[family, layout]
    with torch.inference_mode():
        logits, tokens = model(PROMPTS).logits, generate(model, PROMPTS, 64)
        with attach(model, addresses[0] if len(addresses) == 1 else addresses):
            assert relative(model(PROMPTS).logits, logits) <= 2e-6
            assert torch.equal(generate(model, PROMPTS, 64), tokens)


@pytest.mark.parametrize("layout", ["one server", "two servers"])
def test_a_prompt_beyond_the_servers_limit(layout, served):
    """33 tokens a row, three rows, 32 tokens a request."""
    model, addresses = tiny_model("mixtral"), served["mixtral", layout]
    prompts = torch.arange(99).view(3, 33) % 96
    with torch.inference_mode():
        logits = model(prompts).logits
        with attach(model, addresses[0] if len(addresses) == 1 else addresses):
            assert relative(model(prompts).logits, logits) <= 2e-6


def test_a_placement_names_the_servers(served, checkpoints):
    first, second = served["qwen3_moe", "two servers"]
    held = {layer: tuple(range(4)) for layer in range(2)}, {layer: tuple(range(4, 8)) for layer in range(2)}
    placement = Placement((Server(first, held[0]), Server(second, held[1])), {0: 8, 1: 8})
    model = load_without_experts(checkpoints["qwen3_moe"], placement, dtype=torch.float32)
    with torch.inference_mode():
        assert relative(model(PROMPTS).logits, tiny_model("qwen3_moe")(PROMPTS).logits) <= 2e-6
    model.model.layers[0].mlp.experts.forwarder.close()


def test_a_server_that_dies_changes_no_token(checkpoints, served):
    """It has a replica; it is killed while the model speaks."""
    model, first, second = tiny_model("qwen3_moe"), *served["qwen3_moe", "two servers"]
    config = {"checkpoint": checkpoints["qwen3_moe"], "shard": "0/2"}
    with torch.inference_mode(), contextlib.closing(Hosts([config])) as dying:
        tokens, steps = generate(model, PROMPTS, 64), itertools.count(1)

        def step(*_):
            if next(steps) == 20:
                dying.kill()

        with ExpertCluster([*dying.addresses, first, second]) as cluster, attach(model, cluster):
            model.model.register_forward_pre_hook(step)
            assert torch.equal(generate(model, PROMPTS, 64), tokens)
            until(lambda: cluster.servers[dying.addresses[0]])  # by a call, or the next look at it
    assert next(steps) == 65


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_it_is_as_near_as_transformers_own_implementations(family, served):
    """Distance of the logits from float32's, beside those of eager, batched_mm and grouped_mm."""
    truth, model = tiny_model(family), tiny_model(family).to(torch.bfloat16)
    ids = torch.arange(96).view(8, 12)
    with torch.inference_mode():
        logits, own = truth(ids).logits, {}
        for name in ("eager", "batched_mm", "grouped_mm"):
            model.set_experts_implementation(name)
            own[name] = relative(model(ids).logits, logits)
        with attach(model, served[family, "bf16"][0]):
            remote = relative(model(ids).logits, logits)
    print(family, {**own, "remote": remote})
    assert remote <= max(own.values()) * 1.05
