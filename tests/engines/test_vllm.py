"""vLLM's own engine with our classes in its model, against the same model in transformers: each engine in a process of
its own, on a CPU.  The compiled CPU ops that its wheel for CUDA lacks are those of vllm_cpu_ops.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: pip install 'expertd[vllm]'", allow_module_level=True)

import signatures
import torch
from hosts import hosts
from tiny_models import save, tiny_model

from expertd_client.strip import strip

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROMPTS = [[3, 7, 11, 20, 33], list(range(5, 45)), [90]]
NEW_TOKENS = 24
pytestmark = pytest.mark.timeout(240)  # an engine needs 20 s to come up, and two cores are not always ours


@pytest.fixture(scope="session")
def plugins(tmp_path_factory):
    """A folder in which vLLM finds our plugin, by the entry point of pyproject.toml, and the CPU ops."""
    folder = tmp_path_factory.mktemp("plugins")
    text = (ROOT / "pyproject.toml").read_text()
    ours = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].splitlines()[0].replace('"', "")
    described = folder / "expertd_tests-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: expertd-tests\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{ours}\ncpu = vllm_cpu_ops:install\n")
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> (model, whole checkpoint, checkpoint without experts); made when asked for."""
    made = {}

    def of(name, **sizes):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny_model(name, head_dim=32, hidden_size=128, **sizes)
            save(model, folder / "whole")
            strip(folder / "whole", folder / "front")
            made[name] = model, folder / "whole", folder / "front"
        return made[name]

    return of


def engine(plugins, checkpoint, address, *, environ=None, check=True, **options):
    """What vllm_process.py prints."""
    path = os.pathsep.join([str(plugins), str(HERE), os.environ.get("PYTHONPATH", "")])
    given = {"checkpoint": str(checkpoint), "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "options": options}
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environ or {})}
    if address is not None:
        environment["EXPERTD_ADDRESS"] = address
    command = [sys.executable, str(HERE / "vllm_process.py"), json.dumps(given)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    if not check:
        return ran
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.rpartition("\n@")[2])


def script(name, *arguments):
    """What a script of this folder prints, as JSON."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / name), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.rpartition("\n@")[2])


def greedy(model):
    """What transformers says."""
    with torch.inference_mode():
        found = []
        for prompt in PROMPTS:
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
            found.append(whole[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_the_same_tokens_with_one_call_a_layer_and_step(models, plugins, family):
    model, whole, front = models(family)
    with hosts([{"checkpoint": whole}]) as [address]:
        found = engine(plugins, front, address)
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
        found = engine(plugins, whole, ",".join(addresses), tensor_parallel_size=2)
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


def test_the_signatures_that_we_use_have_not_drifted():
    found, kept = script("signatures.py", "vllm"), signatures.recorded("vllm")
    assert found == kept, {name: (found.get(name), kept.get(name)) for name in kept if found.get(name) != kept[name]}
