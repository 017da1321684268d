"""Processes of the CPU benchmark: what they read, that they rest between turns, that one that ends stops no other."""

import contextlib
import ctypes as C
import math
import mmap
import threading
import time

import bench_peers
import pytest
import torch

from expertd_kernels.backends import cpu
from expertd_kernels.bench import cpu_turns
from expertd_kernels.bench.cpu import row_of, table
from expertd_kernels.bench.cpu_layer import Point, settle
from expertd_kernels.bench.cpu_memory import RunsReader
from expertd_kernels.bench.cpu_turns import Sample, TurnsPlan, generation, samples
from expertd_kernels.native import library as native
from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights

built = pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")
PAGE = mmap.PAGESIZE
LAYER = ("tiny/1", "int4_g128")


def plan(**others):
    return TurnsPlan([LAYER], lambda scheme: ["cpu"], others, [1], [1, 9], 0.001, "wall")


def resident(address, nbytes):
    """Numbers of the pages that somebody has touched."""
    pages = (C.c_ubyte * (nbytes // PAGE))()
    assert C.CDLL(None, use_errno=True).mincore(C.c_void_p(address), C.c_size_t(nbytes), pages) == 0
    return {i for i, there in enumerate(pages) if there & 1}


@built
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_read_of_the_same_runs_touches_the_routed_experts_and_nothing_else(threads, tokens):
    weights = random_weights("int4_g128", 8, 512, 384)
    problem = problem_of(weights, detect_device("cpu"), top_k=2)
    packed = cpu.pack(weights, problem)
    memory = {}
    for name in ("w13.stream", "w2.stream"):
        E, nbytes = packed.tensors[name].shape
        m = mmap.mmap(-1, -(-E * nbytes // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        m.madvise(mmap.MADV_NOHUGEPAGE)
        packed.tensors[name] = torch.frombuffer(m, dtype=torch.uint8, count=E * nbytes).view(E, nbytes)
        memory[name] = m, nbytes
    read = RunsReader(cpu.CpuExperts(packed, problem, native.context(None, threads)))
    x, _, w = random_inputs(tokens, 512, 8, 2)
    ids = torch.tensor([[1, 6], [6, 1], [1, -1]], dtype=torch.int32)[torch.arange(tokens) % 3]
    poison = x.clone()
    read(x, ids.contiguous(), w)
    assert torch.equal(x, poison), "nothing is written"
    for name, (m, nbytes) in memory.items():
        touched = resident(packed.tensors[name].data_ptr(), len(m))
        assert touched == {p for e in (1, 6) for p in range(e * nbytes // PAGE, -(-(e + 1) * nbytes // PAGE))}, name


class Spinner:
    """A thread that computes for half a second or so of a core.  spent_s: its CPU time, when it is over."""

    def __init__(self):
        self._begun, self.spent_s = threading.Event(), math.inf
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self._begun.wait(60)

    def _run(self):
        self._begun.set()
        bench_peers.spin(1_000_000)
        self.spent_s = time.thread_time()

    def so_far_s(self):
        with contextlib.suppress(OSError):  # it is over
            return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))
        return self.spent_s


def test_a_process_rests_when_no_thread_computes():
    assert settle(limit_s=60)
    for _ in range(20):
        spinner = Spinner()
        rested = settle(limit_s=0.01)
        if computed := spinner.thread.is_alive():  # else it was over before anybody looked: this machine is busy
            break
    assert computed
    assert not rested
    assert settle(limit_s=60)
    so_far_s = spinner.so_far_s()
    spinner.thread.join(60)
    assert so_far_s > spinner.spent_s / 2, "it had computed nearly all"


@built
@pytest.mark.timeout(400)  # four processes import torch
def test_a_peer_that_ends_or_cannot_be_had_is_told_and_stops_no_other():
    said, peaks = [], {}
    others = {"spins": bench_peers.spins, "ends": bench_peers.ends, "no": bench_peers.raises}
    points = dict(generation(plan(**others), lambda: False, peaks, said.append))
    assert [key[2:] for key in points] == [(1, 1), (1, 9)]
    ours = {"cpu", "plain_read", "same_runs", "spins"}
    assert points[(*LAYER, 1, 1)].keys() == ours | {"ends"}
    assert points[(*LAYER, 1, 9)].keys() == ours
    assert sorted(text for text in said if "may disturb the others" not in text) == [  # as on a busy machine
        "ends: its process ended, exit code 3; left out from here on",
        "no: RuntimeError: no 1 threads; left out from here on",
    ]
    assert points[(*LAYER, 1, 9)]["spins"].relative_error == pytest.approx(1.0)
    assert peaks["1"]["int8_gop_s"] > 0


@built
def test_no_point_is_begun_when_the_budget_is_spent_and_a_fault_of_ours_is_raised(monkeypatch):
    assert list(generation(plan(), lambda: True, {}, print)) == []
    wrong = TurnsPlan([("tiny/1", "no_scheme")], lambda scheme: ["cpu"], {}, [1], [1], 0.001, "wall")
    with pytest.raises(RuntimeError, match="ours and the reads: ValueError"):
        list(generation(wrong, lambda: False, {"1": {}}, print))
    assert cpu_turns.STOP_S < 10


def test_figures_are_medians_over_processes_and_shares_those_of_each_process():
    point = Point(1000.0, 2000.0, 500, {"cpu": 1e-3}, frozenset())
    found = samples([point], {"cpu": [3.0, 1.0, 2.0], "plain_read": [0.5], "same_runs": [1.6]})
    assert found["cpu"] == Sample(2.0, 0.5, 1.0, 0.5, 0.8, 1e-3, eight_bits=False)
    assert math.isnan(samples([point], {"cpu": [1.0]})["cpu"].runs_fraction)
    each = [Sample(us, 10.0, 20.0, share, 2 * share, error, eight_bits=False)
            for us, share, error in ((8.0, 0.4, 1e-3), (9.0, 0.1, 3e-3), (5.0, 0.3, 2e-3))]  # fmt: skip
    row = row_of(("s", "int4_g128", 1, 4), "cpu", each, {"bf16_gflop_s": 1e3, "int8_gop_s": 1e3, "int16_gop_s": 1e3})
    assert (row.us, row.fastest_us, row.slowest_us, row.processes) == (8.0, 5.0, 9.0, 3)
    assert (row.read_fraction, row.runs_fraction, row.relative_error) == (0.3, 0.6, 3e-3)
    assert (row.roofline_fraction, row.bound) == (pytest.approx(0.3), "read")
    assert table([row]).splitlines()[-1] == (
        "cpu                  4     0.01     (0.01-0.01)   10.0    30 %    60 %  3.0e-03"
    )
