"""Experts from quantized checkpoints of other people's tools, served in another process by two servers, beside the
same dequantized weights in transformers' own module."""

from __future__ import annotations

import pytest
import torch
import transformers
from hosts import hosts
from test_attach import PROMPTS, relative
from tiny_models import generate

from expertd_client.transformers import attach
from expertd_kernels.checkpoint import open_checkpoint

FIXTURES = (
    "gptq-w4-g128-sym-descact-false-qwen3moe1l",
    "awq-gemm-w4-g64-gateunquant-autoawq-qwen3moe1l",
    "ct-w4a16-g128-sym-qwen3moe1l",
    "hf-fp8-block128-qwen3moe1l",
    "mxfp4-oai-modelopt-gptoss-ns",
)


def dequantized(folder):
    """A model of the checkpoint's configuration: its experts dequantized, everything else random."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.eos_token_id = None
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    source = open_checkpoint(folder)
    for layer in source.layers:
        weights, experts = source.load(layer), model.get_submodule(f"model.layers.{layer}.mlp.experts")
        with torch.no_grad():
            for name, matrix in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
                values, bias = matrix.dequantize(), matrix.bias
                if not experts.is_concatenated and matrix.segments == 2:  # gate and up alternate
                    order = torch.arange(values.shape[1]).view(2, -1).T.flatten()
                    values, bias = values[:, order], None if bias is None else bias[:, order]
                experts.get_parameter(name).copy_(values.mT if experts.is_transposed else values)
                if bias is not None:
                    experts.get_parameter(f"{name}_bias").copy_(bias)
    return model


@pytest.fixture(scope="module")
def served(checkpoint_folder):
    """name -> (its folder, addresses of two servers with half of its experts each)"""
    folders = {name: checkpoint_folder(name) for name in FIXTURES}
    halves = [{"checkpoint": folder, "shard": f"{n}/2"} for folder in folders.values() for n in range(2)]
    with hosts(halves) as addresses:
        yield {name: (folders[name], addresses[2 * n : 2 * n + 2]) for n, name in enumerate(FIXTURES)}


@pytest.mark.parametrize("name", FIXTURES)
def test_quantized_experts_say_what_their_dequantized_weights_say(name, served):
    folder, addresses = served[name]
    model = dequantized(folder)
    with torch.inference_mode():
        logits, tokens = model(PROMPTS).logits, generate(model, PROMPTS, 32)
        with attach(model, addresses):
            assert relative(model(PROMPTS).logits, logits) <= 2e-6
            assert torch.equal(generate(model, PROMPTS, 32), tokens)
