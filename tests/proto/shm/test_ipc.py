"""Another process's GPU memory, with a driver that only writes down what it is asked for."""

from __future__ import annotations

import contextlib
import ctypes as C

import pytest

from expertd.shm import ipc
from expertd.shm.cuda import CudaError

BASE, BYTES = 0x7000_0000, 4096


class Driver:
    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    @contextlib.contextmanager
    def current(self, device):
        self.calls.append(f"device {device}")
        yield

    def __call__(self, name, *arguments):
        self.calls.append(name)
        if name == self._fails:
            raise CudaError(name)
        if name == "cuMemGetAddressRange_v2":
            arguments[0]._obj.value, arguments[1]._obj.value = BASE, BYTES
        elif name == "cuIpcGetMemHandle":
            assert arguments[1].value == BASE
            C.memmove(arguments[0], bytes(range(64)), 64)
        elif name == "cuIpcOpenMemHandle_v2":
            assert bytes(arguments[1].bytes) == bytes(range(64))
            arguments[0]._obj.value = BASE
        elif name == "cuIpcCloseMemHandle":
            assert arguments[0].value == BASE


@pytest.fixture
def driver(monkeypatch):
    def use(**more):
        made = Driver(**more)
        monkeypatch.setattr(ipc, "cuda", lambda: made)
        return made

    return use


def test_an_address_is_told_by_its_allocation(driver):
    driver()
    assert ipc.exported(BASE + 100, 0) == (bytes(range(64)), 100)


def test_memory_that_cannot_be_shared_is_an_error(driver):
    driver(fails="cuIpcGetMemHandle")
    with pytest.raises(CudaError):
        ipc.exported(BASE, 0)


def test_an_allocation_is_mapped_and_unmapped_once(driver):
    found = driver()
    mapped = ipc.MappedMemory(bytes(range(64)), 3)
    assert (mapped.address, mapped.bytes) == (BASE, BYTES)
    mapped.close()
    mapped.close()
    assert found.calls.count("cuIpcCloseMemHandle") == 1
    assert found.calls.count("device 3") == 2


def test_one_of_which_the_size_is_not_known_is_unmapped(driver):
    found = driver(fails="cuMemGetAddressRange_v2")
    with pytest.raises(CudaError):
        ipc.MappedMemory(bytes(range(64)), 0)
    assert found.calls[-1] == "cuIpcCloseMemHandle"
