"""A GPU's memory that two processes share, with a driver of a few lines: what is taken, what goes over the socket, and
that nothing is left whichever call fails."""
# ruff: noqa: N802

import contextlib
import gc
import os
import socket

import pytest

from expertd.shm import cuda as cuda_module
from expertd.shm import pool as module
from expertd.shm.cuda import Cuda, CudaError
from expertd.shm.pool import Pool, PoolError

pytestmark = pytest.mark.timeout(30)

STEP = 2 << 20
INVALID = 1


class Driver:
    """Counts what is taken and not given back.  fails: the function that answers with an error."""

    def __init__(self, fails="", lacks=()):
        self.fails, self.lacks = fails, lacks
        self.held = {}
        self.file = None

    def __getattr__(self, name):
        if name == self.fails:
            return lambda *arguments: INVALID
        if not name.startswith("cu") or name in self.lacks:
            raise AttributeError(name)
        return getattr(self, "_" + name, lambda *arguments: 0)

    def hold(self, what, n):
        self.held[what] = self.held.get(what, 0) + n
        return 0

    def _cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = int(attribute.value not in self.lacks)
        return 0

    def _cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj[:] = range(16)
        return 0

    def _cuMemGetAllocationGranularity(self, step, properties, kind):
        step._obj.value = STEP
        return 0

    def _cuMemCreate(self, handle, size, properties, flags):
        handle._obj.value = 5
        return self.hold("handle", 1)

    def _cuMemExportToShareableHandle(self, fd, handle, kind, flags):
        fd._obj.value = os.memfd_create("pool")
        self.file = os.fstat(fd._obj.value).st_ino
        return 0

    def _cuMemImportFromShareableHandle(self, handle, fd, kind):
        assert os.fstat(fd.value).st_ino == self.file
        return self.hold("handle", 1)

    def _cuMemRelease(self, handle):
        return self.hold("handle", -1)

    def _cuMemAddressReserve(self, address, size, *more):
        assert size.value % STEP == 0
        address._obj.value = 0x7000_0000
        return self.hold("address", 1)

    def _cuMemAddressFree(self, address, size):
        return self.hold("address", -1)

    def _cuMemMap(self, *arguments):
        return self.hold("mapping", 1)

    def _cuMemUnmap(self, address, size):
        return self.hold("mapping", -1)

    def _cuDevicePrimaryCtxRetain(self, context, device):
        return self.hold("context", 1)

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        return self.hold("context", -1)

    def _cuCtxPushCurrent_v2(self, context):
        return self.hold("current", 1)

    def _cuCtxPopCurrent_v2(self, context):
        return self.hold("current", -1)


@pytest.fixture
def use(monkeypatch):
    def use(**how):
        driver = Driver(**how)
        for m in (module, cuda_module):
            monkeypatch.setattr(m, "cuda", lambda: Cuda(driver))
        return driver

    return use


@pytest.fixture
def pair():
    with contextlib.ExitStack() as both:
        yield tuple(both.enter_context(s) for s in socket.socketpair())


def descriptors():
    gc.collect()  # engines of other tests have descriptors
    return len(os.listdir("/proc/self/fd"))


def test_it_goes_over_a_socket_and_leaves_nothing(use, pair):
    driver, before = use(), descriptors()
    made = Pool.create(0, STEP + 1)
    assert made.bytes == 2 * STEP
    assert driver.held == {"handle": 0, "address": 1, "mapping": 1, "context": 0, "current": 0}
    made.send(pair[0])
    got = Pool.receive(pair[1], 1)
    assert (got.bytes, got.uuid, got.device) == (2 * STEP, bytes(range(16)), 1)
    assert driver.held["mapping"] == 2
    for pool in (made, got, made):
        pool.close()
    assert set(driver.held.values()) == {0}
    assert descriptors() <= before


MAKING = ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.mark.parametrize("fails", MAKING)
def test_a_call_that_fails_while_it_is_made_is_said_and_leaves_nothing(use, fails):
    driver, before = use(fails=fails), descriptors()
    with pytest.raises(PoolError, match=f"{fails}"):
        Pool.create(0, STEP)
    assert not any(driver.held.values())
    assert descriptors() <= before


@pytest.mark.parametrize("fails", ["cuMemImportFromShareableHandle", *MAKING[2:]])
def test_gpus_that_cannot_reach_each_other_are_told_and_leave_nothing(use, pair, fails):
    driver, before = use(), descriptors()
    made = Pool.create(0, STEP)
    made.send(pair[0])
    driver.fails = fails
    with pytest.raises(PoolError, match="cannot reach each other"):
        Pool.receive(pair[1], 1)
    driver.fails = ""
    made.close()
    assert not any(driver.held.values())
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("lacks", "text"),
    [({102}, "virtual memory"), ({103}, "by a descriptor"), ({91}, "addresses")],
)
def test_what_a_gpu_or_its_driver_lacks_is_said(use, pair, lacks, text):
    use(lacks=lacks)
    for attempt in (lambda: Pool.create(0, STEP), lambda: Pool.receive(pair[1], 0)):
        with pytest.raises(PoolError, match=text):
            attempt()


@pytest.mark.parametrize("data", [b"", b"expgpu01", b"expgpu02" + bytes(24), b"expgpu01" + bytes(24)])
@pytest.mark.parametrize("descriptor", [False, True])
def test_what_is_no_such_memory_is_refused_and_leaks_nothing(use, pair, data, descriptor):
    driver = use()
    before = descriptors()
    with open("/dev/null") as other:
        socket.send_fds(pair[0], [data or b"x"], [other.fileno()] if descriptor else [])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(PoolError, match="session: "):
        Pool.receive(pair[1], 0)
    assert not any(driver.held.values())
    assert descriptors() <= before


def test_errors_have_the_drivers_names(use):
    driver = Driver(fails="cuInit")
    with pytest.raises(CudaError, match="cuInit: 1"):
        Cuda(driver)
    with pytest.raises(CudaError, match="does not have it"):
        Cuda(Driver(lacks={"cuMemMap"}))("cuMemMap")
