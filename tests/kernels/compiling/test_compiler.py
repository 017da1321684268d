"""What a process without a GPU compiles ahead is what a layer's calls look for in Triton's cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dry_gpu import dry_gpu

from expertd_kernels.backends.device import Nvidia, compile_for
from expertd_kernels.common.problem import Device
from expertd_kernels.compiling.ahead import CompileAhead
from expertd_kernels.compiling.compiler import LONGEST, Kernel, compile_all, kernels_of, with_launchers
from expertd_kernels.compiling.empty import calls_of
from expertd_kernels.compiling.job import Job, LayerCalls
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import experts_of, pack, problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = pytest.mark.usefixtures("own_triton_cache")

H200 = Nvidia("NVIDIA H200", (9, 0), 132, 232448)
ROWS = {b.name: b for b in BACKENDS}
CASES = [
    # backend, scheme, activations, tokens
    ("gluon_sm90", "int4_g128", "none", 1),
    ("gluon_sm90", "bf16", "none", 20),
    ("gluon_w8a8", "e4m3_block128", "e4m3_group128", 8),
    ("triton", "int4_g128_zp", "none", 4),
    ("triton_w8a8", "int8_channel", "int8_token", 40),
]


@pytest.fixture
def absent_gpu():
    """This process, too, plans for a GPU that is not here."""
    compile_for(H200)
    yield
    compile_for(None)


def layer_of(backend, scheme, rounding, tokens):
    """Weights, their problem, and the calls to compile for."""
    weights = random_weights(scheme, 4, 256, 128)
    problem = problem_of(weights, Device("cuda", "sm90", (9, 0)), top_k=2, activation_quant=ActivationQuant(rounding))
    return weights, problem, LayerCalls.of(backend, problem, [(tokens, 2)])


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_real_layer_finds_everything_compiled(case, tmp_path):
    """The layer is packed from weights; ahead it was known by its sizes alone, and in another process.  In a process of
    its own: what Triton calls a kernel's key changes with kernels that other tests have compiled before."""
    words = [
        sys.executable,
        "-c",
        f"import test_compiler as t; t.find_everything_compiled({case!r}, {str(tmp_path)!r})",
    ]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def find_everything_compiled(case, folder):
    """folder: where Triton keeps what it compiles."""
    compile_for(H200)
    weights, problem, layer = layer_of(*case)
    ahead = CompileAhead.start(2)
    assert ahead is not None
    ahead.give(Job(H200, (layer,)))
    outcome = ahead.wait()
    ahead.close()
    assert outcome.faults == ()
    there = set(Path(folder).iterdir())
    assert there
    row = ROWS[layer.backend]
    experts = experts_of(row, pack(row, weights, problem), problem)
    with dry_gpu() as launches:
        for call in calls_of(layer, experts):
            call()
    assert len({launch.compiled.hash for launch in launches}) == outcome.kernels
    assert set(Path(folder).iterdir()) == there, "something was compiled again"


def test_each_kernel_is_found_once_and_the_longest_first(absent_gpu):
    _, _, layer = layer_of("gluon_sm90", "int4_g128", "none", 1)
    more = LayerCalls.of(layer.backend, layer.problem, [(1, 2), (2, 2), (600, 2)])
    kernels, _ = kernels_of(Job(H200, (layer, more, more)))
    assert len({k.compile for k in kernels}) == len(kernels)
    names = [k.name for k in kernels]
    long = [name in LONGEST for name in names]
    assert long == sorted(long, reverse=True)
    assert 2 <= sum(long) < len(long)
    assert names.count("signal") == names.count("deliver") == 1


def test_a_layer_that_cannot_be_made_is_told_and_the_others_compile(absent_gpu):
    _, _, layer = layer_of("triton", "bf16", "none", 1)
    wrong = LayerCalls("gluon_w8a8", layer.problem, layer.sizes)
    kernels, faults = kernels_of(Job(H200, (wrong, layer)))
    assert len(faults) == 1
    assert "is not the row's" in faults[0]
    assert "expert_gemm" in {k.name for k in kernels}


def test_each_number_is_given_to_one_process_and_faults_are_told(tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()

    def make(i: int) -> None:
        if i == 7:
            raise ValueError("seven")
        with (folder / str(i)).open("xb") as f:  # fails where it is there
            f.write(str(os.getpid()).encode())

    faults = compile_all([Kernel(f"k{i}", lambda i=i: make(i)) for i in range(40)], 3)
    assert faults == ["k7: ValueError: seven"]
    assert sorted(int(p.name) for p in folder.iterdir()) == [i for i in range(40) if i != 7]
    assert str(os.getpid()) not in {p.read_text() for p in folder.iterdir()}


def test_a_process_that_dies_is_told_and_other_children_are_not_waited_for():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        faults = compile_all([Kernel("k", lambda: os.kill(os.getpid(), 9))], 1)
        assert faults == ["a process ended with -9"]
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


def test_launchers_are_left_out_where_there_is_no_driver(tmp_path, monkeypatch):
    from triton.backends.nvidia import driver

    kernels = [Kernel("k", lambda: None)]
    monkeypatch.setattr(driver, "libcuda_dirs", lambda: ["/somewhere"])
    assert [k.name for k in with_launchers(kernels, tmp_path)] == ["cuda_utils", "k"]

    def missing() -> list[str]:
        raise AssertionError("libcuda.so cannot be found")

    monkeypatch.setattr(driver, "libcuda_dirs", missing)
    assert with_launchers(kernels, tmp_path) == kernels


def test_the_planner_is_told_of_the_gpu_that_is_not_here(absent_gpu):
    from expertd_kernels.backends.device import multiprocessors, nvidia_of, shared_bytes
    from expertd_kernels.backends.gluon.shared.gpu import current_gpu

    cpu = torch.device("cpu")
    assert (multiprocessors(cpu), shared_bytes(cpu), nvidia_of(cpu)) == (132, 232448, H200)
    assert (current_gpu().name, current_gpu().device) == ("NVIDIA H200", cpu)
