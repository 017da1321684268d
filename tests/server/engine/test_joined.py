"""Layers in parts: what is computed where, by what, and that their sums are those of one layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from core_library import needs_core
from interpreted import interpreted

from expertd.cxx import BuildError, find_compiler
from expertd_kernels import build, decide, detect_device, problem_of, relative_error, tolerance
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_server.engine.joined import JoinedSpace, Part, Site, join

pytestmark = [needs_core, pytest.mark.timeout(60)]
HERE = Path(__file__).parent
DRIVER = """
extern "C" {
int cuGraphLaunch(void* graph, void*) { return reinterpret_cast<void (*)()>(graph)(), 0; }
int cuStreamQuery(void*) { return 0; }
int cuStreamGetCtx(void* stream, void** context) { return *context = stream, 0; }
int cuCtxPushCurrent_v2(void* context) { return context == reinterpret_cast<void*>(7) ? 0 : 1; }
int cuCtxPopCurrent_v2(void**) { return 0; }
}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What pretended_parts.py tells."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    try:
        compiler = find_compiler()
    except BuildError as e:
        pytest.skip(str(e))
    command = [*compiler, "-std=c++17", "-fPIC", "-shared", str(folder / "driver.cpp"), "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1")], check=True, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(HERE / "pretended_parts.py")], env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_device_and_the_host_compute_their_routes_and_the_sums_are_added(found):
    for tokens in ("1", "5", "8", "70"):
        code, untouched, error = found[tokens]
        assert (code, untouched) == (0, False)
        assert error < 1e-4


def test_what_has_no_graph_of_its_size_is_left_to_python_and_nothing_is_written(found):
    assert found["no graph"] == [1, True, None]
    assert found["without its graph"] == [1, True, None], "rows are padded to the size, not to a larger graph"


def test_a_part_without_routes_is_not_called(found):
    for name in ("device alone", "host alone", "nobody"):
        code, untouched, error = found[name]
        assert (code, untouched) == (0, False), name
        assert error < 1e-5
    assert found["seen"] == {"host": [5], "device": [5]}


def test_a_part_that_fails_refuses_the_batch_without_writing(found):
    assert found["host fails"] == [1, True, None]
    assert found["device ends without its word"] == [1, True, None], "and is not waited for for ever"
    assert found["calls"] == [5, 4], "of those that were answered; the single token has no route on the host"


def made(dtype="bf16", capturable=False, split=(3, 5), device="cpu"):
    """(weights, experts of both parts together)."""
    E, H = sum(split), 128
    weights = random_weights("int4_g32", E, H, 64, seed=3)
    kinds = {"bf16": torch.bfloat16, "f32": torch.float32}
    sites = [Site.of(f"cpu:{i}", torch.device("cpu")) for i in range(len(split))]
    space = JoinedSpace(sites, kinds[dtype], 64)
    parts, first = [], 0
    for site, n in enumerate(split):
        held = list(range(first, first + n))
        own = weights.experts(held)
        decision = decide(problem_of(own, detect_device(device), top_k=2, compute_dtype=dtype))
        parts.append(Part(site, build(decision, own), held, capturable))
        first += n
    return weights, space, join(space, parts, E, H, 2)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_parts_on_the_host_answer_as_one_layer(dtype):
    weights, space, experts = made(dtype)
    for tokens in (1, 7, 40):
        x, ids, w = random_inputs(tokens, 128, 8, 2, seed=tokens, dtype=space.dtype)
        ids[0, 1] = -1
        right = reference_rows(weights, x, ids, w, False)
        assert relative_error(experts(x, ids, w), right) <= tolerance(dtype)
        d = experts.direct()
        assert d.function
        assert d.context


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    pytest.importorskip("triton")
    with interpreted(str(HERE / "joined_cases.py")) as ask:
        yield lambda name: ask(name)["failed"]


@pytest.mark.parametrize(
    "name", ["both parts, bf16", "both parts, f32", "more routes a token", "dropped graphs", "a larger layer"]
)
def test_a_part_on_a_pretended_gpu(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed
