"""What a boot has compiled ahead, and that it goes on without."""

from typing import ClassVar

import pytest

from expertd_kernels import Device, Problem, Scheme
from expertd_kernels.backends.device import Nvidia
from expertd_kernels.oracle.decision import decide
from expertd_kernels.packed.selfcheck import SMALL_BATCHES
from expertd_server.boot import compiling as module
from expertd_server.boot.assignment import Assignment
from expertd_server.boot.compiling import KernelsAhead, calls_to_compile, job_of, warm_sizes

H200 = Nvidia("NVIDIA H200", (9, 0), 132, 232448)
INT4 = Scheme.parse("int4_g128")
HOPPER = Device("cuda", "sm90", (9, 0))


def assigned(device=HOPPER, held=(0, 1, 2), pin="gluon_sm90", **problem) -> Assignment:
    from expertd_kernels.common.problem import Package

    p = Problem(device, INT4, INT4, len(held), 256, 128, packages={"triton": Package("3.7.1")}, **problem)
    return Assignment(None, held, decide(p, pin=pin))


def test_calls_are_those_of_the_check_and_of_the_warm_up():
    calls = calls_to_compile(129, 8, (1,), 100)
    assert {(m, 8) for m in (*SMALL_BATCHES, 129)} <= set(calls)
    assert {(m, k) for m in warm_sizes(100) for k in (8, 1)} <= set(calls)
    assert len(calls) == len(set(calls)) == 2 * len(warm_sizes(100)) + 1


def test_layers_that_are_alike_are_compiled_once():
    job = job_of(H200, [assigned(top_k=2), assigned(top_k=2), assigned(top_k=1), assigned(held=(0, 1), top_k=2)], (), 8)
    assert job is not None
    assert [(c.problem.top_k, c.problem.num_experts) for c in job.layers] == [(2, 3), (1, 3), (2, 2)]
    assert all(c.backend == "gluon_sm90" and not c.problem.packages for c in job.layers)
    assert (4, 2) in job.layers[0].sizes  # a row for each expert held, and one more


@pytest.mark.parametrize(
    "other", [assigned(Device("cpu", "x86_64"), pin="reference"), assigned(pin="reference")], ids=["cpu", "reference"]
)
def test_layers_that_nothing_is_compiled_for_are_left_out(other):
    assert job_of(H200, [other], (), 8) is None


class Ahead:
    """A process that records what it is asked."""

    made: ClassVar[list["Ahead"]] = []

    def __init__(self) -> None:
        self.job, self.waited, self.closed = None, 0, 0

    @classmethod
    def start(cls, processes):
        cls.made.append(cls())
        return cls.made[-1]

    def give(self, job):
        self.job = job

    def wait(self):
        self.waited += 1
        return "3 kernels; a fault"

    def close(self):
        self.closed += 1


@pytest.fixture
def ahead(monkeypatch, tmp_path):
    """A machine with a GPU, as far as this module looks."""
    monkeypatch.setattr(Ahead, "made", [])
    monkeypatch.setattr(module, "CompileAhead", Ahead)
    monkeypatch.setattr(module, "usable_processes", lambda: 2)
    monkeypatch.setattr(module.os.path, "exists", lambda path: True)
    monkeypatch.setattr("expertd_kernels.backends.device.nvidia_of", lambda where: H200)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Ahead.made


def test_it_starts_at_once_and_is_waited_for(ahead):
    told = []
    kernels = KernelsAhead("auto")
    (process,) = ahead
    kernels.give([assigned()], None, 8, (), told.append)
    assert process.job == job_of(H200, [assigned()], (), 8)
    kernels.wait()
    kernels.wait()
    assert told == ["3 kernels; a fault"]
    kernels.close()
    kernels.wait()
    assert process.closed == 1


def test_what_was_compiled_before_is_not_waited_for(ahead):
    """No process is started, or that which was is ended."""
    early, job = KernelsAhead("cuda:0"), job_of(H200, [assigned()], (), 8)
    assert job is not None
    job.set_done()
    early.give([assigned()], None, 8)
    assert [p.closed for p in ahead] == [1]
    later = KernelsAhead("cuda:0")
    later.give([assigned()], None, 8)
    later.wait()
    assert len(ahead) == 1
    other = KernelsAhead("cuda:0")
    other.give([assigned(top_k=2)], None, 8)
    assert len(ahead) == 2
    assert ahead[1].job is not None


def test_what_was_likely_is_compiled_once_and_what_was_not_is_given_up(ahead):
    """The plan asks again when it knows which packages import."""
    told = []
    kernels = KernelsAhead("auto")
    kernels.give([assigned()], None, 8)
    kernels.give([assigned()], None, 8, (), told.append)
    (process,) = ahead
    assert process.closed == 0
    kernels.give([assigned(top_k=2)], None, 8, (), told.append)
    assert [p.closed for p in ahead] == [1, 0]
    assert ahead[1].job == job_of(H200, [assigned(top_k=2)], (), 8)
    kernels.wait()
    assert told == ["3 kernels; a fault"]


def test_what_was_done_before_is_looked_for_once_more_and_started_by_nobody(ahead):
    job = job_of(H200, [assigned()], (), 8)
    job.set_done()
    kernels = KernelsAhead("auto")
    kernels.give([assigned()], None, 8)
    kernels.give([assigned()], None, 8)
    kernels.wait()
    assert ahead == []


def test_without_such_a_gpu_nothing_is_started(ahead, monkeypatch):
    for device in ("cpu", "rocm", "xpu:1"):
        KernelsAhead(device)
    monkeypatch.setattr(module.os.path, "exists", lambda path: False)
    KernelsAhead("auto")
    monkeypatch.setattr(module.os.path, "exists", lambda path: True)
    monkeypatch.setattr(module, "usable_processes", lambda: 0)
    switched_off = KernelsAhead("auto")
    assert not switched_off.wanted
    switched_off.give([assigned()], None, 8)
    switched_off.wait()
    switched_off.close()
    assert ahead == []


def test_a_process_that_cannot_be_started_is_done_without(ahead, monkeypatch):
    monkeypatch.setattr(Ahead, "start", lambda processes: None)
    kernels = KernelsAhead("auto")
    kernels.give([assigned()], None, 8)
    kernels.wait()
    kernels.close()


def test_whatever_fails_the_boot_goes_on(ahead, monkeypatch, caplog):
    def fails(*arguments):
        raise TypeError("unhashable")

    monkeypatch.setattr(module, "job_of", fails)
    kernels = KernelsAhead("auto")
    kernels.give([assigned()], None, 8)
    kernels.wait()
    assert [p.closed for p in ahead] == [1]
    assert "no kernels are compiled ahead: TypeError: unhashable" in caplog.text
