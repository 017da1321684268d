"""vLLM's own engine with our classes in its model, against the same model in transformers: each engine in a process of
its own, on a CPU.  The compiled CPU ops that its wheel for CUDA lacks are those of vllm_cpu_ops.py."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: pip install 'expertd[vllm]'", allow_module_level=True)

import engine_kit
import signatures
from engine_kit import NEW_TOKENS, engine, greedy, script
from hosts import hosts

from expertd_client.engines import versions

pytestmark = pytest.mark.timeout(240)  # an engine needs 20 s to come up, and two cores are not always ours


@pytest.fixture(scope="session")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    return engine_kit.plugins(folder, "vllm.general_plugins", "cpu = vllm_cpu_ops:install")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return engine_kit.Models(tmp_path_factory)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_the_same_tokens_with_one_call_a_layer_and_step(models, plugins, family):
    model, whole, front = models(family)
    with hosts([{"checkpoint": whole}]) as [address]:
        found = engine("vllm_process.py", plugins, front, address, {})
    [rank] = found["ranks"]
    assert found["tokens"] == greedy(model)
    assert (rank["layers"], rank["expert_parameters"]) == (2, 0)
    assert rank["steps"] >= NEW_TOKENS
    assert rank["calls"] == 2 * rank["steps"]
    assert rank["tokens"] == 2 * rank["scheduled"]  # no padding, and each token once a layer
    assert found["dummy_calls"] == [0]
    if family == "qwen2_moe":
        assert rank["events"][:3] == ["sent", "shared", "fetched"]  # the shared expert runs meanwhile
        assert rank["events"].count("shared") == rank["calls"]


def test_two_tensor_parallel_ranks_send_each_token_once(models, plugins):
    model, whole, _ = models("qwen2_moe")
    with hosts([{"checkpoint": whole, "shard": "0/2"}, {"checkpoint": whole, "shard": "1/2"}]) as addresses:
        # The whole checkpoint: its experts are passed over.
        found = engine("vllm_process.py", plugins, whole, ",".join(addresses), {"tensor_parallel_size": 2})
    assert found["tokens"] == greedy(model)
    ranks = found["ranks"]
    assert [(rank["layers"], rank["expert_parameters"]) for rank in ranks] == [(2, 0)] * 2
    assert sum(rank["tokens"] for rank in ranks) == 2 * ranks[0]["scheduled"]
    assert min(rank["tokens"] for rank in ranks) > 0
    assert all(rank["calls"] <= 2 * rank["steps"] for rank in ranks)
    assert found["dummy_calls"] == [0, 0]


@pytest.fixture(scope="module")
def layers():
    """What vLLM's classes of one layer do, each with our plugin."""
    return script("vllm_layers.py", "inert", "padding", "addresses", "split", "refusals", "stranger")


def test_nothing_changes_where_nobody_names_servers(layers):
    assert layers["inert"] == ["MoERunner", "RoutedExperts", [[8, 128, 64], [8, 64, 64]]]


def test_rows_of_padding_are_not_sent(layers):
    right, sent, calls, whole = layers["padding"]
    assert right
    assert whole
    assert (sent, calls) == ([4], 1)  # the second step, of padding alone, made no call


def test_a_captured_graph_finds_outputs_where_they_were(layers):
    with_graphs, without, right, kept = layers["addresses"]
    assert right
    assert with_graphs == 1
    assert without > 1  # or the test would hold nothing
    assert kept == [8, 16]


def test_the_compiled_graph_is_split_at_the_experts(layers):
    before, with_ours = layers["split"]
    assert before == [False]
    assert with_ours == [False, True, False]


def test_what_cannot_work_is_refused(layers):
    wanted = [
        "vLLM: remote experts: got CUDA graphs FULL_AND_PIECEWISE",
        "got a compiled model on a CPU",
        "layers.3.mlp.experts: remote experts: got router weights on the experts' inputs",
        "got 2 redundant experts, want none",
        "got a monolithic kernel",
        "got Tensor in place of their method",
    ]
    assert all(part in said for part, said in zip(wanted, layers["refusals"], strict=True)), layers["refusals"]


def test_a_model_with_experts_of_its_own_is_refused(layers):
    assert "got a model with experts of its own (Own)" in layers["stranger"]


def test_one_plugin_owns_a_class():
    said = script("vllm_layers.py", "taken")["taken"]
    assert "vLLM: RoutedExperts: got __main__.Other in its place already" in said


def test_the_installed_version_is_one_that_was_tried_and_has_the_recorded_signatures():
    adapter = signatures.adapter("vllm")
    version, site = versions._installed("vllm")
    assert version in adapter.tried
    assert signatures.record("vllm", version, site) == adapter.recorded(version)
