"""load_without_experts: whole and stripped checkpoints, nothing of the experts read or made, quantized neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from test_attach import PROMPTS, relative
from tiny_models import Local, save, tiny_model
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.strip import strip
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.transformers import attach, detach, load_without_experts
from expertd_client.transformers.load import frontend_config

MIB = 1 << 20


def kib(name):
    """Of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])


def cost_of(load):
    """(MiB by which the peak of resident memory grew, mapped files included; MiB that were read; what load() made)."""

    def read():
        return int(Path("/proc/self/io").read_text().split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, before = kib("VmRSS"), read()
    made = load()
    return (kib("VmHWM") - resident) / 1024, (read() - before) / MIB, made


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 96 MiB of experts and 1 MiB of everything else."""
    model = tiny_model("qwen3_moe", experts=64, moe_intermediate_size=1024)
    return model, save(model, tmp_path_factory.mktemp("large"))


def test_expert_weights_are_neither_allocated_nor_read(large, tmp_path):
    model, folder = large
    far = Local(folder)
    load_without_experts(folder, far, dtype=torch.float32)  # imports and caches are not what is measured
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / MIB
    assert size > 90
    costs = [cost_of(lambda: load_without_experts(folder, far, dtype=torch.float32)) for _ in range(3)]
    memory, read, frontend = min(cost[0] for cost in costs), min(cost[1] for cost in costs), costs[0][2]
    whole_memory, _, _ = cost_of(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert whole_memory > 0.9 * size, "the measure must see weights that are loaded"
    assert memory < size / 4, "the least of three: other threads and the allocator take some as well"
    assert read < size / 4
    done = strip(folder, tmp_path / "stripped")
    assert done.tensor_bytes < 2 * MIB
    with torch.inference_mode():
        for other in (frontend, load_without_experts(tmp_path / "stripped", far, dtype=torch.float32)):
            assert relative(other(PROMPTS).logits, model(PROMPTS).logits) <= 2e-6


def test_where_attention_is_quantized_too_transformers_reads_it(checkpoint_folder, tmp_path):
    """And its own classes for quantized experts do not take the place of ours."""
    folder = checkpoint_folder("hf-fp8-block128-qwen3moe1l")
    strip(folder, tmp_path / "stripped")
    assert "quantization_config" in json.loads((tmp_path / "stripped/config.json").read_text())
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    far = Local(folder)
    attach(whole, far)  # transformers cannot compute with the experts of this checkpoint on a CPU
    for path in (folder, tmp_path / "stripped"):
        model = load_without_experts(path, far, dtype=torch.bfloat16)
        assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in whole.named_parameters()}
        with torch.inference_mode():
            assert torch.equal(model(PROMPTS).logits, whole(PROMPTS).logits)
    assert len(far.tokens) == 4


def test_transformers_quantizers_leave_the_replaced_modules_alone(checkpoint_folder):
    """They put a class of their own in place of whatever is called `experts`, where there is a GPU."""
    folder = checkpoint_folder("hf-fp8-block128-qwen3moe1l")
    config = frontend_config(transformers.AutoConfig.from_pretrained(folder), folder)
    said = config.quantization_config["modules_to_not_convert"]

    def classes(*names):
        copy = tiny_model("qwen3_moe", num_hidden_layers=1)
        attach(copy, Local(folder))
        replace_with_fp8_linear(copy, list(names), FineGrainedFP8Config())
        return type(copy.model.layers[0].mlp.experts), type(copy.model.layers[0].self_attn.q_proj)

    assert [c.__name__ for c in classes("lm_head")] == ["FP8Experts", "FP8Linear"], "transformers does so no more"
    experts, attention = classes(*said)
    assert issubclass(experts, RemoteExperts)
    assert attention.__name__ == "FP8Linear"


def test_a_model_class_of_the_callers(large):
    _, folder = large
    model = load_without_experts(folder, Local(folder), model_class=transformers.Qwen3MoeModel, dtype=torch.float32)
    assert type(model) is transformers.Qwen3MoeModel
    with pytest.raises(UnsupportedCombinationError, match="loaded without its experts"):
        detach(model)


def test_what_is_no_model_of_transformers_is_refused(large, tmp_path):
    config = transformers.AutoConfig.from_pretrained(large[1])
    config.architectures = ["OfSomebodyElse"]
    with pytest.raises(UnsupportedCombinationError, match=r"OfSomebodyElse.*model_class="):
        load_without_experts(large[1], Local(large[1]), config=config)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        load_without_experts(tmp_path, "127.0.0.1:1")
