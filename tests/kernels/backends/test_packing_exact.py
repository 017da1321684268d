"""A compressed-tensors NVFP4 checkpoint divides by its second-level scale: every packing gives its own bits back."""

import importlib

import pytest
import torch

from expertd_kernels import Device, problem_of
from expertd_kernels.checkpoint import open_checkpoint

BACKENDS = ("reference", "cpu", "cpu_torch", "triton")


@pytest.mark.parametrize("name", BACKENDS)
def test_an_exact_second_level_scale_survives_packing(name, checkpoint_folder):
    weights = open_checkpoint(checkpoint_folder("ct-nvfp4a16-qwen3moe1l")).load(0)
    problem = problem_of(weights, Device("cpu", "x86_64"))
    module = importlib.import_module(f"expertd_kernels.backends.{name}")
    again = module.unpack(module.pack(weights, problem))
    for before, after in ((weights.w13, again.w13), (weights.w2, again.w2)):
        assert torch.equal(after.dequantize(), before.dequantize())
        assert torch.equal(after.codes, before.codes)
        assert torch.equal(after.scales.view(torch.uint8), before.scales.view(torch.uint8))
