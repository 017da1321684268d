"""Lessons that a backend's arithmetic can break, for each line of the table that can compute on a CPU: our own kernels
in Triton's interpreter, packages through their stand-ins.  oracle/test_lessons_computed.py runs this file as a program:

    python lesson_cases.py        reads case names from stdin, one a line; answers each with one line of JSON
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from backend_lines import EXPERTS, LINES, Line
from interpreted import answer_cases

from expertd_kernels import Problem, batched_routes
from expertd_kernels.common.protocol import Experts
from expertd_kernels.oracle.decision import backend_module
from expertd_kernels.oracle.rules import judge
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import ActivationQuant

CPU = torch.device("cpu")
Build = Callable[[Line, Weights, Problem], Experts]

GPU_ONLY = frozenset({"gluon_sm90", "gluon_w8a8"})
"""Gluon has no interpreter: tests/gpu has the same lessons for these (test_gluon_sm90.py, test_gluon_w8a8.py)."""
PACKAGES = {"flashinfer_trtllm": "flashinfer", "aiter": "aiter", "xpu": "vllm_xpu_kernels"}
"""Backends whose stand-ins run the package's own Python: it must be installed or unpacked (vendor.package_folder)."""


def own(line: Line, w: Weights, p: Problem) -> Experts:
    module = backend_module(line.backend)
    return module.experts(module.pack(w, p), p)


def _glue(line: Line, w: Weights, p: Problem) -> Experts:
    import glue_cases

    made = getattr(glue_cases, f"{line.backend.name}_experts")(w)
    return made[0] if isinstance(made, tuple) else made


def _trtllm(line: Line, w: Weights, p: Problem) -> Experts:
    from trtllm_cases import EntryPoints, package_helpers

    from expertd_kernels.backends import flashinfer_trtllm as backend

    return backend.TrtllmExperts(backend.pack(w, p), EntryPoints(package_helpers()), CPU)


def _cutlass(line: Line, w: Weights, p: Problem) -> Experts:
    from cutlass_cases import BlackwellEntryPoint, EntryPoint

    from expertd_kernels.backends import flashinfer_cutlass as backend

    form = line.scheme.name
    blackwell = form in ("e4m3_tensor", "nvfp4", "mxfp8") or line.rounding is ActivationQuant.MXFP8
    vendor = BlackwellEntryPoint(form) if blackwell else EntryPoint(w)
    return backend.CutlassExperts(backend.pack(w, p), vendor, CPU)


def _aiter(line: Line, w: Weights, p: Problem) -> Experts:
    from aiter_cases import Vendor
    from vendor import package_folder

    from expertd_kernels.backends import aiter as backend

    return backend.AiterExperts(backend.pack(w, p), Vendor(package_folder("aiter")), CPU)


def _xpu(line: Line, w: Weights, p: Problem) -> Experts:
    from xpu_cases import vendor

    from expertd_kernels.backends import xpu as backend

    return backend.XpuExperts(backend.pack(w, p), cache(vendor)().face, CPU)


BUILD: Mapping[str, Build] = {
    **dict.fromkeys(("reference", "cpu", "cpu_w4a8", "cpu_torch", "triton", "triton_w8a8", "triton_w4a8"), own),
    **dict.fromkeys(("deepgemm", "humming", "marlin"), _glue),
    "flashinfer_trtllm": _trtllm,
    "flashinfer_cutlass": _cutlass,
    "aiter": _aiter,
    "xpu": _xpu,
}
"""How a backend is run here.  A backend that is neither here nor in GPU_ONLY fails its test."""


def experts(line: Line) -> int:
    """Fewer where each program of a kernel is interpreted."""
    return 3 if line.backend.name.startswith("triton") else EXPERTS


def limit(line: Line) -> float:
    return tolerance("bf16", line.rounding)


def louder(w: Weights, times: float = 8.0) -> Weights:
    """Biases that matter beside the products."""
    return replace(
        w, **{n: replace(q, bias=q.bias * times) for n in ("w13", "w2") if (q := getattr(w, n)).bias is not None}
    )


def obeys_the_routes(line: Line, build: Build) -> None:
    """Ids and weights that no router gives: an expert twice, negative, zero and large weights, absent routes."""
    w = line.weights(experts(line))
    E = w.num_experts
    x, _, _ = random_inputs(5, w.hidden_size, E, 2)
    ids = torch.tensor([[E - 1, E - 1], [0, -1], [-1, 2], [1, 2], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[-1.0, 2.5], [0.25, 9.0], [7.0, -0.5], [3.0, 0.0], [1.0, 1.0]])
    got = build(line, w, line.problem(w))(x, ids, weights, out=torch.full_like(x, float("nan")))
    for row, other in ((0, [[E - 1, 0], [0, E - 1]]), (1, [[1, -1], [0, 0]]), (3, [[2, 1]])):
        right = reference(w, x, ids, weights)[row]
        assert relative_error(got[row], right) < 2 * limit(line), (row, relative_error(got[row], right))
        for wrong in other:
            given = ids.clone()
            given[row] = torch.tensor(wrong)
            assert relative_error(reference(w, x, given, weights)[row], right) > 4 * limit(line), "too weak a test"
    error = relative_error(got, reference(w, x, ids, weights))
    assert error < 1.5 * limit(line), error
    assert not got[4].any()


def biases_of_both(line: Line, build: Build) -> None:
    """Each matrix's bias by itself moves the answer, and neither stands in for the other."""
    w = louder(line.weights(experts(line)))
    x, ids, weights = random_inputs(3, w.hidden_size, w.num_experts, 2)
    for given in (w, replace(w, w13=replace(w.w13, bias=None)), replace(w, w2=replace(w.w2, bias=None))):
        got = build(line, given, line.problem(given))(x, ids, weights)
        error = relative_error(got, reference(given, x, ids, weights))
        assert error < limit(line), error
    right = reference(w, x, ids, weights)
    for wrong in (
        replace(w, w2=replace(w.w2, bias=None)),
        replace(w, w13=replace(w.w13, bias=None)),
        replace(w, w2=replace(w.w2, bias=w.w13.bias[:, : w.hidden_size])),
    ):
        assert relative_error(reference(wrong, x, ids, weights), right) > 2 * limit(line), "too weak a test"


def zero_points_of_both(line: Line, build: Build) -> None:
    """Rows grouped by expert [E, T, H], as all-to-all libraries hand them over, keep w13's and w2's zero points."""
    w, T = line.weights(experts(line), bias=False), 2
    E = w.num_experts
    rows = random_inputs(E * T, w.hidden_size, E, 1)[0]
    ids, ones = batched_routes(torch.arange(E) % (T + 1), T)
    right = reference(w, rows, ids, ones)
    got = build(line, w, line.problem(w, top_k=1))(rows, ids, ones)
    assert relative_error(got, right) < limit(line), relative_error(got, right)
    for name in ("w13", "w2"):
        q = getattr(w, name)
        middle = torch.full_like(q.zeros, 8 if q.scheme.element.packed else 0)
        wrong = replace(w, **{name: replace(q, zeros=middle)})
        assert relative_error(reference(wrong, rows, ids, ones), right) > 2 * limit(line), f"{name}: too weak a test"


def sizes_of_gpt_oss(line: Line, build: Build) -> None:
    """Sizes that are to multiples of 128, 256 and 512 what 2880 is: computed right, not only not refused."""
    w = line.weights(2, (320, 320), bias=True, activation=Activation.parse("swigluoai"))
    assert all(320 % n == 2880 % n for n in (64, 128, 256, 512))
    p = line.problem(w)
    assert not judge(line.backend, p)
    x, ids, weights = random_inputs(1, 320, 2, 1)
    out = build(line, w, p)(x, ids, weights, out=torch.full_like(x, float("nan")))
    assert relative_error(out, reference(w, x, ids, weights)) < limit(line)


def serves_gpt_oss(line: Line) -> bool:
    """Whether the line takes gpt-oss's layers: mxfp4 at H = I = 2880, biases, clamped swigluoai."""
    if line.scheme.name != "mxfp4":
        return False
    w = line.weights(bias=True, activation=Activation.parse("swigluoai"))
    return not judge(line.backend, replace(line.problem(w), hidden_size=2880, intermediate_size=2880))


LESSONS: Mapping[str, tuple[Callable[[Line, Build], None], Callable[[Line], bool]]] = {
    "obeys the routes": (obeys_the_routes, lambda line: True),
    "biases of both": (biases_of_both, lambda line: line.biased),
    "zero points of both": (zero_points_of_both, lambda line: line.scheme.zeros),
    "sizes of gpt-oss": (sizes_of_gpt_oss, serves_gpt_oss),
}
"""Name -> (the lesson, the lines that it is for)."""


def _cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every line, but of our own interpreted kernels, which are slow, one line of each type of weights."""
    seen = set()
    for line in LINES:
        for name, (lesson, wanted) in LESSONS.items():
            key = (line.backend.name, line.scheme.element, name)
            if line.backend.name in GPU_ONLY or not wanted(line):
                continue
            if not line.backend.name.startswith("triton") or key not in seen:
                seen.add(key)
                yield f"{line.name}: {name}", partial(lesson, line, BUILD.get(line.backend.name, own))


CASES: Mapping[str, Callable[[], Any]] = dict(_cases())


def main() -> None:
    torch.set_num_threads(1)
    answer_cases(CASES)


if __name__ == "__main__":
    main()
