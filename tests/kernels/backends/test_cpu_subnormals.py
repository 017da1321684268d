"""Backend `cpu` and numbers too small to be normal ones of their type: codes of e4m3 and f16, and scales.

Some processors multiply subnormal f32 numbers in microcode, hundreds of cycles each.  For them codes become normal
numbers first; both ways have the same bits at every level.
"""

import ctypes
import platform
from dataclasses import replace

import pytest
import torch
from cpu_kit import MISSING, inputs_for, layer, run

from expertd_kernels import reference, relative_error
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import Element

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "built"), pytest.mark.usefixtures("cpu_level")]

if not MISSING:
    from expertd_kernels.backends import cpu
    from expertd_kernels.native import library as native

WAYS = ("avoid", "keep")
DENORMAL = 2
"""Of MXCSR, a register of this thread: an operand was subnormal."""
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
F16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)


def numbers(codes):
    """Those that are finite."""
    return codes[codes.float().isfinite()]


def evenly(shape, codes, seed):
    """Codes drawn evenly."""
    picked = torch.randint(len(codes), shape, generator=torch.Generator().manual_seed(seed))
    return codes[picked]


def mxcsr(clear=0):
    """The register, of which the flags `clear` are cleared: the last word of the C library's fenv_t."""
    environment = (ctypes.c_uint32 * 8)()
    ctypes.CDLL(None).fegetenv(environment)
    before = environment[7]
    if clear:
        environment[7] = before & ~clear
        ctypes.CDLL(None).fesetenv(environment)
    return before


def answers(monkeypatch, packed, problem, inputs, **options):
    """Of both ways, which must have the same bits."""
    found = []
    for way in WAYS:
        monkeypatch.setenv("EXPERTD_CPU_SUBNORMALS", way)
        found.append(run(packed, problem, inputs, **options))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    return found[0]


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("scheme", ["e4m3_block128", "e4m3_tensor", "mxfp8", "f16"])
def test_codes_drawn_evenly(monkeypatch, cpu_level, scheme, compute, tokens):
    """One e4m3 code in 16 is subnormal.  f16: one in 32, and no larger ones than 2."""
    weights, problem, _ = layer(scheme, E=2, H=136, I=72, k=1, compute=compute)
    codes = numbers(E4M3) if weights.w13.scheme.element is Element.E4M3 else F16[F16.float().abs() < 2]
    assert (codes.float().abs() < (2**-6 if codes.dtype == E4M3.dtype else 2**-14)).sum() >= 15
    parts = [replace(q, codes=evenly(q.codes.shape, codes, seed)) for seed, q in enumerate((weights.w13, weights.w2))]
    weights = replace(weights, w13=parts[0], w2=parts[1])
    inputs = inputs_for(problem, tokens, seed=tokens)
    out = answers(monkeypatch, cpu.pack(weights, problem), problem, inputs)
    assert relative_error(out, reference(weights, *inputs)) <= (1e-2 if compute == "bf16" else 2e-5)


@pytest.mark.parametrize("scheme", ["e4m3_tensor", "f16"])
def test_each_code_alone_is_exact(monkeypatch, cpu_level, scheme):
    """Row n of w2 has code n everywhere, and one hidden value is 32, the others 0: output n is 32 times that code."""
    every = numbers(E4M3) if scheme == "e4m3_tensor" else F16[F16.float().abs() < 2**-13]
    weights, problem, _ = layer(scheme, E=1, H=len(every), I=40, k=1)
    w13 = torch.zeros(1, 80, len(every)).index_put((torch.tensor(0), torch.tensor([7, 47]), torch.tensor([5, 5])),
                                                   torch.tensor([32.0, 1.0]))  # fmt: skip

    def exact(q: QuantTensor, codes: torch.Tensor) -> QuantTensor:
        ones = None if q.scales is None else torch.ones_like(q.scales)
        return replace(q, codes=codes.to(q.codes.dtype), scales=ones)

    weights = replace(
        weights, w13=exact(weights.w13, w13), w2=exact(weights.w2, every[None, :, None].expand(1, -1, 40))
    )
    assert isinstance(weights, Weights)
    x = torch.zeros(1, len(every), dtype=torch.bfloat16)
    x[0, 5] = 1
    inputs = (x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    out = answers(monkeypatch, cpu.pack(weights, problem), problem, inputs, dtype=torch.float32)
    assert torch.equal(out[0], 32 * every.float())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the processor's flag is named for x86")
@pytest.mark.parametrize("scheme", ["e4m3_block128", "f16", "nvfp4", "int4_g20_f16"])
def test_no_operand_is_subnormal(monkeypatch, scheme):
    """The processor notes it when an instruction for floats meets a subnormal number.  Keeping codes as they are does:
    so it would be seen."""
    weights, problem, _ = layer(scheme, E=2, H=136, I=72, k=1, compute="f32")
    small = E4M3[1:8] if weights.w13.scheme.element is Element.E4M3 or scheme == "nvfp4" else F16[2**15 + 1 : 2**15 + 9]
    part = "scales" if weights.w13.scales is not None and weights.w13.scales.dtype == small.dtype else "codes"
    parts = [replace(q, **{part: evenly(getattr(q, part).shape, small, 1)}) for q in (weights.w13, weights.w2)]
    packed = cpu.pack(replace(weights, w13=parts[0], w2=parts[1]), problem)
    inputs = inputs_for(problem, 5)
    met = {}
    for way in WAYS:
        monkeypatch.setenv("EXPERTD_CPU_SUBNORMALS", way)
        experts = cpu.CpuExperts(packed, problem, native.context(threads=1))
        out = torch.empty_like(inputs[0])
        mxcsr(clear=DENORMAL)
        experts(*inputs, out=out)
        met[way] = bool(mxcsr() & DENORMAL)
        assert out.abs().max() > 0
    assert met == {"avoid": False, "keep": part == "codes"}


@pytest.mark.parametrize("scheme", ["nvfp4", "int8_g128_f16"])
def test_scales_drawn_evenly(monkeypatch, cpu_level, scheme):
    """One e4m3 scale in 16 is subnormal, and every f16 one."""
    weights, problem, _ = layer(scheme, E=2, H=128, I=256, k=1)
    codes = numbers(E4M3) if scheme == "nvfp4" else F16[F16.float().abs() < 2**-14]
    parts = [replace(q, scales=evenly(q.scales.shape, codes, seed)) for seed, q in enumerate((weights.w13, weights.w2))]
    weights = replace(weights, w13=parts[0], w2=parts[1])
    inputs = inputs_for(problem, 3)
    want = reference(weights, *inputs)
    assert relative_error(answers(monkeypatch, cpu.pack(weights, problem), problem, inputs), want) <= 1e-2
