"""What a layer takes, told from its sizes, against what packing it really makes: every row, scheme and rounding that
the oracle gives a row, with ragged sizes where the row takes them."""

import importlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import cpu_levels
import pytest
import torch
from cpu_levels import KNOWN, how

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, Scheme, detect_device, problem_of
from expertd_kernels.backends.footprint import SCRATCH, WEIGHTS, canonical_bytes, footprint, packed_bytes
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import Element, ScaleType

pytest.importorskip("triton")

SCHEMES = [
    *map(Scheme.parse, (
        "int4_g128", "int4_g64", "int4_g32", "int4_channel", "int4_g128_zp", "int4_g32_zp", "int8_channel", "int8_g128",
        "int8_g32_zp", "mxfp4", "mxfp8", "nvfp4", "e4m3_block128", "e4m3_channel", "e4m3_tensor", "bf16", "f16", "f32",
    )),
    Scheme(Element.INT4, 1, 64, ScaleType.F16),
    Scheme(Element.INT4, 1, 48, ScaleType.BF16, zeros=True),
    Scheme(Element.INT8, 1, 32, ScaleType.F32),
    Scheme(Element.INT4, 1, 32, ScaleType.F32, zeros=True),
    Scheme(Element.E4M3, 1, 64, ScaleType.BF16),
    Scheme(Element.E4M3, 128, 128, ScaleType.BF16),
]  # fmt: skip
SHAPES = ((3, 512, 256), (2, 384, 768), (2, 200, 72))
DEVICES = ("cpu-avx512", "sm90", "sm100", "gfx950", "xpu-xe2")
"""A backend is tested on the first of these that it runs on; FlashInfer's CUTLASS kernels on both that they do."""


PACKAGES = assumed_packages(BACKENDS)


@cache
def drawn(scheme, shape, activation, bias, order):
    """None: blocks that do not fit the sizes, activation order without groups."""
    kind = Activation.parse(activation or "silu_and_mul")
    try:
        return random_weights(scheme, *shape, activation=kind, bias=bias, act_order=order)
    except ValueError:
        return None


def cases(row):
    """(weights, problem) that the oracle gives the row."""
    name = row.name
    runs = [d for d in DEVICES if any(r.refusal(NAMED_DEVICES[d]) is None for r in row.devices)]
    places = runs if name == "flashinfer_cutlass" else runs[:1]
    variants = [(None, False, False), ("swigluoai", True, False), ("relu2", False, False), (None, False, True)]
    for scheme, shape, variant in itertools.product(SCHEMES, SHAPES, variants):
        w = drawn(scheme, shape, *variant)
        if w is None:
            continue
        for place, quant in itertools.product(places, ActivationQuant):
            if quant.static:
                w = type(w)(w.w13, w.w2, w.activation, w.checkpoint_activation, torch.rand(shape[0], 2) + 0.1)
            device = NAMED_DEVICES[place]
            problem = problem_of(w, device, top_k=2, activation_quant=quant, packages=PACKAGES)
            if not judge(row, problem):  # what decide() asks of each row of the table
                yield w, problem


@pytest.mark.parametrize("row", BACKENDS, ids=lambda b: b.name)
def test_packed_weights_have_the_bytes_that_their_sizes_say(row):
    module, seen = importlib.import_module(row.target), set()
    for w, problem in cases(row):
        try:
            packed = module.pack(w, problem)
        except Refused:
            continue  # for what values hold
        made = sum(t.numel() * t.element_size() for name, t in packed.tensors.items() if ".exact_" not in name)
        if w.input_scales is not None and not problem.activation_quant.static:
            made -= w.input_scales.nbytes
        if row.name == "xpu" and "e4m3_tensor" in problem.scheme_name and packed.meta["w13"]["form"] == "block":
            continue  # scales of gate and up differ: by their values
        shape = (problem.num_experts, problem.hidden_size, problem.intermediate_size)
        got = packed_bytes(row.name, problem)
        assert got == made, f"{problem.scheme_name} {shape} {problem.activation.name} {problem.activation_quant.value}"
        assert footprint(row.name, problem, 64).weights_bytes >= made
        assert canonical_bytes(problem) == w.w13.nbytes + w.w2.nbytes
        seen.add(problem.scheme_name)
    assert seen, "no scheme of the row was packed"


def test_every_row_of_the_table_is_weighed():
    assert set(WEIGHTS) == set(SCRATCH) == {b.name for b in BACKENDS}


def test_what_a_cpu_row_makes_beside_its_packed_weights_is_counted():
    for name, more in (("cpu", {"act_order": True}), ("cpu_torch", {})):
        module = importlib.import_module(f"expertd_kernels.backends.{name}")
        w = random_weights("int4_g32", 3, 512, 256, **more)
        problem = problem_of(w, NAMED_DEVICES["cpu-avx512"], top_k=2, packages={})
        packed = module.pack(w, problem)
        experts = module.experts(packed, problem)
        if name == "cpu":
            held = [*packed.tensors.values(), *experts._kept]
        else:
            closures = (f.__closure__ for f in (experts.w13, experts.w2))
            pairs = (c.cell_contents for found in closures for c in found)
            held = [*packed.tensors.values(), *(t for t in pairs if isinstance(t, torch.Tensor))]
        storages = {t.untyped_storage().data_ptr(): t.nbytes for t in held}
        assert footprint(name, problem, 64).weights_bytes == sum(storages.values())


@pytest.mark.parametrize(("scheme", "quant"), [
    ("int4_g128", ActivationQuant.NONE), ("e4m3_block128", ActivationQuant.E4M3_GROUP128),
    ("mxfp4", ActivationQuant.MXFP8), ("int8_channel", ActivationQuant.INT8_TOKEN),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_scratch_of_the_triton_rows_is_what_their_calls_lay_out(scheme, quant, tokens):
    from expertd_kernels.backends import triton
    from expertd_kernels.backends.scratch import Layout

    w = random_weights(scheme, 8, 512, 256)
    problem = problem_of(w, NAMED_DEVICES["sm90"], top_k=2, activation_quant=quant, packages={})
    experts = triton.experts(triton.pack(w, problem), problem)
    x, ids, _ = random_inputs(tokens, 512, 8, 2)
    used = Layout(experts._space(x, ids, experts.plan(tokens, 2))).nbytes
    said = footprint(triton._row(problem), problem, tokens).scratch_bytes
    assert used <= said <= used + 16 * (2 * tokens + 8) + (1 << 16), "the table of blocks is for the smallest ones"


def test_scratch_of_the_hopper_rows_is_what_their_calls_lay_out():
    from expertd_kernels.backends.gluon.shared.space import layer_space, w8a8_space
    from expertd_kernels.backends.gluon.w8a8.plan import Shape8

    w = random_weights("e4m3_block128", 8, 512, 256)
    quant = ActivationQuant.E4M3_GROUP128
    problem = problem_of(w, NAMED_DEVICES["sm90"], top_k=2, activation_quant=quant, packages={})
    assert footprint("gluon_sm90", problem, 600).scratch_bytes == layer_space(8, 512, 256, 1024, 2).nbytes
    said = footprint("gluon_w8a8", problem, 600).scratch_bytes
    assert said == w8a8_space(Shape8(8, 2, 512, 256), True, False, 1024, 1).nbytes
    assert footprint("gluon_sm90", problem, 1 << 20).scratch_bytes == layer_space(8, 512, 256, 8192, 2).nbytes, "pieces"


ALLOCATED = """
import ctypes, torch
from cpu_levels import KNOWN, how, on_level
from expertd_kernels import detect_device, problem_of
from expertd_kernels.backends import cpu
from expertd_kernels.backends.footprint import footprint
from expertd_kernels.native import library
from expertd_kernels.sources.synthetic import random_inputs, random_weights
class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in ("arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks"
                                               " keepcost").split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
def allocated():
    i = libc.mallinfo2()
    return i.uordblks + i.hblkhd
library.use_threads(2)
for hidden, inner in ((128, 64), (64, 128)):
    w = random_weights("int4_g32", 4, hidden, inner)
    problem = problem_of(w, detect_device("cpu"), top_k=4, packages={})
    packed = cpu.pack(w, problem)
    x, ids, weights = random_inputs(500, hidden, 4, 4)
    out = torch.empty_like(x)
    for level in KNOWN:
        if how(level) not in ("native", "emulated"):
            continue
        with on_level(level):
            experts = cpu.CpuExperts(packed, problem, library.Context(level, 2))
            experts(x[:1], ids[:1], weights[:1], out=out[:1])
            before = allocated()
            experts(x, ids, weights, out=out)
            print(level, allocated() - before, footprint("cpu", problem, 500).scratch_bytes)
"""


@pytest.mark.slow  # on a loaded machine
def test_a_call_of_the_cpu_kernel_allocates_what_it_is_said_to():
    """At each level.  In a process of its own: glibc's counts of what is allocated, before and after a first call."""
    out = in_process_of_its_own(ALLOCATED)
    assert {line.split()[0] for line in out.splitlines()} == {v for v in KNOWN if how(v) in ("native", "emulated")}
    for line in out.splitlines():
        used, said = map(int, line.split()[1:])
        assert used <= 1.1 * said + (1 << 17), out
        assert said <= 1.6 * used + (1 << 17), out


def in_process_of_its_own(code):
    paths = os.pathsep.join(filter(None, [os.path.dirname(cpu_levels.__file__), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_a_plan_follows_the_level_that_runs(cpu_level):
    """Not the processor: rows of inputs by route are for matrix tiles alone."""
    problem = problem_of(random_weights("int4_g32", 4, 128, 64), detect_device("cpu"), top_k=4, packages={})
    said = footprint("cpu", problem, 3000).scratch_bytes
    other = replace(problem, device=NAMED_DEVICES["cpu-amx" if cpu_level == "avx512_amx" else "cpu-portable"])
    assert said == footprint("cpu", other, 3000).scratch_bytes


def test_asking_imports_no_package_of_a_row():
    code = (
        "import sys, expertd_kernels.backends.footprint; print({'triton', 'flashinfer'} & set(sys.modules) or 'none')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "none"
