"""The process that compiles ahead: what it is asked, what it tells, and that nothing of it can fail a boot."""

import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

from expertd_kernels.backends.device import Nvidia
from expertd_kernels.common.problem import Device, Package, Problem
from expertd_kernels.compiling import ahead as module
from expertd_kernels.compiling.ahead import CompileAhead, usable_processes
from expertd_kernels.compiling.job import Job, LayerCalls
from expertd_kernels.compiling.marks import any_mark
from expertd_kernels.weights.scheme import Scheme

pytestmark = pytest.mark.usefixtures("own_triton_cache")

BF16 = Scheme.parse("bf16")


def job(backend: str = "triton", multiprocessors: int = 132, **problem) -> Job:
    p = Problem(Device("cuda", "sm90", (9, 0)), BF16, BF16, 2, 64, 32, **problem)
    return Job(Nvidia("NVIDIA H200", (9, 0), multiprocessors, 232448), (LayerCalls.of(backend, p, [(1, 1)]),))


def test_a_job_is_compiled_and_marked_as_done(tmp_path):
    assert not any_mark()
    ahead = CompileAhead.start(2)
    assert ahead is not None
    ahead.give(job())
    outcome = ahead.wait()
    assert outcome.faults == ()
    assert outcome.kernels >= 5
    assert set(outcome.seconds) == {"importing", "finding", "compiling", "waiting"}
    assert str(outcome).startswith(f"{outcome.kernels} kernels compiled ahead (seconds: importing ")
    assert ahead.wait() is outcome
    ahead.close()
    assert any_mark()
    assert job().done()
    assert job(packages={"numpy": Package("1")}).done(), "kernels do not depend on what is installed besides"
    assert not job(multiprocessors=78).done()
    assert not job(bias=True).done()


def test_what_goes_wrong_is_told_and_nothing_is_marked(tmp_path):
    ahead = CompileAhead.start(1)
    assert ahead is not None
    ahead.give(job("gluon_w8a8"))
    outcome = ahead.wait()
    assert "is not the row's" in outcome.faults[0]
    assert "is not the row's" in str(outcome)
    assert not job("gluon_w8a8").done()


def test_a_process_that_cannot_work_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert CompileAhead.start(1) is None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ahead = CompileAhead.start(1)
    assert ahead is not None
    ahead.give(job())
    assert "the process that compiles ahead ended with 1" in str(ahead.wait())
    ahead.close()


def test_it_can_be_ended_at_any_time():
    ahead = CompileAhead.start(1)
    assert ahead is not None
    ahead.close()
    ahead.close()
    ahead.give(job())
    assert ahead.wait().faults
    nothing = CompileAhead.start(1)
    assert nothing is not None
    assert nothing.wait().kernels == 0
    nothing.close()


def test_the_number_of_processes(monkeypatch):
    monkeypatch.delenv("EXPERTD_COMPILE_PROCESSES", raising=False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(200)), raising=False)
    monkeypatch.setattr(module, "cpu_quota", lambda: float("inf"))
    assert usable_processes() == module.MOST_PROCESSES
    monkeypatch.setattr(module, "cpu_quota", lambda: 2.5)
    assert usable_processes() == 2
    monkeypatch.setattr(module, "cpu_quota", lambda: 0.5)
    assert usable_processes() == 1
    for text, wanted in (("0", 0), ("3", 3), ("many", 1)):
        monkeypatch.setenv("EXPERTD_COMPILE_PROCESSES", text)
        assert usable_processes() == wanted


def test_starting_it_imports_no_torch():
    program = "import sys; import expertd_kernels.compiling.ahead; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
