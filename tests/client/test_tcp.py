"""ExpertClient over TCP: against the real door and engine, and against a server in Python that answers what no server
should.  The gRPC in between is a function."""

import asyncio
import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest
import torch
from tcp_kit import HEAD, MAGIC

from expertd.errors import (
    BadResponseError,
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    UnavailableError,
)
from expertd.tcp.entry import ENTRY_BYTES, parse_endpoint, read_exactly, welcome
from expertd.tcp.library import LibraryMissingError
from expertd.tcp.library import library as client_library
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import (
    ForwardRequestView,
    ForwardResponseView,
    TensorView,
    decode_stream_request,
    encode_stream_response,
)
from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.e4m3 import quantize
from expertd_client.tcp import AioTcpChannel, TcpChannel
from expertd_server.config import Address
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.peers import PeerBounds
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.tcp import TcpDoor

try:
    library()
    client_library()
    MISSING = ""
except (CoreMissingError, LibraryMissingError) as e:
    MISSING = str(e)

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

H, E = 32, 4
WHERE = "127.0.0.1:1"


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

    def __init__(self, offered, deliver, closed):
        self.offered, self.deliver, self.closed, self.asked = offered, deliver, closed, 0

    def offer(self, offer):
        token, endpoint, why = self.offered("me", "")
        verdicts = [pb.TransportVerdict(transport="tcp", accepted=not why, reason=why)]
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
    target = WHERE

    def __init__(self, offered, channel=TcpChannel):
        self.offered, self.channels = offered, [channel(WHERE)]

    def connect(self, deliver, closed):
        self.inline = Inline(self.offered, deliver, closed)
        return self.inline

    def close(self):
        pass

    async def wait_closed(self):
        pass


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def engine(sums):
    engine = NativeEngine(torch.device("cpu"), compute_dtype="bf16", policy=Policy(max_tokens=4096))
    engine.hold([ServedLayer(0, E, tuple(range(E)), 2, H, 8, sums, "sums")])
    engine.start()
    engine.open()
    yield engine
    sums.gate.set()
    engine.stop(10)


@pytest.fixture
def door(engine):
    door = TcpDoor(engine, Address("127.0.0.1", 0), PeerBounds(8 << 20))
    door.start()
    yield door
    door.close()


@pytest.fixture
def client(door):
    c = ExpertClient(Transport(door.offer))
    assert c.session().transport == "tcp"
    yield c
    c.close()


def inputs(M, kind="numpy", dtype=np.float32, seed=0):
    g = np.random.default_rng(seed)
    x = g.integers(-8, 8, (M, H)).astype(dtype)
    ids, w = g.integers(-1, E, (M, 2)).astype(np.int32), (g.integers(0, 8, (M, 2)) / 8).astype(np.float32)
    factor = np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
    want = x.astype(np.float32) * factor
    return (x, ids, w) if kind == "numpy" else tuple(map(torch.from_numpy, (x, ids, w))), want


def until(true, within_s=10.0):
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def way(client):
    return client._exchange._link._beside


def test_answers_are_right_in_numpy_and_torch(client):
    for seed in range(40):
        kind = "numpy" if seed % 2 else "torch"
        args, want = inputs(1 + seed % 9, kind, seed=seed)
        answer = client.forward(0, *args)
        assert np.allclose(np.asarray(answer.output), want, rtol=1e-2)
        assert answer.routes_computed == int((np.asarray(args[1]) >= 0).sum())
        assert answer.timing.batch_requests == 1
        assert answer.timing.kernel_ns > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("output", ["f32", "bf16", "f16"])
def test_every_dtype_comes_and_goes(client, dtype, output):
    (x, ids, w), want = inputs(5, "torch")
    answer = client.forward(0, x.to(dtype), ids.long(), w.to(dtype), output_dtype=output)
    assert answer.output.dtype == {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[output]
    assert np.allclose(answer.output.float().numpy(), want, rtol=1e-2)


def test_hidden_states_as_e4m3_with_scales(client):
    (x, ids, w), want = inputs(9)
    answer = client.forward(0, quantize(x), ids, w, output_dtype="f32")
    assert np.allclose(answer.output, want, rtol=0.07, atol=0.01)
    assert client._transport.inline.asked == 0


@pytest.mark.parametrize("tokens", [1, 700, 4096])
def test_large_messages_and_small_ones(client, tokens):
    """What the socket does not take at once, waited for and submitted."""
    args, want = inputs(tokens)
    for _ in range(3):
        futures = [client.submit(0, *args) for _ in range(4)]
        assert np.allclose(client.forward(0, *args).output, want, rtol=1e-2)
        for f in futures:
            assert np.allclose(f.result(20).output, want, rtol=1e-2)


def test_an_output_is_the_callers_to_write_to_and_goes_back_with_its_last_view(client):
    args, want = inputs(8)
    kept = []
    for _ in range(5):
        answer = client.forward(0, *args)
        answer.output += 1
        kept.append(answer.output[2:4])
        del answer
    assert all(np.allclose(rows, want[2:4] + 1, rtol=1e-2) for rows in kept)
    assert way(client)._client.blocks == 5
    del kept
    assert way(client)._client.blocks == 0


def test_an_output_outlives_its_session(client):
    args, want = inputs(8)
    answer = client.forward(0, *args)
    client.close()
    assert np.allclose(answer.output, want, rtol=1e-2)


def test_waiting_callers_and_futures_share_the_socket(client, sums):
    wrong = []

    def waits(seed):
        args, want = inputs(2, seed=seed)
        wrong.extend(n for n in range(60) if not np.allclose(client.forward(0, *args).output, want, rtol=1e-2))

    def submits(seed):
        args, want = inputs(400 * (seed % 2) + 2, seed=seed)
        for n in range(20):
            futures = [client.submit(0, *args) for _ in range(3)]
            wrong.extend(n for f in futures if not np.allclose(f.result(20).output, want, rtol=1e-2))

    threads = [threading.Thread(target=f, args=(i,)) for i, f in enumerate((waits, submits) * 3)]
    for t in threads:
        t.start()
    time.sleep(0.02)
    sums.gate.clear()  # everybody sleeps
    time.sleep(0.1)
    sums.gate.set()
    for t in threads:
        t.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_an_error_of_the_server_is_the_same_row_as_inline(client, engine):
    (x, ids, w), _ = inputs(3)
    ids[1, 0] = 99
    with pytest.raises(ExpertIdOutOfRangeError, match=r"topk_ids\[1, 0\].*got 99"):
        client.forward(0, x, ids, w)
    ids[1, 0] = -1
    with pytest.raises(LayerNotHeldError, match="layer: got 5"):
        client.submit(5, x, ids, w).result(10)
    engine.drain()
    with pytest.raises(DrainingError):
        client.forward(0, x, ids, w)


def test_what_does_not_fit_travels_inline(client, engine):
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *inputs(2)[0], digest=True)
    x, ids, w = np.ones((70_000, H), np.float32), np.zeros((70_000, 2), np.int32), np.ones((70_000, 2), np.float32)
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, x, ids, w)  # larger than the server's messages
    assert client._transport.inline.asked == 2


def test_a_deadline_ends_a_request_and_its_place_comes_back_when_the_server_has_answered(client, sums):
    sums.gate.clear()
    with pytest.raises(DeadlineExceededError):
        client.forward(0, *inputs(2)[0], timeout_s=0.05)
    future = client.submit(0, *inputs(2)[0])
    assert future.cancel()
    sums.gate.set()
    client.forward(0, *inputs(1)[0])
    until(lambda: way(client)._client.blocks == 0)


def test_a_server_that_goes_fails_what_is_in_flight_and_what_comes_later_travels_inline(client, sums, door):
    sums.gate.clear()
    failed = []

    def waits():
        with pytest.raises(UnavailableError, match="ended the session"):
            client.forward(0, *inputs(2)[0])
        failed.append(1)

    waiter = threading.Thread(target=waits)
    waiter.start()
    future = client.submit(0, *inputs(2)[0])
    time.sleep(0.05)
    door.close()
    with pytest.raises(UnavailableError, match="ended the session"):
        future.result(10)
    waiter.join(10)
    assert failed
    sums.gate.set()
    until(lambda: client.session().transport == "inline")
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *inputs(2)[0])
    assert "broke" in client.session().refused["tcp"]


def test_an_idle_session_sees_its_end(client, door):
    client.forward(0, *inputs(2)[0])
    door.close()
    until(lambda: client.session().transport == "inline")


def test_sessions_leave_no_descriptors(client, door):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        c = ExpertClient(Transport(door.offer))
        assert c.session().transport == "tcp"
        c.forward(0, *inputs(2)[0])
        c.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_loop_has_its_own_way(door):
    async with AsyncExpertClient(Transport(door.offer, AioTcpChannel)) as c:
        assert (await c.session()).transport == "tcp"
        for seed, most in enumerate((8, 8, 2000)):
            calls = [inputs(1 + n * most // 8, seed=seed) for n in range(8)]
            answers = await asyncio.gather(*(c.forward(0, *args) for args, _ in calls))
            for answer, (_, want) in zip(answers, calls, strict=True):
                assert np.allclose(answer.output, want, rtol=1e-2)
        with pytest.raises(ExpertIdOutOfRangeError):
            await c.forward(0, inputs(1)[0][0], np.array([[99, 0]], np.int32), np.ones((1, 2), np.float32))
        await asyncio.to_thread(door.close)
        for _ in range(500):
            if (await c.session()).transport == "inline":
                break
            await asyncio.sleep(0.01)
        assert "broke" in (await c.session()).refused["tcp"]


# ---- a server that cannot be entered ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("unix-abstract:x", "another kind"),
        ("tcp://127.0.0.1:0", "another kind"),
        ("tcp://a b:1", "Name|name|tcp"),
        ("tcp://127.0.0.1:9", "refused"),
    ],
)
def test_what_cannot_be_entered_leaves_the_session_inline_and_says_why(endpoint, why):
    with ExpertClient(Transport(lambda caller, host: ("0" * 64, endpoint, ""))) as client:
        session = client.session()
        assert session.transport == "inline"
        assert session.refused["tcp"].startswith("tcp: ")
        assert any(word in session.refused["tcp"] for word in why.split("|"))


# ---- a server in Python ----------------------------------------------------------------------------------------------


class Server:
    """One session at a time, served by `answer(self, sock, request)`."""

    def __init__(self, serve):
        self.serve, self.faults = serve, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def offer(self, caller, host):
        return "ab" * 32, f"tcp://127.0.0.1:{self.listener.getsockname()[1]}", ""

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                with sock, contextlib.suppress(ConnectionError):
                    assert read_exactly(sock, ENTRY_BYTES, time.monotonic() + 10).endswith(b"ab" * 32)
                    welcome(sock, 1 << 20)
                    sock.settimeout(20)
                    self.serve(sock)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)


def requests(sock):
    """(sequence, request), until the end.  Cancels are passed over."""
    n = 0
    while len(head := read_exactly(sock, HEAD.size, time.monotonic() + 20)) == HEAD.size:
        magic, length, sequence, lead = HEAD.unpack(head)
        n += 1
        assert (magic, sequence) == (MAGIC, n)
        data = read_exactly(sock, length, time.monotonic() + 20)
        message = decode_stream_request(data)
        if isinstance(message, ForwardRequestView):
            assert data[lead : lead + 32] == bytes(message.hidden_states.raw[:32])
            yield n, message


def frame(data, sequence, magic=MAGIC, length=None, lead=0):
    return HEAD.pack(magic, len(data) if length is None else length, sequence, lead) + data


def twice(v):
    out = 2 * np.frombuffer(v.hidden_states.raw, np.float32)
    return ForwardResponseView(v.request_id, TensorView.of_raw(1, v.hidden_states.shape, out), routes_computed=3)


@pytest.fixture
def serving():
    servers, clients = [], []

    def make(serve):
        servers.append(Server(serve))
        clients.append(ExpertClient(Transport(servers[-1].offer)))
        assert clients[-1].session().transport == "tcp"
        return clients[-1]

    yield make
    for c in clients:
        c.close()
    for s in servers:
        s.close()


def test_python_reads_what_the_client_writes(serving):
    """Every field of a request and of an answer, against the codec in Python."""
    seen = []

    def serve(sock):
        for n, v in requests(sock):
            seen.append(v)
            answer = twice(v)
            answer.timing = pb.Timing(
                queue_ns=11, copy_in_ns=12, kernel_ns=13, copy_out_ns=14, batch_tokens=15, backend="cpu"
            )
            answer.load = pb.Load(queued_tokens=16, queued_requests=17, token_ns=18.5)
            sock.sendall(frame(encode_stream_response(answer), n))

    client = serving(serve)
    (x, ids, w), _ = inputs(3)
    answer = client.forward(4, x, ids, w.astype(np.float16), timeout_s=30)
    assert np.array_equal(answer.output, 2 * x)
    t, load = answer.timing, answer.load
    assert t.backend == "cpu"
    assert (t.queue_ns, t.copy_in_ns, t.kernel_ns, t.copy_out_ns, t.batch_tokens) == (11, 12, 13, 14, 15)
    assert (load.queued_tokens, load.queued_requests, load.token_ns) == (16, 17, 18.5)
    assert answer.routes_computed == 3
    v = seen[0]
    assert (v.layer, v.router_weight_on_input, v.output_dtype) == (4, False, pb.DATA_TYPE_F32)
    assert 25e6 < v.timeout_us <= 30e6
    for view, array, dtype in (
        (v.hidden_states, x, pb.DATA_TYPE_F32),
        (v.topk_ids, ids, pb.DATA_TYPE_I32),
        (v.topk_weights, w.astype(np.float16), pb.DATA_TYPE_F16),
    ):
        assert (view.dtype, view.shape, bytes(view.raw)) == (dtype, array.shape, array.tobytes())
    client.forward(4, x, ids[:, :1], w[:, :1], router_weight_on_input=True)
    assert seen[1].router_weight_on_input
    assert seen[1].timeout_us == 0


def test_answers_come_in_any_order_and_pieces(serving):
    def serve(sock):
        asked = []
        for _, v in requests(sock):
            asked.append(v)
            if len(asked) == 6:
                said = b"".join(frame(encode_stream_response(twice(v)), n + 1) for n, v in enumerate(reversed(asked)))
                for i in range(0, len(said), 97):
                    sock.sendall(said[i : i + 97])
                    time.sleep(0.0002)

    client = serving(serve)
    batches = [inputs(3, seed=n)[0] for n in range(6)]
    futures = [client.submit(0, *args) for args in batches]
    for f, (x, _, _) in zip(futures, batches, strict=True):
        assert np.array_equal(f.result(10).output, 2 * x)


def wrong_answers():
    def shape(v):
        out = np.zeros((5, H), np.float32)
        return encode_stream_response(ForwardResponseView(v.request_id, TensorView.of_raw(1, out.shape, out)))

    def dtype(v):
        out = np.zeros((3, 2 * H), np.float16)
        return encode_stream_response(ForwardResponseView(v.request_id, TensorView.of_raw(2, (3, H), out)))

    def nothing(v):
        return encode_stream_response(ForwardResponseView(v.request_id))

    return [shape, dtype, nothing]


@pytest.mark.parametrize("wrong", wrong_answers())
def test_an_answer_that_does_not_fit_is_an_error_of_its_request(serving, wrong):
    def serve(sock):
        for n, v in requests(sock):
            sock.sendall(frame(wrong(v) if n == 1 else encode_stream_response(twice(v)), n))

    client = serving(serve)
    (x, ids, w), _ = inputs(3)
    with pytest.raises(BadResponseError):
        client.forward(0, x, ids, w)
    assert np.array_equal(client.forward(0, x, ids, w).output, 2 * x)


def test_an_answer_that_nobody_asked_for_is_passed_over(serving):
    def serve(sock):
        n = 0
        for _, v in requests(sock):
            for number in (v.request_id + 256, 2**64 - 1, 0, v.request_id):
                stranger = twice(v)
                stranger.request_id = number
                n += 1
                sock.sendall(frame(encode_stream_response(stranger), n))

    client = serving(serve)
    for _ in range(3):
        (x, ids, w), _ = inputs(3)
        assert np.array_equal(client.forward(0, x, ids, w).output, 2 * x)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" * 4,
        frame(b"\x0a\x01", 1),
        frame(b"\xff" * 40, 1),
        frame(b"", 1),
        frame(b"\x0a\x00", 7),
        frame(b"\x0a\x00", 1, length=2**32 - 1),
        frame(encode_stream_response(pb.RequestError(code=3, reason="BAD_SHAPE", message="whose?")), 1),
        b"",
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_a_server_that_speaks_nonsense_ends_the_session_and_requests_travel_inline(serving, said, waits):
    def serve(sock):
        for _ in requests(sock):
            sock.sendall(said)
            return

    client = serving(serve)
    args, _ = inputs(3)
    with pytest.raises(UnavailableError, match="ended the session") as failed:
        client.forward(0, *args) if waits else client.submit(0, *args).result(10)
    assert failed.value.retryable
    until(lambda: client.session().transport == "inline")
    with pytest.raises(UnavailableError, match=r"^inline$"):
        client.forward(0, *args)


def test_a_server_that_reads_nothing_does_not_stop_the_client(serving):
    """Requests wait in bounded memory, then travel inline; those that wait have their time."""
    stop = threading.Event()
    client = serving(lambda sock: stop.wait(20))
    x, ids, w = inputs(4096)[0]
    with pytest.raises(DeadlineExceededError):
        client.forward(0, x, ids, w, timeout_s=0.2)
    for _ in range(400):
        begin = time.monotonic()
        with contextlib.suppress(UnavailableError):
            client.submit(0, x, ids, w, timeout_s=0.5)
        assert time.monotonic() - begin < 1
        if client._transport.inline.asked:
            break
    assert client._transport.inline.asked, "it takes requests without end"
    stop.set()


FRAMES = int(os.environ.get("EXPERTD_FUZZ_FRAMES", "4000"))


def test_garbled_answers_do_not_crash_the_client(serving):
    """Each ends in an answer, or in a clear error."""
    left = [FRAMES // 8]

    def serve(sock):
        for n, (_, v) in enumerate(requests(sock), 1):
            rng = np.random.default_rng(left[0])
            left[0] -= 1
            data = bytearray(encode_stream_response(twice(v)))
            for _ in range(int(rng.integers(1, 4))):
                data[int(rng.integers(0, min(60, len(data))))] = int(rng.integers(0, 256))
            sock.sendall(frame(bytes(data), n, lead=int(rng.integers(0, 1 << 32))))
            if left[0] % 7 == 0:  # as nobody may wait for what it became
                return

    client = serving(serve)
    args, _ = inputs(3)
    ends = 0
    while left[0] > 0:
        if client.session().transport == "inline":
            ends += 1
            client.close()
            client = serving(serve)
        with contextlib.suppress(ExpertdError):  # a reason may be garbled, too
            client.forward(0, *args, timeout_s=0.05)
    assert ends > 0


def test_endpoints():
    assert parse_endpoint("tls://[::1]:5") == (True, "::1", 5)
    assert parse_endpoint("tcp://:70") == (False, "", 70)
    assert str(parse_endpoint("tls://[fe80::1%eth0]:5")) == "tls://[fe80::1%eth0]:5"
    for bad in ("", "tcp://", "tcp://h", "tcp://h:70000", "tcp://h:1/x", "http://h:1", "tcp://h:0", "tcp://h:1\n"):
        with pytest.raises(Exception, match="another kind"):
            parse_endpoint(bad)
