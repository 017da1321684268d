"""ExpertClient over TCP against a server in Python, which answers what no server should.  The gRPC in between is a
function."""

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest
from connection_kit import H, Transport, inputs, missing
from tcp_kit import HEAD, MAGIC
from waiting import until

from expertd.codec import (
    ForwardRequestView,
    ForwardResponseView,
    TensorView,
    decode_stream_request,
    encode_stream_response,
)
from expertd.errors import (
    BadResponseError,
    DeadlineExceededError,
    ExpertdError,
    UnavailableError,
)
from expertd.tcp.entry import ENTRY_BYTES, EntryError, enter, parse_endpoint, read_exactly, token_of, welcome
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient
from expertd_client.transports.tcp import connection
from expertd_client.transports.tcp.connection import TcpDialer, TcpTransport

MISSING = missing()
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

WHERE = "127.0.0.1:1"


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
    with ExpertClient(Transport(lambda caller, host: ("0" * 64, endpoint, ""), TcpTransport(WHERE))) as client:
        session = client.session()
        assert session.transport == "inline"
        assert session.refused["tcp"].startswith("tcp: ")
        assert any(word in session.refused["tcp"] for word in why.split("|"))


@pytest.mark.parametrize(
    ("endpoint", "token", "allowed", "why"),
    [
        ("tcp://127.0.0.2:{port}", "0" * 64, "", "another host"),
        ("tcp://127.0.0.2:{port}", "0" * 64, "127.0.0.3", "another host"),
        ("tcp://127.0.0.1:{port}", "GET / HTTP/1.0", "", "another form"),
        ("tcp://127.0.0.1:{port}", "0" * 63 + " ", "", "another form"),
        ("tcp://127.0.0.1:{port}", "0" * 64, "", "entered"),
        ("tcp://localhost:{port}", "0" * 64, "", "entered"),
        ("tcp://127.0.0.2:{port}", "0" * 64, "10.0.0.1,127.0.0.2", "entered"),
        ("tcp://127.0.0.2:{port}", "0" * 64, "*", "entered"),
    ],
)
def test_a_server_directs_nobody_at_other_hosts(endpoint, token, allowed, why, monkeypatch):
    monkeypatch.setenv("EXPERTD_TCP_HOSTS", allowed)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        got = []

        def serve():
            with contextlib.suppress(OSError):
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(20)
                    got.append(accepted.recv(100))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        answer = pb.SessionAnswer(endpoint=endpoint.format(port=listener.getsockname()[1]), token=token)
        with pytest.raises(UnavailableError) as told:
            TcpDialer(WHERE, None).enter(answer)[0].close()
        if why == "entered":
            thread.join(20)
            assert got == [b"expdtcp1" + b"0" * 64]
        else:
            assert why in str(told.value)
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
            assert got in ([], [b""])


@pytest.mark.parametrize("said", [b"", b"e"])
def test_a_server_that_says_nothing_or_trickles_is_left(said, monkeypatch):
    """Each byte of a welcome comes in time, and the whole never does."""
    monkeypatch.setattr(connection, "_CONNECT_S", 0.3)
    stop, raised = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            accepted, _ = listener.accept()
            with accepted, contextlib.suppress(OSError):
                for byte in b"expdtcp1".ljust(1000, b"\0") if said else b"":
                    accepted.sendall(bytes([byte]))
                    if stop.wait(0.1):
                        break
                stop.wait(20)

        def enters():
            try:
                TcpDialer(WHERE, None).enter(answer)
            except UnavailableError as e:
                raised.append(str(e))

        answer = pb.SessionAnswer(endpoint=f"tcp://127.0.0.1:{listener.getsockname()[1]}", token="0" * 64)
        threads = [threading.Thread(target=target, daemon=True) for target in (serve, enters)]
        for thread in threads:
            thread.start()
        threads[1].join(20)
        stop.set()
        threads[0].join(20)
    assert raised == ["tcp: the server refused the session"]


@pytest.mark.parametrize("digits", [" " * 64, "0" * 62 + "  ", " 0" * 32, "0" * 63 + "\n", "A" * 64, "g" * 64])
def test_a_token_is_64_digits_and_nothing_else(digits):
    """bytes.fromhex() takes spaces: 64 of them were an empty token."""
    assert token_of(b"expdtcp1" + digits.encode()) is None
    assert token_of(b"expdtcp1" + b"0a" * 32) == b"\x0a" * 32


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"expdtcp2" + bytes(8), "speaks another protocol"),
        (b"HTTP/1.1 400 Bad", "speaks another protocol"),
        (b"expdtcp1" + bytes(7), "refused the session"),
        (b"", "refused the session"),
    ],
)
def test_a_welcome_is_of_this_protocol(said, why):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EntryError, match=why):
            enter(ours, "ab" * 32, 20)


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
                    entry = read_exactly(sock, ENTRY_BYTES, time.monotonic() + 10)
                    if entry.startswith(b"PRI * HTTP/2"):
                        continue  # gRPC of another test, whose server had this port before
                    assert entry.endswith(b"ab" * 32)
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
        clients.append(ExpertClient(Transport(servers[-1].offer, TcpTransport(WHERE))))
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
                queue_ns=11, copy_in_ns=12, kernel_ns=13, copy_out_ns=14, batch_tokens=15, backend="cpu", decode_ns=10
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
    assert t.decode_ns == 10
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
        assert time.monotonic() - begin < 10
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
