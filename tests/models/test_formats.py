"""Experts from quantized checkpoints of other people's tools, served in another process by two servers, beside the
same dequantized weights in transformers' own module."""

from __future__ import annotations

import chat
import pytest
import torch
import transformers
from hosts import hosts
from test_attach import PROMPTS, relative
from tiny_models import generate

from expertd_client.transformers import attach

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
    chat.dequantize_into(model, folder)
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


def test_the_example_answers_a_prompt_from_a_real_checkpoint(served, capsys):
    folder, addresses = served["mxfp4-oai-modelopt-gptoss-ns"]
    arguments = ["--checkpoint", str(folder), "--servers", *addresses, "--prompt", "hello", "--tokens", "5"]
    assert chat.main(arguments) == 0
    said = capsys.readouterr().out
    assert "no experts" in said
    assert "5 tokens, " in said
