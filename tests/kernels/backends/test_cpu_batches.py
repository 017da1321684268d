"""Backends `cpu` and `cpu_w4a8` with `batch_invariant`: a token has the same bits alone, in 40 and in 1,000, at every
instruction-set level and with every scheme."""

from dataclasses import replace

import pytest
import torch
from cpu_kit import MISSING, SCHEMES, inputs_for, layer, run
from cpu_levels import spread

from expertd_kernels import decide, reference, relative_error
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "built"), pytest.mark.usefixtures("cpu_level")]

if not MISSING:
    from expertd_kernels.backends import cpu, cpu_w4a8
    from expertd_kernels.native import library as native

F32 = torch.float32
"""Of answers: rounded to bf16, most differences of the last bit are gone."""

SIZES = {"E": 3, "H": 136, "I": 72, "k": 1}
"""Two pieces of columns, an odd number of blocks, a last tile of rows that is alone."""


def differing(answer, inputs):
    """Tokens of 0, 17, 39 whose bits in a batch of 1,000 or of 40 differ from those that they have alone; and whether
    the 40 differ."""
    part = [tuple(t[i : i + n] for t in inputs) for i, n in ((0, 40), (0, 1), (17, 1), (39, 1))]
    many, some, *alone = answer(inputs), *map(answer, part)
    wrong = [t for t, one in zip((0, 17, 39), alone, strict=True) if not torch.equal(one[0], many[t])]
    return wrong, int((some != many[:40]).any(dim=1).sum())


IN_F32 = ["int4_g32_zp", "int8_g128", "mxfp4", "e4m3_block128", "bf16"]
"""Each element that f32 computes otherwise."""
CASES = [(*case, compute) for compute, schemes in (("bf16", SCHEMES), ("f32", IN_F32)) for case in spread(schemes)]


@pytest.mark.parametrize(("cpu_level", "scheme", "compute"), CASES, indirect=["cpu_level"])
def test_a_token_has_the_same_bits_in_any_batch(scheme, compute):
    weights, problem, packed = layer(scheme, **SIZES, compute=compute, invariant=True)
    assert decide(problem).require().name == "cpu"
    inputs = inputs_for(problem, 1000)
    assert differing(lambda given: run(packed, problem, given, dtype=F32), inputs) == ([], 0)
    few = tuple(t[:40] for t in inputs)
    assert relative_error(run(packed, problem, few), reference(weights, *few)) <= 6e-3


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_channel", "int4_g64_zp"])
def test_eight_bit_activations_keep_it(scheme):
    weights, problem, _ = layer(scheme, **SIZES, invariant=True)
    asked = replace(problem, activation_quant=ActivationQuant.INT8_GROUP)
    assert decide(asked).require().name == "cpu_w4a8"
    experts = cpu.CpuExperts(cpu_w4a8.pack(weights, asked), asked, native.context(threads=1), backend="cpu_w4a8")
    assert differing(lambda given: experts(*given), inputs_for(asked, 1000)) == ([], 0)


@pytest.mark.parametrize("scheme", ["mxfp4", "e4m3_block128"])
def test_three_threads_biases_and_several_experts_a_token_keep_it(scheme):
    _, problem, packed = layer(scheme, **SIZES | {"k": 2}, invariant=True, bias=True, activation="swigluoai")
    inputs = inputs_for(problem, 1000)
    assert differing(lambda given: run(packed, problem, given, threads=3, dtype=F32), inputs) == ([], 0)
    few = tuple(t[:40] for t in inputs)
    assert torch.equal(run(packed, problem, few), run(packed, problem, few, threads=3))
