"""Sessions between GPUs of one host: words and copies on a stream."""

import asyncio
import ctypes as C
import threading
import time

import pytest
import torch
from connection_kit import E, H
from software_gpu import MISSING, HostPool, SoftwareGpu, enter, forward, inputs
from waiting import until

from expertd.errors import (
    BadDtypeError,
    BadShapeError,
    DeadlineExceededError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    UnavailableError,
)
from expertd.shm import cuda as cuda_module
from expertd.shm.pool import PoolError
from expertd.shm.region import host_id
from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.device import cuda_ipc
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.service.offers import answer_offer

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]


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
    with pytest.raises(BadShapeError, match=r"got \[3, 16\], want \[M, 32\]"):
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
    lane._copies.call(7, call.call)
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
    until(lambda: not server.sessions and not server.engine.shm_connections.pools)
    assert (HostPool.made.closed, gpu.registered) == (1, 0)


def test_sessions_are_bounded_and_a_reason_is_given(server):
    lanes = [enter(server)]
    assert "1 of the server's 2 sessions, its share" in server.gpu.offer("caller", host_id())[2]
    lanes.append(enter(server, "another"))
    assert "2 sessions from GPUs" in server.gpu.offer("a third", host_id())[2]
    assert server.offer("caller", host_id())[2] == "", "which keeps nobody from shared memory"
    assert "host" in server.gpu.offer("caller", "another")[2]
    server.engine.shm_connections.pool_refusal = lambda: "the GPU has none"
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
    offers = ()

    def __init__(self, offered):
        self.offered, self.closes = offered, 0

    def connect(self, deliver, closed):
        self.deliver = deliver
        return self

    def offer(self, offer):
        if self.offered is not None:
            self.deliver(answer_offer(self.offered, offer, "caller"))

    def close(self):
        self.closes += 1


def test_a_client_asks_for_a_session_and_is_told_why_not(server):
    transport = Inline({"shm": server, "cuda_ipc": server.gpu})
    with ExpertClient(transport) as client:
        with client.device_session(0) as lane:
            t, want = inputs(3)
            assert torch.allclose(forward(lane, 0, t).float(), want, rtol=1e-2)
        transport.offered = {"cuda_ipc": "the server computes on a CPU"}
        with pytest.raises(UnavailableError, match="cuda_ipc: the server computes on a CPU"):
            client.device_session(0)
        transport.offered = {}
        with pytest.raises(UnavailableError, match="does not know it"):
            client.device_session(0)
        transport.offered = None
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
            transport.offered = {"cuda_ipc": "the server computes on a CPU"}
            with pytest.raises(UnavailableError, match="cuda_ipc: the server computes on a CPU"):
                await client.device_session(0)
            transport.offered = None
            with pytest.raises(DeadlineExceededError, match="door"):
                await client.device_session(0, timeout_s=0.05)
            transport.offered = {"cuda_ipc": server.gpu}
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
        with pytest.raises(UnavailableError, match="milliseconds a call"):
            client.device_session(0)

        def opened():
            try:
                client.device_session(0, same_gpu=True).close()
            except UnavailableError as e:
                if "its share" in str(e):  # the end of the refused one has not reached the server yet
                    return False
                raise
            return True

        until(opened)


def test_kernels_that_cannot_be_loaded_end_the_session_with_a_reason(server, gpu, monkeypatch):
    monkeypatch.setattr(SoftwareGpu, "cuModuleLoadData", lambda *arguments: 218, raising=False)
    monkeypatch.setattr(SoftwareGpu, "cuGetErrorName", lambda *arguments: 0, raising=False)
    with pytest.raises(UnavailableError, match="cuModuleLoadData: 218"):
        enter(server)
    assert gpu.registered == 0


def test_a_server_on_a_cpu_and_one_without_a_driver_say_so(monkeypatch):
    engine = Engine(torch.device("cpu"), policy=Policy(max_tokens=64))
    assert "CPU" in engine.shm_connections.pool_refusal()
    with pytest.raises(PoolError, match="CPU"):
        engine.shm_connections.pool(1)
    cuda_module.cuda.cache_clear()
    monkeypatch.setattr(C, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such file")))
    assert "driver cannot be used" in cuda_module.device_refusal(0)
    cuda_module.cuda.cache_clear()
