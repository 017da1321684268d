"""What a layer holds on a GPU is what its sizes say: packed weights, scratch of its largest call, and nothing else."""

import gc

import pytest
import torch

from expertd_kernels import ActivationQuant, NoBackendError, Scheme, build, decide, detect_device, problem_of
from expertd_kernels.backends.footprint import footprint
from expertd_kernels.backends.scratch import held_bytes, reserve, scratch_of
from expertd_kernels.oracle.probe import packages_for
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import ScaleType

pytestmark = pytest.mark.gpu
SMALL = 1 << 20
"""Constants of a layer, and the allocator's rounding."""
CASES = [
    ("gluon_sm90", "int4_g128", ActivationQuant.NONE),
    ("gluon_sm90", Scheme.parse("int4_g128").with_scale(ScaleType.F16), ActivationQuant.NONE),
    ("gluon_sm90", "e4m3_block128", ActivationQuant.NONE),
    ("gluon_sm90", "bf16", ActivationQuant.NONE),
    ("gluon_w8a8", "e4m3_block128", ActivationQuant.E4M3_GROUP128),
    ("gluon_w8a8", "e4m3_channel", ActivationQuant.E4M3_TOKEN),
    ("triton", "int4_g128", ActivationQuant.NONE),
    ("humming", "int4_g128", ActivationQuant.NONE),
    ("marlin", "int4_g128", ActivationQuant.NONE),
    ("deepgemm", "e4m3_block128", ActivationQuant.E4M3_GROUP128),
]


@pytest.mark.parametrize(("row", "scheme", "rounding"), CASES, ids=str)
def test_a_layer_holds_its_packed_weights_and_shares_the_reserved_scratch(row, scheme, rounding):
    E, H, I, k, tokens = 32, 2048, 768, 8, 1024
    device = detect_device("auto")
    cuda = torch.device("cuda" if device.kind == "cuda" else "cpu")
    weights = random_weights(scheme, E, H, I, signed_scales=True, device=cuda)
    packages = packages_for(device, BACKENDS)
    problem = problem_of(weights, device, top_k=k, activation_quant=rounding, packages=packages)
    try:
        decision = decide(problem, pin=row)
        decision.require()
    except NoBackendError as e:
        pytest.skip("; ".join(next(v for v in e.decision.verdicts if v.backend == row).refusals))
    said = footprint(row, problem, tokens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = build(decision, weights)  # what a process allocates once
        warm(*random_inputs(4, H, E, k, device="cuda"))
        stream.synchronize()
        del warm
        gc.collect()
        before = torch.cuda.memory_allocated()
        experts = build(decision, weights)
        gc.collect()
        assert abs(torch.cuda.memory_allocated() - before - said.weights_bytes) < SMALL
        reserve(cuda, said.scratch_bytes)
        address = scratch_of(cuda).memory(0).data_ptr()
        batch = random_inputs(tokens, H, E, k, device="cuda")
        out = torch.empty_like(batch[0])
        held, allocated = held_bytes(cuda), torch.cuda.memory_allocated()
        experts(*batch, out=out)
        stream.synchronize()
        assert scratch_of(cuda).memory(0).data_ptr() == address, "the largest call fits what was reserved"
        assert held_bytes(cuda) == held
        gc.collect()
        assert torch.cuda.memory_allocated() - allocated < SMALL
