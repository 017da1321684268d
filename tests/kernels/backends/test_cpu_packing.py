"""Backend `cpu`: its packing, which is the same for every instruction-set level, and the row without its library."""

from dataclasses import replace

import pytest
from cpu_kit import MISSING, SCHEMES, layer, same_bits

from expertd_kernels import decide
from expertd_kernels.common.problem import Package
from expertd_kernels.oracle.decision import NoBackendError

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "built")

if not MISSING:
    from expertd_kernels.backends import cpu


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("H", "I"), [(256, 128), (77, 45), (200, 104)])
def test_unpack_inverts_pack_bit_for_bit(scheme, H, I):
    weights, _, packed = layer(scheme, H=H, I=I, bias=True, act_order=H == 200, activation="swigluoai")
    back = cpu.unpack(packed)
    same_bits(weights.w13, back.w13)
    same_bits(weights.w2, back.w2)
    assert back.activation == weights.activation


def test_without_the_library_the_row_says_so_and_torch_serves():
    _, problem, _ = layer("int4_g32")
    without = replace(problem, packages={"expertd-cpu-kernel": Package("1", "libexpertd_cpu.so is not built")})
    decision = decide(without)
    assert decision.chosen is not None
    assert decision.chosen.name == "cpu_torch"
    refusals = next(v.refusals for v in decision.verdicts if v.backend == "cpu")
    assert "libexpertd_cpu.so is not built" in refusals[0]
    with pytest.raises(NoBackendError, match="not built"):
        decide(without, pin="cpu").require()
    assert decide(problem).require().name == "cpu"
