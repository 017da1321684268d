"""The driver's memory for stacks, in a process that is the server's own."""

import contextlib
import ctypes as C
from types import SimpleNamespace

import pytest
import torch

from expertd.shm.cuda import CudaError
from expertd_server.boot import stacks as module
from expertd_server.boot.stacks import STACK_BYTES, narrow_stacks


class Driver:
    """Of one GPU."""

    def __init__(self, stack):
        self.limits, self.entered = {0: stack}, []

    @contextlib.contextmanager
    def current(self, device):
        self.entered.append(device)
        yield

    def __call__(self, name, *arguments):
        if name == "cuCtxGetLimit":
            arguments[0]._obj.value = self.limits[arguments[1].value]
        else:
            assert name == "cuCtxSetLimit"
            assert isinstance(arguments[1], C.c_size_t)
            self.limits[arguments[0].value] = arguments[1].value


@pytest.mark.parametrize(("stack", "after"), [(1024, STACK_BYTES), (128, 128)])
def test_stacks_are_lowered_and_never_raised(monkeypatch, stack, after):
    driver = Driver(stack)
    monkeypatch.setattr(module, "cuda", lambda: driver)
    monkeypatch.setattr(module, "free_bytes", lambda device: -driver.limits[0] << 20)
    narrow_stacks(torch.device("cuda:1"))
    assert (driver.limits, driver.entered) == ({0: after}, [1])


def test_elsewhere_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(module, "cuda", lambda: pytest.fail("no driver"))
    narrow_stacks(torch.device("cpu"))
    narrow_stacks(torch.device("xpu"))
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip="6.2"))
    narrow_stacks(torch.device("cuda"))


def test_a_driver_that_refuses_is_told_and_serves(monkeypatch, caplog):
    def refuses():
        raise CudaError("cuCtxSetLimit: CUDA_ERROR_UNSUPPORTED_LIMIT")

    monkeypatch.setattr(module, "cuda", refuses)
    with caplog.at_level("INFO"):
        narrow_stacks(torch.device("cuda:0"))
    assert "UNSUPPORTED_LIMIT" in caplog.text
