"""The kernels of the row `triton` compiled for GPUs that are not here: Triton needs no device for that.

The launches of a layer are recorded on a CPU and compiled for the target instead: the arguments are those of a real
call, so a kernel that a compiler refuses, that spills, or that needs more shared memory than there is, is seen in CI.
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from expertd_kernels.backends import triton as backend
from expertd_kernels.backends.portable.tiling import Facts, make_plan
from expertd_kernels.backends.triton_launch import OPTIONS
from expertd_kernels.common.problem import Device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.scheme import ActivationQuant

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SHARED = {"sm80": 163, "sm90": 227, "sm100": 227, "gfx942": 64, "gfx950": 160, "gfx1100": 64}
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
WANTED = ("place", "round_rows", "expert_gemm", "expert_gemm_rounded")
CASES = [
    ("sm80", "int4_g128", 8),
    ("sm90", "int4_g128", 8),
    ("sm90", "mxfp4", 2048),
    ("sm90", "e4m3_block128", 64),
    ("sm100", "int4_g128_zp", 64),
    ("gfx942", "mxfp4", 8),
]
ROUNDED = [
    ("sm90", "e4m3_block128", ActivationQuant.E4M3_GROUP128, 64),
    ("sm90", "e4m3_tensor", ActivationQuant.E4M3_TENSOR, 8),
    ("sm90", "int8_channel", ActivationQuant.INT8_TOKEN, 2048),
    ("sm80", "int8_channel", ActivationQuant.INT8_TOKEN, 8),
    ("sm90", "int4_g128", ActivationQuant.E4M3_TOKEN, 512),
    ("sm90", "mxfp4", ActivationQuant.MXFP8, 8),
    ("sm100", "mxfp8", ActivationQuant.MXFP8, 64),
    ("gfx950", "e4m3_block128", ActivationQuant.E4M3_GROUP128, 64),
    ("gfx950", "mxfp4", ActivationQuant.MXFP8, 64),
    ("gfx942", "int8_channel", ActivationQuant.INT8_TOKEN, 2048),
    ("gfx1100", "int8_channel", ActivationQuant.INT8_TOKEN, 64),
]


def launches(target, scheme, tokens, quant=ActivationQuant.NONE):
    """(kernel, arguments, constants) of what comes before GEMM 1, and of it."""
    weights = replace(random_weights(scheme, 16, 512, 256), input_scales=torch.full((16, 2), 0.02))
    problem = problem_of(weights, Device("cpu", "none"), top_k=4, activation_quant=quant)
    experts = backend.experts(backend.pack(weights, problem), problem)
    nvidia = target.startswith("sm")
    experts.ptx, experts.pdl, experts.soft = nvidia, target in ("sm90", "sm100"), False
    w13, w2 = experts.w13.layout, experts.w2.layout
    facts = Facts(
        16, 4, 2, w13, w2, 512, 256, multiprocessors=132, rounded=experts.rounded, shared_bytes=SHARED[target] * 1024
    )
    facts = replace(facts, narrowest=8 if nvidia else 16)
    experts._planner = lambda n: make_plan(facts, n)
    seen = []
    experts._launch = lambda call, kernel, grid, *args, **constants: seen.append((kernel, args, constants))
    x = torch.randn(tokens, 512).bfloat16()
    experts(x, torch.zeros(tokens, 4, dtype=torch.int32), torch.ones(tokens, 4))
    first = next(i for i, s in enumerate(seen) if s[2].get("GATHER_X"))
    return [s for s in seen[: first + 1] if s[0].__name__ in WANTED]


def compiled(kernel, args, constants, target):
    options = OPTIONS | {k: constants.pop(k) for k in ("num_warps", "num_stages", "launch_pdl") if k in constants}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if i < len(args) and kernel.params[i].is_constexpr:
            signature[name], constants[name] = "constexpr", args[i]
        elif name in constants:
            signature[name] = "constexpr"
        elif isinstance(args[i], torch.Tensor):
            signature[name] = TYPES[args[i].dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(args[i], float) else "i32"
            if name.endswith("stride"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def stack_bytes(file):
    """Bytes of local memory a thread uses: registers that did not fit."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    out = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    text = out.stdout + out.stderr
    return int(text.split("STACK:")[1].split()[0])


@pytest.mark.parametrize(("target", "scheme", "tokens"), CASES)
def test_a_layer_compiles_for(target, scheme, tokens, tmp_path):
    compile_all(launches(target, scheme, tokens), ["place", "expert_gemm"], target, tmp_path)


@pytest.mark.parametrize(("target", "scheme", "quant", "tokens"), ROUNDED)
def test_a_layer_that_rounds_activations_compiles_for(target, scheme, quant, tokens, tmp_path):
    found = launches(target, scheme, tokens, quant)
    compile_all(found, ["place", "round_rows", "expert_gemm_rounded"], target, tmp_path)


def compile_all(found, names, target, tmp_path):
    """Each kernel for the target: it fits into shared memory and spills nothing."""
    assert [k.__name__ for k, _, _ in found] == names
    for kernel, args, constants in found:
        result = compiled(kernel, args, constants, target)
        assert result.metadata.shared <= SHARED[target] * 1024
        if "cubin" in result.asm:
            file = tmp_path / f"{kernel.__name__}.cubin"
            file.write_bytes(result.asm["cubin"])
            assert stack_bytes(file) == 0, f"{kernel.__name__} spills"
