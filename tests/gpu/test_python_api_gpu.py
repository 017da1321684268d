"""The public Python API on a GPU: the examples of docs/python.md, grouped rows and their counts inside a CUDA graph."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertd_kernels import (
    batched_routes,
    build,
    decide,
    detect_device,
    grouped_routes,
    problem_of,
    reference,
    relative_error,
    tolerance,
)
from expertd_kernels.measure.timing import captured
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import ScaleType, Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()


def test_the_examples_run_and_the_graph_answers_as_the_call():
    names = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(block, names)
    right = reference(names["weights"], names["hidden_states"], names["topk_ids"], names["topk_weights"])
    assert names["decision"].chosen.name != "reference"
    assert relative_error(names["out"], right) <= tolerance("bf16")
    names["out"].fill_(float("nan"))
    names["graph"].replay()
    torch.cuda.synchronize()
    assert relative_error(names["out"], right) <= tolerance("bf16")


@pytest.mark.parametrize("form", ["contiguous", "batched"])
def test_counts_may_change_between_replays(form):
    E, T, H = 8, 16, 512
    w = random_weights("int4_g128", E, H, 256, device="cuda")
    experts = build(decide(problem_of(w, detect_device("cuda"))), w)
    rows = torch.randn(E * T, H, device="cuda").bfloat16()
    counts = torch.zeros(E, dtype=torch.int32, device="cuda")
    out = torch.empty_like(rows)

    made = []

    def call(i):
        made.append(grouped_routes(counts, E * T) if form == "contiguous" else batched_routes(counts, T))
        experts(rows, *made[-1], out=out)

    replay = captured(call, 1, rows.device)
    routes = made[-1]
    for seed in range(3):
        drawn = torch.randint(0, T + 1, (E,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        counts.copy_(drawn)
        out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert int((routes[0] >= 0).sum()) == int(drawn.sum())
        assert relative_error(out, reference(w, rows, *routes)) <= tolerance("bf16")


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_factors_of_input_columns_are_in_the_graph(tokens):
    """ModelOpt's INT4 AWQ: f32 scales and pre_quant_scale, on whatever row the oracle chooses."""
    E, H, I = 16, 1024, 512
    w = random_weights(Scheme.parse("int4_g128", ScaleType.F32), E, H, I, device="cuda")
    one = torch.exp2(torch.rand(1, H, device="cuda") * 4 - 2).bfloat16().float().expand(E, -1).contiguous()
    each = torch.exp2(torch.rand(E, I, device="cuda") * 4 - 2).bfloat16().float()
    w = replace(w, w13=replace(w.w13, factors=one), w2=replace(w.w2, factors=each))
    decision = decide(problem_of(w, detect_device("cuda"), top_k=4))
    assert decision.chosen.name != "reference"
    experts = build(decision, w)
    x, ids, weights = random_inputs(tokens, H, E, 4, device="cuda")
    out = torch.empty_like(x)
    replay = captured(lambda i: experts(x, ids, weights, out=out), 1, x.device)
    for seed in (1, 2):
        for old, new in zip((x, ids, weights), random_inputs(tokens, H, E, 4, seed=seed, device="cuda"), strict=True):
            old.copy_(new)
        out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert relative_error(out, reference(w, x, ids, weights)) <= tolerance("bf16")
