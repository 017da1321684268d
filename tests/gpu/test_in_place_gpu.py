"""Rows whose table says `in_place` on a GPU: the output over the hidden states has the bits of one that lies apart,
eager and from a graph, at sizes of every kernel; and it is right."""

import pytest
import torch

from expertd_kernels import ActivationQuant, NoBackendError, build, decide, detect_device, problem_of, tolerance
from expertd_kernels.measure.timing import captured
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.numerics import relative_error

pytestmark = pytest.mark.gpu
CASES = [
    ("gluon_sm90", "int4_g128", ActivationQuant.NONE),
    ("gluon_sm90", "mxfp4", ActivationQuant.NONE),
    ("gluon_sm90", "e4m3_block128", ActivationQuant.NONE),
    ("gluon_sm90", "bf16", ActivationQuant.NONE),
    ("gluon_w8a8", "e4m3_block128", ActivationQuant.E4M3_GROUP128),
    ("gluon_w8a8", "e4m3_channel", ActivationQuant.E4M3_TOKEN),
]
SIZES = (1, 2, 4, 8, 17, 64, 100, 128, 256, 512, 1024, 2048, 4096)


@pytest.mark.timeout(300)  # every kernel of a row compiles
@pytest.mark.parametrize(("row", "scheme", "how"), CASES, ids=str)
def test_the_output_may_lie_where_the_hidden_states_do(row, scheme, how):
    E, k, H, I = 32, 8, 2048, 768
    device = detect_device("auto")
    cuda = torch.device("cuda" if device.kind == "cuda" else "cpu")
    weights = random_weights(scheme, E, H, I, signed_scales=True, device=cuda)
    try:
        decision = decide(problem_of(weights, device, top_k=k, activation_quant=how), pin=row)
        decision.require()
    except NoBackendError as e:
        pytest.skip("; ".join(next(v for v in e.decision.verdicts if v.backend == row).refusals))
    experts = build(decision, weights)
    for tokens in SIZES:
        x, ids, w = random_inputs(tokens, H, E, k, seed=tokens, device="cuda")
        ids[tokens // 2, 1:] = -1
        apart = experts(x, ids, w, out=torch.full_like(x, float("nan")))
        over = x.clone()
        for turn in range(3):
            over.copy_(x)
            experts(over, ids, w, out=over)
            assert torch.equal(over, apart), f"{tokens} tokens, call {turn}"
        replay = captured(lambda i, over=over, ids=ids, w=w: experts(over, ids, w, out=over), 1, x.device)
        for turn in range(3):
            over.copy_(x)
            torch.cuda.synchronize()
            replay(0)
            torch.cuda.synchronize()
            assert torch.equal(over, apart), f"{tokens} tokens, replay {turn}"
        rows = torch.unique(torch.linspace(0, tokens - 1, min(tokens, 16)).long()).cuda()
        wanted = reference_rows(weights, x[rows], ids[rows], w[rows], False)
        assert relative_error(over[rows], wanted) <= tolerance("bf16", how)
