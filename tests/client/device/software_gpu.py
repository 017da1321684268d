"""A GPU that is this host's memory, and a caller's session on it."""
# ruff: noqa: N802

import contextlib
import ctypes as C
import time

import torch
from connection_kit import E, H, missing
from waiting import until

from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.device import cuda_ipc, session
from expertd_client.device.dlpack import CPU, tensor_at

MISSING = missing()

POOL = 1 << 16
CALL, TAKE = 1, 2


class SoftwareGpu:
    """The driver's functions that a session uses."""

    def __init__(self):
        self.kept = []
        self.registered = 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: 0

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = {b"call": CALL, b"take": TAKE}[name.value]
        return 0

    def cuMemAlloc_v2(self, address, size):
        self.kept.append(C.create_string_buffer(size.value))
        address._obj.value = C.addressof(self.kept[-1])
        return 0

    def cuMemHostRegister_v2(self, *arguments):
        self.registered += 1
        return 0

    def cuMemHostUnregister(self, *arguments):
        self.registered -= 1
        return 0

    def cuLaunchKernel(self, kernel, *arguments):
        pointers = arguments[8]
        values = [C.c_uint64.from_address(p).value for p in pointers]
        if kernel.value == CALL:
            for to, source, size in zip(values[0:9:3], values[1:9:3], values[2:9:3], strict=True):
                C.memmove(to, source, size)
            answered, called, number, _, good, failed, spoil, size = values[9:]
            word, until = C.c_uint32.from_address(answered), time.monotonic() + 20
            word.value = 0
            C.c_uint32.from_address(called).value = number
            while not word.value:
                assert time.monotonic() < until, "the stream waits for ever"
                time.sleep(1e-5)
            bad = C.c_uint32.from_address(failed).value = word.value != good
            if bad:
                C.memset(spoil, 255, size)
        else:
            to, source, size, failed = values
            if C.c_uint32.from_address(failed).value:
                C.memset(to, 255, size)
            else:
                C.memmove(to, source, size)
        return 0


class HostPool:
    """Memory that both sides see, under the same address."""

    made = None

    uuid = b"the server's GPU"

    def __init__(self, memory):
        self.memory, self.bytes, self.device, self.closed = memory, POOL, 0, 0
        self.address = C.addressof(memory)

    @classmethod
    def create(cls, nbytes):
        cls.made = cls((C.c_uint8 * POOL)())
        return cls.made

    @classmethod
    def receive(cls, sock, device):
        assert sock.recv(4) == b"pool"
        return cls(cls.made.memory)

    def send(self, sock):
        sock.sendall(b"pool")

    def close(self):
        self.closed += 1


class Stream:
    cuda_stream = 7

    def wait_stream(self, other):
        raise AssertionError("there is one stream")


STREAM = Stream()


class Session(session.DeviceSession):
    def _on_device(self):
        return contextlib.nullcontext()

    def _misplaced(self, t):
        return False

    def _tensor(self, address, shape, dtype):
        return tensor_at(address, shape, dtype, 0, CPU)


def enter(listener, caller="caller"):
    """A new session; waits where the end of the one before has not reached the server yet."""
    offers = []

    def accepted():
        offers.append(listener.gpu.offer(caller, host_id()))
        return not offers[-1][2]

    until(accepted)
    token, endpoint, _ = offers[-1]
    return cuda_ipc.open_session(pb.SessionAnswer(token=token, endpoint=endpoint), 0)


def inputs(M, x=torch.bfloat16, ids=torch.int32, w=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-8, 8, (M, H), generator=g).to(x)
    routes, weights = torch.randint(-1, E, (M, 2), generator=g), torch.randint(0, 8, (M, 2), generator=g) / 8
    factor = torch.where(routes >= 0, (routes + 1) * weights, 0.0).sum(1, keepdim=True)
    return (hidden, routes.to(ids), weights.to(w)), hidden.float() * factor


def forward(lane, layer, tensors, **more):
    return lane.forward(layer, *tensors, stream=STREAM, **more)
