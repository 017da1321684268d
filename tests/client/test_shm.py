"""ExpertClient over shared memory, against the real door and engine; the gRPC in between is a function."""

import threading
import time

import numpy as np
import pytest
import torch

from expertd.errors import DeadlineExceededError, ExpertIdOutOfRangeError, UnavailableError
from expertd.shm.library import LibraryMissingError
from expertd.shm.library import library as client_library
from expertd.shm.region import host_id, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient
from expertd_client.shm import ShmChannel
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.shm import ShmDoor

try:
    library()
    client_library()
    MISSING = supported()
except (CoreMissingError, LibraryMissingError) as e:
    MISSING = str(e)

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

H, E = 32, 4


class Sums:
    """out = x * the sum of weights * (slot + 1)"""

    backend = "sums"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        assert self.gate.wait(20)
        factor = torch.where(topk_ids >= 0, (topk_ids + 1) * topk_weights, 0.0).sum(1, keepdim=True)
        return out.copy_(hidden_states.float() * factor)


class Inline:
    """Only answers the offer, with what the door says."""

    def __init__(self, door, deliver, closed):
        self.door, self.deliver, self.closed, self.asked = door, deliver, closed, 0

    def offer(self, offer):
        token, endpoint, why = self.door.offer("me", host_id())
        verdicts = [pb.TransportVerdict(transport="shm", accepted=not why, reason=why)]
        self.deliver(pb.SessionAnswer(verdicts=verdicts, token=token, endpoint=endpoint))

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        self.asked += 1
        raise UnavailableError("inline")

    def cancel(self, request_id):
        pass

    def close(self):
        self.closed(UnavailableError("closed"))


class Transport:
    target = "door"

    def __init__(self, door):
        self.door, self.channels = door, [ShmChannel()]

    def connect(self, deliver, closed):
        self.inline = Inline(self.door, deliver, closed)
        return self.inline

    def close(self):
        pass


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def client(sums):
    engine = NativeEngine(torch.device("cpu"), compute_dtype="bf16", policy=Policy(max_tokens=64))
    engine.hold([ServedLayer(0, E, tuple(range(E)), 2, H, 8, sums, "sums")])
    engine.start()
    engine.open()
    door = ShmDoor(engine, arena_bytes=1 << 18)
    door.start()
    c = ExpertClient(Transport(door))
    c.door, c.engine = door, engine
    assert c.session().transport == "shm"
    yield c
    sums.gate.set()
    c.close()
    door.close()
    engine.stop(10)


def inputs(M, kind="numpy", dtype=np.float32, seed=0):
    g = np.random.default_rng(seed)
    x = g.integers(-8, 8, (M, H)).astype(dtype)
    ids, w = g.integers(-1, E, (M, 2)).astype(np.int32), (g.integers(0, 8, (M, 2)) / 8).astype(np.float32)
    factor = np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
    want = x.astype(np.float32) * factor
    return (x, ids, w) if kind == "numpy" else tuple(map(torch.from_numpy, (x, ids, w))), want


def test_answers_are_right_in_numpy_and_torch(client):
    for seed in range(40):
        kind = "numpy" if seed % 2 else "torch"
        args, want = inputs(1 + seed % 9, kind, seed=seed)
        answer = client.forward(0, *args)
        assert np.allclose(np.asarray(answer.output), want, rtol=1e-2)
        assert answer.routes_computed == int((np.asarray(args[1]) >= 0).sum())
        assert answer.timing.batch_requests == 1


def test_an_output_is_the_callers_to_write_to_and_goes_back_with_its_last_view(client):
    args, want = inputs(8)
    kept = []
    for _ in range(5):
        answer = client.forward(0, *args)
        answer.output += 1
        kept.append(answer.output[2:4])
        del answer
    assert all(np.allclose(rows, want[2:4] + 1, rtol=1e-2) for rows in kept)
    way = client._exchange._link._beside
    assert way._client.blocks == 5
    del kept
    assert way._client.blocks == 0


def test_many_threads_share_a_session(client):
    wrong = []

    def caller(seed):
        args, want = inputs(3, seed=seed)
        wrong.extend(n for n in range(50) if not np.allclose(client.forward(0, *args).output, want, rtol=1e-2))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_an_error_of_the_server_is_the_same_row_as_inline(client):
    (x, ids, w), _ = inputs(3)
    ids[1, 0] = 99
    with pytest.raises(ExpertIdOutOfRangeError, match=r"topk_ids\[1, 0\].*got 99"):
        client.forward(0, x, ids, w)


def test_what_does_not_fit_travels_inline(client):
    with pytest.raises(UnavailableError, match="inline"):
        client.forward(0, *inputs(2)[0], digest=True)
    assert client._transport.inline.asked == 1


def test_a_deadline_ends_a_request_and_its_memory_comes_back_when_the_server_is_done(client, sums):
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        client.forward(0, *inputs(2)[0], timeout_s=0.05)
    way = client._exchange._link._beside
    assert way._client.blocks == 1, "the server may still write there"
    sums.gate.set()
    client.forward(0, *inputs(1)[0])
    until = time.monotonic() + 5
    while way._client.blocks and time.monotonic() < until:
        time.sleep(0.01)
    assert way._client.blocks == 0


def test_a_server_that_goes_fails_what_is_in_flight_and_what_comes_later_travels_inline(client, sums):
    sums.gate.clear()
    future = client.submit(0, *inputs(2)[0])
    time.sleep(0.05)
    client.door.close()
    with pytest.raises(UnavailableError, match="ended the session"):
        future.result(10)
    sums.gate.set()
    with pytest.raises(UnavailableError, match="inline"):
        client.forward(0, *inputs(2)[0])
    assert client.session().transport == "inline"


def test_sessions_leave_no_descriptors(client):
    import os

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        c = ExpertClient(Transport(client.door))
        assert c.session().transport == "shm"
        c.forward(0, *inputs(2)[0])
        c.close()
    until = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before
