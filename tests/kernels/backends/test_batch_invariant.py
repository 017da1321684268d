"""`batch_invariant`: a token has the same bits alone, in any batch and at any place in it, on every row that promises
it and runs without an accelerator; the rows that do not promise it refuse."""

import os
import subprocess
import sys

import pytest
import torch

from expertd_kernels import Device, build, decide, detect_device, problem_of
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights

H, E, K = 128, 8, 2


def differing(experts, tokens: int, dtype=torch.float32) -> int:
    """Rows of a batch whose bits differ from those that they have alone or in another order."""
    x, ids, w = random_inputs(tokens, H, E, K, seed=tokens, dtype=dtype)
    whole = experts(x, ids, w).clone()
    alone = torch.cat([experts(*(t[i : i + 1] for t in (x, ids, w))).clone() for i in range(tokens)])
    back = torch.arange(tokens - 1, -1, -1)
    turned = experts(x[back], ids[back], w[back]).clone()[back]
    return int(((whole != alone) | (whole != turned)).any(dim=1).sum())


@pytest.mark.parametrize("scheme", ["int4_g32_zp", "e4m3_block128", "bf16"])
@pytest.mark.parametrize("tokens", [3, 17, 64])
def test_the_reference_keeps_it_in_float32(scheme, tokens):
    weights = random_weights(scheme, E, H, 64)
    problem = problem_of(weights, detect_device("cpu"), top_k=K, compute_dtype="f32", batch_invariant=True)
    assert differing(build(decide(problem, pin="reference"), weights), tokens) == 0


def test_rows_that_do_not_promise_it_refuse():
    weights = random_weights("int4_g32", E, H, 64)
    d = decide(problem_of(weights, Device("cpu", "x86_64"), batch_invariant=True, packages=assumed_packages(BACKENDS)))
    assert d.require().name == "cpu"
    for v in d.verdicts:
        row = next(b for b in BACKENDS if b.name == v.backend)
        said = "a token's bits depend on the batch that it is computed in" in v.refusals
        assert said == (not row.batch_invariant)


INTERPRETED = """
import torch
from test_batch_invariant import E, H, K, differing
from expertd_kernels import Device, problem_of
from expertd_kernels.backends import triton
from expertd_kernels.sources.synthetic import random_weights

weights = random_weights("int4_g32", E, H, 64)
problem = problem_of(weights, Device("cuda", "sm90", (9, 0)), top_k=K, batch_invariant=True)
experts = triton.experts(triton.pack(weights, problem), problem)
assert len({experts.plan(tokens, k) for tokens in (1, 5, 300, 8192) for k in (1, 2, 7)}) == 1
print("differ:", differing(experts, 5, torch.bfloat16))
many = triton.experts(triton.pack(random_weights("int4_g32", 128, 64, 64), problem), problem)
assert many.plan(1, 8).rows == many.plan(5000, 8).rows == 32, "24 rows an expert, however many experts there are"
"""


@pytest.mark.timeout(300)  # the interpreter: 18 s beside other work
def test_triton_has_one_plan_and_keeps_it_in_the_interpreter():
    """In a process of its own: see test_triton.py.  On a GPU: tests/gpu/test_steady_layers.py."""
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "differ: 0\n"
