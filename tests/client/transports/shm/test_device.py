"""Tensors on a GPU over shared memory, on a GPU of a few lines of Python: its memory is the host's, and it copies at
once but tells of it when the test says so."""

import threading

import numpy as np
import pytest
import torch
from connection_kit import E, H, Sums, Transport, inputs, missing, summing_engine, way
from waiting import until

from expertd.errors import ExpertIdOutOfRangeError, UnavailableError
from expertd_client import ExpertClient
from expertd_client.requests.e4m3 import quantize
from expertd_client.transports.shm import connection as shm
from expertd_client.transports.shm import device as shm_device
from expertd_client.transports.shm.connection import ShmTransport
from expertd_server.transports.shm import ShmListener

MISSING = missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

ARENA = 1 << 18


class Gpu:
    """What torch.cuda is asked for.  done: the device has copied what it was told to."""

    def __init__(self):
        self.done, self.refuses = threading.Event(), 0
        self.registered, self.waits = {}, 0
        self.done.set()

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - the runtime's name
        assert flags == 1
        if not self.refuses:
            self.registered[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address):  # noqa: N802 - the runtime's name
        del self.registered[address]
        return 0

    def current_stream(self, device):
        assert device == torch.device("cpu")
        return self

    def synchronize(self):
        self.waits += 1

    def event(self):
        return Event(self.done)


class Event:
    def __init__(self, done):
        self.query, self.synchronize = done.is_set, lambda: done.wait(20)

    def record(self, stream):
        assert isinstance(stream, Gpu)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(shm, "on_gpu", lambda request: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


@pytest.fixture
def client(gpu):
    engine = summing_engine(Sums(), max_tokens=1024)
    engine.start()
    engine.open()
    listener = ShmListener(engine, arena_bytes=ARENA)
    listener.start()
    with ExpertClient(Transport(listener.offer, ShmTransport())) as c:
        c.listener = listener
        assert c.session().transport == "shm"
        yield c
        gpu.done.set()
    listener.close()
    engine.stop(10)


def blocks(client):
    return way(client)._client.blocks


def test_answers_are_right_in_every_dtype_and_from_rows_that_are_apart(client, gpu):
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 4):
        (x, ids, w), want = inputs(1 + seed, "torch", seed=seed)
        apart = torch.zeros(1 + seed, 2 * H, dtype=dtype)[:, ::2].copy_(x)
        answer = client.forward(0, apart, ids.long() if seed % 2 else ids, w.to(dtype), output_dtype="f32")
        assert answer.output.dtype == torch.float32
        assert np.allclose(answer.output.numpy(), want, rtol=1e-2)
        assert answer.routes_computed == int((ids >= 0).sum())
        assert answer.timing.backend == "sums"
    assert gpu.waits == 12, "one wait of the host for each request"
    assert list(gpu.registered.values()) == [ARENA]
    assert client._transport.inline.asked == 0


def test_e4m3_goes_as_it_is(client):
    (x, ids, w), want = inputs(9, "torch")
    answer = client.forward(0, quantize(x), ids, w, output_dtype="f32")
    assert np.allclose(answer.output.numpy(), want, rtol=0.07, atol=0.01)


def test_an_output_is_the_callers_and_a_block_goes_back_when_the_device_has_read_it(client, gpu):
    args, want = inputs(8, "torch")
    gpu.done.clear()
    outputs = [client.forward(0, *args).output for _ in range(4)]
    assert blocks(client) == 4
    gpu.done.set()
    outputs.append(client.forward(0, *args).output)
    assert blocks(client) == 1, "the others, before room was taken for this one"
    assert all(np.allclose(out.numpy(), want, rtol=1e-2) for out in outputs)


def test_a_refusal_gives_its_block_back(client):
    (x, ids, w), _ = inputs(3, "torch")
    for _ in range(5):
        with pytest.raises(ExpertIdOutOfRangeError):
            client.forward(0, x, ids + E, w)
    assert blocks(client) == 0


def test_what_finds_no_room_travels_inline_and_comes_back(client, gpu):
    (x, ids, w), want = inputs(900, "torch")
    gpu.done.clear()
    client.forward(0, x, ids, w)
    with pytest.raises(UnavailableError, match="inline"):
        client.forward(0, x, ids, w)
    gpu.done.set()
    assert np.allclose(client.forward(0, x, ids, w).output.numpy(), want, rtol=1e-2)


def test_a_driver_that_refuses_leaves_the_way_over_the_host(client, gpu, caplog):
    gpu.refuses = 801
    for seed in range(3):
        args, want = inputs(5, "torch", seed=seed)
        assert np.allclose(client.forward(0, *args).output.numpy(), want, rtol=1e-2)
    assert gpu.waits == 0
    assert [r.message for r in caplog.records if "error 801" in r.message] == [
        "shared memory: tensors on a GPU are copied on the host, too: the driver did not register the session's memory:"
        " error 801"
    ]


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_session_that_ends_while_the_device_reads_waits_for_it_and_leaves_nothing(client, gpu, end):
    args, want = inputs(8, "torch")
    gpu.done.clear()
    output, connection = client.forward(0, *args).output, way(client)
    ends = threading.Thread(target=client.close if end == "client" else client.listener.close)
    ends.start()
    ends.join(0.1)
    assert gpu.registered
    gpu.done.set()
    ends.join(10)
    until(lambda: connection._users == 0)
    assert not gpu.registered
    assert np.allclose(output.numpy(), want, rtol=1e-2)


def test_hidden_states_on_the_host_are_not_its_business(monkeypatch):
    monkeypatch.undo()
    (x, ids, w), _ = inputs(2, "torch")
    from expertd_client.requests.request import Request

    assert not shm_device.on_gpu(Request(0, x, ids, w))
    assert not shm_device.on_gpu(Request(0, x.numpy(), ids.numpy(), w.numpy()))
