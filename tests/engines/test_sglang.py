"""SGLang's own engine with our method in its layers, against the same model in transformers: each engine in a process
of its own, on a CPU.  What its wheel for CUDA lacks there is in sglang_cpu_ops.py."""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: pip install 'expertd[sglang]'", allow_module_level=True)
else:
    import sglang_cpu_ops

    sglang_cpu_ops.torchvision_without_ops()  # transformers imports it, too

import engine_kit
import signatures
from engine_kit import NEW_TOKENS, PROMPTS, engine, greedy, script
from hosts import hosts

from expertd_client.engines import versions

pytestmark = pytest.mark.timeout(240)  # an engine needs 20 s to come up, and two cores are not always ours


@pytest.fixture(scope="session")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    return engine_kit.plugins(folder, "sglang.srt.plugins", "notes = sglang_cpu_ops:write_down")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return engine_kit.Models(tmp_path_factory)


def run(plugins, checkpoint, address, tmp_path, **options):
    """(tokens, what each rank wrote down)."""
    log = tmp_path / "log"
    environ = {"EXPERTD_TEST_LOG": str(log), "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * options.get("tp_size", 1))}
    found = engine("sglang_process.py", plugins, checkpoint, address, options, **environ)
    ranks = {}
    for line in map(json.loads, log.read_text().splitlines()):
        ranks.setdefault(line.pop("pid"), []).append(line)
    return found["tokens"], list(ranks.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_same_tokens_with_one_call_a_layer_and_step(models, plugins, tmp_path, family):
    model, whole, front = models(family)
    with hosts([{"checkpoint": whole}]) as [address]:
        tokens, [rank] = run(plugins, front, address, tmp_path)
    assert tokens == greedy(model)
    steps, calls = [line for line in rank if "step" in line], [line for line in rank if "layer" in line]
    assert {line["expert_parameters"] for line in steps} == {0}
    assert len(steps) >= NEW_TOKENS
    assert len(calls) == 2 * len(steps)
    assert sum(line["tokens"] for line in calls) == 2 * sum(line["step"] for line in steps)
    assert sum(line["step"] for line in steps) >= sum(map(len, PROMPTS))


def test_two_tensor_parallel_ranks_send_each_token_once(models, plugins, tmp_path):
    """Two processes on this host, which speak gloo."""
    model, whole, front = models("qwen3_moe")
    with hosts([{"checkpoint": whole, "shard": "0/2"}, {"checkpoint": whole, "shard": "1/2"}]) as addresses:
        tokens, ranks = run(plugins, front, ",".join(addresses), tmp_path, tp_size=2)
    assert tokens == greedy(model)
    assert len(ranks) == 2
    steps = [[line for line in rank if "step" in line] for rank in ranks]
    calls = [[line for line in rank if "layer" in line] for rank in ranks]
    sent = [sum(line["tokens"] for line in of_rank) for of_rank in calls]
    assert sum(sent) == 2 * sum(line["step"] for line in steps[0])
    assert min(sent) > 0
    assert all(len(of_rank) <= 2 * len(steps[0]) for of_rank in calls)
    assert {line["expert_parameters"] for of_rank in steps for line in of_rank} == {0}


@pytest.fixture(scope="module")
def layers():
    """What SGLang's classes of one layer do, before our plugin is loaded and after."""
    return script("sglang_layers.py")


def test_nothing_changes_before_the_plugin_is_loaded(layers):
    assert layers["before"] == [[8, 128, 64], [8, 64, 64]]


def test_a_layer_has_no_weights_and_sends_no_padding(layers):
    parameters, right, sent, found = layers["one"]
    assert (parameters, right, sent) == (0, True, [4])
    sizes = {"layer": 3, "experts": 8, "hidden_size": 16, "intermediate_size": 32}
    assert found == {"name": "model.layers.3.mlp.experts", **sizes}


def test_outputs_of_two_ranks_add_up(layers):
    assert layers["two"] == [True, [[4], [3]]]


def test_a_routed_scaling_factor_is_the_runners_on_cuda_alone(layers):
    assert layers["scaled"] == [True, True]


def test_what_cannot_work_is_refused(layers):
    wanted = [
        "got 1 fused shared experts",
        "got router weights on the experts' inputs",
        "got expert parallelism over 2 ranks",
        "got object for its experts",
        "got CUDA graphs for decode",
    ]
    assert all(part in said for part, said in zip(wanted, layers["refusals"], strict=True)), layers["refusals"]


def test_the_installed_version_is_one_that_was_tried_and_has_the_recorded_signatures():
    adapter = signatures.adapter("sglang")
    version, site = versions._installed("sglang")
    assert version in adapter.tried
    assert signatures.record("sglang", version, site) == adapter.recorded(version)
