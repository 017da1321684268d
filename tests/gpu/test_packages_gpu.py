"""The rows that call other packages' kernels, on a GPU: right, in a CUDA graph, and without allocations once warm."""

import pytest
import torch

from expertd_kernels import build, decide, detect_device, problem_of
from expertd_kernels.measure.timing import captured
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = pytest.mark.gpu
DEVICE = detect_device()
E, K, H = 16, 4, 512
ROWS = {
    "humming int4_g128": ("humming", "int4_g128", ActivationQuant.NONE),
    "humming mxfp4": ("humming", "mxfp4", ActivationQuant.NONE),
    "deepgemm bf16": ("deepgemm", "bf16", ActivationQuant.NONE),
    "deepgemm e4m3_block128": ("deepgemm", "e4m3_block128", ActivationQuant.E4M3_GROUP128),
}


@pytest.fixture(scope="module", params=ROWS)
def layer(request):
    """(weights, experts, tolerance); skipped with the oracle's own sentence."""
    name, scheme, how = ROWS[request.param]
    packages = installed_packages(BACKENDS, probe_imports=DEVICE.kind == "cuda")
    small = problem_of(random_weights(scheme, E, H, 256), DEVICE, top_k=K, activation_quant=how, packages=packages)
    verdict = next(v for v in decide(small).verdicts if v.backend == name)
    if verdict.refusals:
        pytest.skip("; ".join(verdict.refusals))
    weights = random_weights(scheme, E, H, 256, bias=True, device="cuda", signed_scales=scheme.startswith("int"))
    decision = decide(problem_of(weights, DEVICE, top_k=K, activation_quant=how, packages=packages), pin=name)
    return weights, build(decision, weights), tolerance("bf16", how)


@pytest.mark.parametrize("tokens", [1, 33, 600])
def test_a_captured_graph_follows_new_inputs_and_routes(layer, tokens):
    weights, experts, limit = layer
    x, ids, w = random_inputs(tokens, H, E, K, seed=1, device="cuda")
    out = torch.full_like(x, float("nan"))
    experts(x, ids, w, out=out)
    assert relative_error(out, reference(weights, x, ids, w)) <= limit
    replay = captured(lambda i: experts(x, ids, w, out=out), 1, x.device)
    for seed in (2, 3):
        others = random_inputs(tokens, H, E, K, seed=seed, device="cuda")
        for held, new in zip((x, ids, w), others, strict=True):
            held.copy_(new)
        ids[-1, :2] = -1
        out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert relative_error(out, reference(weights, x, ids, w)) <= limit


def test_a_warm_layer_keeps_no_more_memory(layer):
    """The packages allocate small things in a call; nothing of it may stay, and the matrices are ours."""
    _, experts, _ = layer
    x, ids, w = random_inputs(600, H, E, K, seed=1, device="cuda")
    out = torch.empty_like(x)
    experts(x, ids, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(3):
        experts(x, ids, w, out=out)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"] <= 3 << 16
