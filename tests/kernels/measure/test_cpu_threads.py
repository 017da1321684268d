"""Threads of the CPU kernel: planning on made-up machines, the choice, and the measurement on this one."""

from __future__ import annotations

import math

import pytest
import torch

from expertd_kernels import reference, relative_error
from expertd_kernels.backends import cpu
from expertd_kernels.measure.cpu_threads import candidates, choose, measured_threads
from expertd_kernels.native import library as native
from expertd_kernels.native.cores import Core, cpu_quota, most_threads, physical_cores, places, plan
from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights

built = pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")


def make_system(folder, nodes, siblings):
    """nodes: cpulist of each; siblings: CPU -> thread_siblings_list."""
    for n, cpus in enumerate(nodes):
        (folder / f"node/node{n}").mkdir(parents=True)
        (folder / f"node/node{n}/cpulist").write_text(cpus + "\n")
    for number, text in siblings.items():
        (folder / f"cpu/cpu{number}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(text + "\n")
    return folder


def test_two_sockets_with_two_threads_a_core(tmp_path):
    """Usual numbering: CPUs 0-3 and 8-11 on the first node, n and n + 8 are one core."""
    pairs = {c: f"{c % 8},{c % 8 + 8}" for c in range(16)}
    system = make_system(tmp_path, ["0-3,8-11", "4-7,12-15"], pairs)
    cores = physical_cores(range(16), system)
    assert cores == tuple(Core(c // 4, c) for c in range(8))
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    assert places(8, cores) == (first,) * 4 + (second,) * 4
    assert places(2, cores) == (first, second)  # both memories
    assert places(3, cores) == (first, first, second)
    assert places(9, cores) == ((),) * 9, "more threads than cores: anywhere"


def test_only_the_cpus_of_the_affinity_count(tmp_path):
    pairs = {c: f"{c % 8},{c % 8 + 8}" for c in range(16)}
    system = make_system(tmp_path, ["0-3,8-11", "4-7,12-15"], pairs)
    assert physical_cores([12, 3, 11, 5], system) == (Core(0, 3), Core(1, 5), Core(1, 12))  # 3 and 11 are one core


def test_interleaved_nodes_are_sorted_by_node(tmp_path):
    """Some firmware numbers CPUs in turns over the sockets."""
    system = make_system(tmp_path, ["0,2", "1,3"], {c: str(c) for c in range(4)})
    assert [c.cpu for c in physical_cores(range(4), system)] == [0, 2, 1, 3]
    assert places(2, physical_cores(range(4), system)) == ((0, 2), (1, 3))


def test_nodes_may_be_simulated(tmp_path, monkeypatch):
    system = make_system(tmp_path, ["0-3"], {c: str(c) for c in range(4)})
    assert plan(4, physical_cores(range(4), system)) == "4 threads: 4 on node 0 (CPUs 0, 1, 2, 3)"
    monkeypatch.setenv("EXPERTD_CPU_NODES", "0,2;1,3")
    cores = physical_cores(range(4), system)
    assert places(4, cores) == ((0, 2), (0, 2), (1, 3), (1, 3))
    assert plan(3, cores) == "3 threads: 2 on node 0 (CPUs 0, 2), 1 on node 1 (CPUs 1, 3)"
    assert plan(5, cores) == "5 threads on 4 cores: anywhere"


@built
def test_two_simulated_nodes_give_the_same_bits(monkeypatch):
    cpus = [core.cpu for core in physical_cores()]
    if len(cpus) < 2:
        pytest.skip("one core")
    half = len(cpus) // 2
    monkeypatch.setenv("EXPERTD_CPU_NODES", ";".join(",".join(map(str, part)) for part in (cpus[:half], cpus[half:])))
    assert len({core.node for core in physical_cores()}) == 2
    weights = random_weights("int4_g32", 8, 256, 128)
    problem = problem_of(weights, detect_device("cpu"), top_k=2)
    packed, inputs = cpu.pack(weights, problem), random_inputs(40, 256, 8, 2)
    outs = [cpu.CpuExperts(packed, problem, native.Context(threads=n))(*inputs) for n in (1, 2, len(cpus))]
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert relative_error(outs[0], reference(weights, *inputs)) < 6e-3


def test_a_system_that_says_nothing(tmp_path):
    assert physical_cores([0, 1], tmp_path) == (Core(0, 0), Core(0, 1))


@pytest.mark.parametrize(
    ("text", "want"), [("max 100000", math.inf), ("250000 100000", 2.5), ("nonsense", math.inf), ("", math.inf)]
)
def test_quota_of_a_container(tmp_path, text, want):
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == want
    assert cpu_quota(tmp_path / "absent") == math.inf


def test_most_threads_within_the_quota():
    cores = [Core(0, c) for c in range(8)]
    assert [most_threads(cores, q) for q in (math.inf, 2.5, 0.5, 64.0)] == [8, 2, 1, 8]


def test_candidates():
    assert candidates(1) == (1,)
    assert candidates(2) == (1, 2)
    assert candidates(8) == (1, 2, 3, 4, 6, 8)
    assert candidates(24) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert candidates(40)[-1] == 40


def test_the_least_number_that_is_as_fast_is_chosen():
    assert choose({1: [4.0, 8.0], 2: [2.0, 4.0], 4: [1.0, 2.0]}) == 4
    assert choose({1: [4.0, 8.0], 2: [2.0, 4.0], 4: [1.98, 4.0]}) == 2  # bound by memory: no more to be had
    assert choose({1: [1.0], 2: [3.0]}) == 1  # a busy neighbour


@built
def test_measured_on_this_machine():
    weights = random_weights("int4_g32", 4, 256, 128)
    said: list[str] = []
    n = measured_threads(problem_of(weights, detect_device("cpu"), top_k=2), most=2, note=said.append)
    assert n in (1, 2)
    assert len(said) == 1
    assert said[0].startswith(f"threads: {n} of 2 (ms for (1, 16) tokens: 1: ")


@built
def test_the_process_uses_the_number_that_was_said(monkeypatch):
    native.use_threads(0)  # whatever a server in this process was told
    before = native.default_threads()
    try:
        native.use_threads(3)
        assert native.context().threads == 3
        assert native.context(None, 2).threads == 2
        native.use_threads(0)
        monkeypatch.setenv("EXPERTD_CPU_THREADS", "5")
        assert native.context().threads == 5
        with pytest.raises(ValueError, match="want a number"):
            native.use_threads(-1)
    finally:
        native.use_threads(0)
        monkeypatch.undo()
    assert native.default_threads() == before


SCHEMES = ["int4_g32", "int4_g128_zp", "int4_channel", "int8_g128", "int8_channel_zp", "mxfp4", "nvfp4",
           "e4m3_block128", "e4m3_channel", "mxfp8", "bf16", "f16", "f32"]  # fmt: skip


@built
@pytest.mark.parametrize("level", [] if native.kernel_error() else native.levels())
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_to_eight_threads_give_the_same_bits(scheme, level):
    from expertd_kernels.backends import cpu

    weights = random_weights(scheme, 5, 264, 136)
    problem = problem_of(weights, detect_device("cpu"), top_k=3)
    packed = cpu.pack(weights, problem)
    for tokens in (1, 37):
        inputs = random_inputs(tokens, 264, 5, 3)
        answers = [cpu.CpuExperts(packed, problem, native.context(level, n))(*inputs) for n in range(1, 9)]
        assert all(torch.equal(answers[0], a) for a in answers[1:])
        assert answers[0].abs().sum() > 0
