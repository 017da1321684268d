"""Sessions from a GPU against the real door and engine, on a GPU of a few lines of Python: its memory is the host's,
its streams compute at once and wait for words in a loop."""
# ruff: noqa: N802

import asyncio
import contextlib
import ctypes as C
import threading
import time

import pytest
import torch
from beside_kit import E, H, Sums, missing, summing_engine

from expertd.errors import (
    BadDtypeError,
    BadShapeError,
    DeadlineExceededError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    UnavailableError,
)
from expertd.shm import cuda as cuda_module
from expertd.shm.cuda import Cuda
from expertd.shm.pool import PoolError
from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AsyncExpertClient, ExpertClient, cuda_ipc, torch_experts
from expertd_client.device_way import DeviceWay
from expertd_client.forwarder import Forwarder
from expertd_client.result import ForwardResult
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.scheduler import Policy
from expertd_server.service.offers import answer_offer
from expertd_server.transports.shm import ShmDoor

MISSING = missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

POOL = 1 << 16
BRING, GATE, TAKE = 1, 2, 3


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
        function._obj.value = {b"bring": BRING, b"gate": GATE, b"take": TAKE}[name.value]
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
        if kernel.value == BRING:
            for to, source, size in zip(values[0:9:3], values[1:9:3], values[2:9:3], strict=True):
                C.memmove(to, source, size)
            C.c_uint32.from_address(values[9]).value = 0
            C.c_uint32.from_address(values[10]).value = values[11]
        elif kernel.value == GATE:
            word, until = C.c_uint32.from_address(values[0]), time.monotonic() + 20
            while not word.value:
                assert time.monotonic() < until, "the stream waits for ever"
                time.sleep(1e-5)
            C.c_uint32.from_address(values[2]).value = word.value != values[1]
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


class Session(cuda_ipc.DeviceSession):
    def _on_device(self):
        return contextlib.nullcontext()

    def _misplaced(self, t):
        return False


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def gpu(monkeypatch):
    gpu = SoftwareGpu()
    monkeypatch.setattr(cuda_ipc, "cuda", lambda: Cuda(gpu))
    monkeypatch.setattr(cuda_ipc, "Pool", HostPool)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: b"another GPU")
    monkeypatch.setattr(cuda_ipc, "DeviceSession", Session)
    return gpu


@pytest.fixture
def server(sums, gpu):
    engine = summing_engine(sums, layers=2)
    engine.sessions.pool, engine.sessions.pool_refusal = HostPool.create, lambda: ""
    engine.start()
    engine.open()
    door = ShmDoor(engine, most_pools=2)
    door.start()
    door.engine = engine
    yield door
    sums.gate.set()
    door.close()
    engine.stop(10)


def enter(door):
    token, endpoint, why = door.gpu.offer("caller", host_id())
    assert not why, why
    return cuda_ipc.open_session(pb.SessionAnswer(token=token, endpoint=endpoint), 0)


@pytest.fixture
def lane(server):
    with enter(server) as lane:
        yield lane


def inputs(M, x=torch.bfloat16, ids=torch.int32, w=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-8, 8, (M, H), generator=g).to(x)
    routes, weights = torch.randint(-1, E, (M, 2), generator=g), torch.randint(0, 8, (M, 2), generator=g) / 8
    factor = torch.where(routes >= 0, (routes + 1) * weights, 0.0).sum(1, keepdim=True)
    return (hidden, routes.to(ids), weights.to(w)), hidden.float() * factor


def forward(lane, layer, tensors, **more):
    return lane.forward(layer, *tensors, stream=STREAM, **more)


def test_answers_are_right_whatever_comes(lane):
    kinds = [(torch.bfloat16, torch.int32, torch.float32), (torch.float16, torch.int64, torch.bfloat16)]
    for seed in range(40):
        t, want = inputs(1 + seed % 7, *kinds[seed % 2], seed=seed)
        out = forward(lane, seed % 2, t)
        assert out.dtype == t[0].dtype
        assert torch.allclose(out.float(), want, rtol=1e-2)
        assert lane.last.routes_computed == int((t[1] >= 0).sum())
    assert len(lane._prepared) == 14, "each kind is asked for once"
    lane.check()


def test_an_output_that_the_caller_brings_and_rows_that_are_not_in_one_piece(lane):
    t, want = inputs(8)
    out = torch.empty_like(t[0])
    apart = torch.stack([t[0], t[0]], 1)[:, 1]
    assert not apart.is_contiguous()
    assert forward(lane, 0, (apart, *t[1:]), out=out) is out
    assert torch.allclose(out.float(), want, rtol=1e-2)


def test_a_request_that_is_refused_answers_nan_and_check_says_why(lane):
    t, want = inputs(3)
    bad = t[1].clone()
    bad[2, 1] = E
    assert forward(lane, 0, (t[0], bad, t[2])).isnan().all()
    with pytest.raises(ExpertIdOutOfRangeError, match=r"\[2, 1\]"):
        lane.check()
    assert torch.allclose(forward(lane, 0, t).float(), want, rtol=1e-2)
    forward(lane, 0, (t[0], bad, t[2]))
    with pytest.raises(ExpertIdOutOfRangeError):
        forward(lane, 0, t)


def test_what_the_server_would_never_compute_is_said_at_once(lane):
    t, _ = inputs(3)
    with pytest.raises(LayerNotHeldError):
        forward(lane, 5, t)
    with pytest.raises(BadShapeError, match="rows of 16, want 32"):
        forward(lane, 0, (t[0][:, :16].contiguous(), *t[1:]))
    with pytest.raises(BadDtypeError):
        forward(lane, 0, (t[0], t[1].float(), t[2]))
    with pytest.raises(ValueError, match=r"want \[M, H\]"):
        forward(lane, 0, (t[0], t[1], t[2].double()))
    with pytest.raises(ValueError, match=r"want \[M, H\]"):
        forward(lane, 0, (t[0], t[1], t[2][:, :1]))
    with pytest.raises(ValueError, match="odd address"):
        forward(lane, 0, (torch.zeros(3 * H + 1, dtype=torch.bfloat16)[1:].view(3, H), *t[1:]))
    with pytest.raises(ValueError, match="split the batch"):
        forward(lane, 0, inputs(2000)[0])


def test_a_server_that_goes_frees_a_stream_that_waits_and_one_that_will(server, sums):
    lane = enter(server)
    t, want = inputs(3)
    assert torch.allclose(forward(lane, 0, t).float(), want, rtol=1e-2)
    sums.gate.clear()
    threading.Timer(0.2, server.close).start()
    assert forward(lane, 0, t).isnan().all()
    call = next(iter(lane._prepared.values()))  # as a captured graph would: nothing looks at the host
    out = torch.zeros_like(t[0])
    call.take.values[0] = out.data_ptr()
    lane._copies.bring(7, call.bring)
    lane._copies.gate(7, lane._gate)
    lane._copies.take(7, call.take)
    assert out.isnan().all()
    with pytest.raises(UnavailableError, match="the server ended it"):
        forward(lane, 0, t)
    lane.close()
    sums.gate.set()


def test_a_session_that_ends_leaves_nothing(server, gpu):
    for _ in range(5):
        lane = enter(server)
        t, _ = inputs(2)
        forward(lane, 0, t)
        pool = lane._pool
        lane.close()
        lane.close()
        assert pool.closed == 1
        with pytest.raises(UnavailableError, match="closed"):
            forward(lane, 0, t)
    until = time.monotonic() + 5
    while server.sessions or server.engine.sessions.pools:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert (HostPool.made.closed, gpu.registered) == (1, 0)


def test_sessions_are_bounded_and_a_reason_is_given(server):
    lanes = [enter(server) for _ in range(2)]
    assert "2 sessions from GPUs" in server.gpu.offer("caller", host_id())[2]
    assert server.offer("caller", host_id())[2] == "", "which keeps nobody from shared memory"
    assert "host" in server.gpu.offer("caller", "another")[2]
    server.engine.sessions.pool_refusal = lambda: "the GPU has none"
    assert server.gpu == "the GPU has none"
    for lane in lanes:
        lane.close()


def test_memory_that_cannot_be_had_ends_the_session_with_a_reason(server, monkeypatch):
    def fails(*arguments):
        raise PoolError("the GPUs cannot reach each other")

    monkeypatch.setattr(HostPool, "receive", fails)
    with pytest.raises(UnavailableError, match="cannot reach each other"):
        enter(server)
    monkeypatch.undo()


class Inline:
    """A transport whose server answers offers alone."""

    target = "door"
    channels = ()

    def __init__(self, doors):
        self.doors, self.closes = doors, 0

    def connect(self, deliver, closed):
        self.deliver = deliver
        return self

    def offer(self, offer):
        if self.doors is not None:
            self.deliver(answer_offer(self.doors, offer, "caller"))

    def close(self):
        self.closes += 1


def test_a_client_asks_for_a_session_and_is_told_why_not(server):
    transport = Inline({"shm": server, "cuda_ipc": server.gpu})
    with ExpertClient(transport) as client:
        with client.device_session(0) as lane:
            t, want = inputs(3)
            assert torch.allclose(forward(lane, 0, t).float(), want, rtol=1e-2)
        transport.doors = {"cuda_ipc": "the server computes on a CPU"}
        with pytest.raises(UnavailableError, match="cuda_ipc: the server computes on a CPU"):
            client.device_session(0)
        transport.doors = {}
        with pytest.raises(UnavailableError, match="does not know it"):
            client.device_session(0)
        transport.doors = None
        with pytest.raises(DeadlineExceededError, match="door"):
            client.device_session(0, timeout_s=0.05)
        assert transport.closes == 4


class InlineInLoop(Inline):
    async def wait_closed(self):
        pass


def test_a_client_in_an_event_loop_asks_likewise(server, gpu, monkeypatch):
    transport = InlineInLoop({"shm": server, "cuda_ipc": server.gpu})

    async def ask():
        async with AsyncExpertClient(transport) as client:
            with await client.device_session(0) as lane:
                t, want = inputs(3)
                assert torch.allclose(forward(lane, 0, t).float(), want, rtol=1e-2)
            transport.doors = {"cuda_ipc": "the server computes on a CPU"}
            with pytest.raises(UnavailableError, match="cuda_ipc: the server computes on a CPU"):
                await client.device_session(0)
            transport.doors = None
            with pytest.raises(DeadlineExceededError, match="door"):
                await client.device_session(0, timeout_s=0.05)
            transport.doors = {"cuda_ipc": server.gpu}
            opened, leave, left = threading.Event(), threading.Event(), []
            true = cuda_ipc.open_session

            def slow(*args, **more):
                opened.set()
                assert leave.wait(20)
                left.append(true(*args, **more))
                return left[0]

            monkeypatch.setattr(cuda_ipc, "open_session", slow)
            asking = asyncio.create_task(client.device_session(0))
            await asyncio.to_thread(opened.wait, 20)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        return leave, left

    leave, left = asyncio.run(asyncio.wait_for(ask(), 40))
    assert transport.closes == 4 + 1, "of each connection that asked, and of the transport"
    leave.set()
    for _ in range(2000):
        if left and left[0]._closed and not gpu.registered:
            break
        time.sleep(0.005)
    assert left[0]._closed
    assert gpu.registered == 0, "who left in between left nothing"


def test_the_servers_own_gpu_is_refused_unless_it_is_wanted(server, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: HostPool.uuid)
    with ExpertClient(Inline({"cuda_ipc": server.gpu})) as client:
        with pytest.raises(UnavailableError, match="300 us"):
            client.device_session(0)
        client.device_session(0, same_gpu=True).close()


def test_kernels_that_cannot_be_loaded_end_the_session_with_a_reason(server, gpu, monkeypatch):
    monkeypatch.setattr(SoftwareGpu, "cuModuleLoadData", lambda *arguments: 218, raising=False)
    monkeypatch.setattr(SoftwareGpu, "cuGetErrorName", lambda *arguments: 0, raising=False)
    with pytest.raises(UnavailableError, match="cuModuleLoadData: 218"):
        enter(server)
    assert gpu.registered == 0


def test_a_server_on_a_cpu_and_one_without_a_driver_say_so(monkeypatch):
    engine = NativeEngine(torch.device("cpu"), policy=Policy(max_tokens=64))
    assert "CPU" in engine.sessions.pool_refusal()
    with pytest.raises(PoolError, match="CPU"):
        engine.sessions.pool(1)
    cuda_module.cuda.cache_clear()
    monkeypatch.setattr(C, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such file")))
    assert "driver cannot be used" in cuda_module.device_refusal(0)
    cuda_module.cuda.cache_clear()


# ---- torch modules (expertd_client.device_way) -----------------------------------------------------------------------


def described(held=E, max_tokens=64):
    layers = [pb.Layer(layer=n, num_experts=E, held=[pb.ExpertRange(first=0, count=held)]) for n in range(2)]
    return pb.DescribeResponse(layers=layers, limits=pb.Limits(max_tokens=max_tokens))


class Far(Forwarder):
    """Everything but a session is counted."""

    def __init__(self, way):
        self.way, self.requests = way, 0

    def device_way(self, device):
        return self.way

    def forward_request(self, request, *, timeout_s=None):
        self.requests += 1
        factor = ((request.topk_ids + 1) * request.topk_weights).sum(1, keepdim=True)
        out = (request.hidden_states.float() * factor).to(request.hidden_states.dtype)
        return ForwardResult(out, None, int((request.topk_ids >= 0).sum()), pb.Timing(), pb.Load(), 0)

    def submit_request(self, request, *, timeout_s=None):
        raise AssertionError("one request is enough")

    def close(self):
        pass


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors count as lying on GPU 0."""
    monkeypatch.setattr(torch_experts, "_gpu_of", lambda x: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM)


def remote(open_session, **facts):
    way = DeviceWay(open_session, lambda: described(**facts))
    far = Far(way)
    return torch_experts.RemoteExperts(far, 1).eval(), far, way


def test_a_module_on_a_gpu_sends_from_there(server, on_gpu):
    experts, far, way = remote(lambda: enter(server))
    for seed in range(3):
        t, want = inputs(5, seed=seed)
        assert torch.allclose(experts(*t).float(), want, rtol=1e-2)
    x, ids, w = inputs(6, x=torch.float32)[0]
    out = experts(x.double().view(2, 3, H), ids.short().view(2, 3, 2), w.double().view(2, 3, 2))
    assert (out.dtype, out.shape, far.requests, way.reason) == (torch.float64, (2, 3, H), 0, "")
    assert torch.allclose(out.view(6, H).float(), inputs(6, x=torch.float32)[1], rtol=1e-2)
    way.close()


def test_a_batch_beyond_the_limit_goes_in_pieces(server, on_gpu):
    experts, far, way = remote(lambda: enter(server), max_tokens=7)
    t, want = inputs(30)
    assert torch.allclose(experts(*t).float(), want, rtol=1e-2)
    assert far.requests == 0
    assert {key[1] for key in way._session._prepared} == {7, 2}
    way.close()


def test_layers_of_which_the_server_lacks_experts_travel_as_others_do(server, on_gpu):
    experts, far, way = remote(lambda: enter(server), held=E - 1)
    x, ids, w = inputs(5)[0]
    assert torch.allclose(experts(x, ids.abs(), w).float(), x.float() * ((ids.abs() + 1) * w).sum(1, keepdim=True))
    assert far.requests == 1
    way.close()


def test_where_no_session_can_be_had_nothing_is_lost_and_it_is_not_asked_each_time(on_gpu):
    asked = []

    def none():
        asked.append(1)
        raise UnavailableError("cuda_ipc: the server computes on a CPU")

    experts, far, way = remote(none)
    x, ids, w = inputs(5)[0]
    for _ in range(3):
        experts(x, ids.abs(), w)
    assert (far.requests, len(asked)) == (3, 1)
    assert "on a CPU" in way.reason


def test_a_session_that_broke_is_opened_again(server, on_gpu, monkeypatch):
    experts, far, way = remote(lambda: enter(server))
    x, ids, w = inputs(5)[0]
    experts(x, ids.abs(), w)
    monkeypatch.setattr(way._session, "_lost", True)
    experts(x, ids.abs(), w)
    assert (far.requests, "ended" in way.reason) == (1, True)
    way._not_before_s = 0.0
    experts(x, ids.abs(), w)
    assert (far.requests, way.reason) == (1, "")
    way.close()
    experts(x, ids.abs(), w)
    assert (far.requests, way.reason) == (2, "closed")
