"""Sessions over TCP: who may enter, what a frame may hold (held against the way of a message in Python), and peers that
are hostile, slow or killed.  The peer here is a twin in Python; tests/client/test_tcp.py has the client in C++."""

import contextlib
import gc
import multiprocessing
import os
import signal
import struct
import threading
import time

import numpy as np
import pytest
import torch
from tcp_kit import ARRAYS, HEAD, NUMBERS, Twin, dial, request, tensor

from expertd.errors import TABLE
from expertd.tcp.entry import EntryError, enter
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardResponseView, ScalesView, TensorView, decode_stream_request, encode_stream_request
from expertd_server.config.values import Address
from expertd_server.engine.admission import Limits
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.peers import PeerBounds
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.service.service import Service
from expertd_server.transports import tcp as module
from expertd_server.transports import tickets
from expertd_server.transports.tcp import TcpDoor
from expertd_server.views.metrics import Metrics

try:
    library()
    MISSING = ""
except CoreMissingError as e:
    MISSING = str(e)

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]

H, E, K, M = 32, 4, 2, 16
BOUNDS = PeerBounds(64 << 10, 1 << 20, 8, half_s=0.4, unread_s=0.5)


class Doubles:
    """out = x * the weights' sum"""

    backend = "doubles"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def hold(self):
        """From now on a batch waits for the gate."""
        self.gate.clear()
        self.entered.clear()

    def until_held(self):
        assert self.entered.wait(20)

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        return out.copy_(hidden_states * topk_weights.sum(1, keepdim=True))


@pytest.fixture
def doubles():
    return Doubles()


@pytest.fixture
def engine(doubles):
    e = NativeEngine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=M))
    e.hold([ServedLayer(0, E, tuple(range(E)), K, H, 8, doubles, "doubles")])
    e.start()
    e.open()
    yield e
    doubles.gate.set()
    e.stop(10)


@pytest.fixture
def door(engine):
    d = TcpDoor(engine, Address("127.0.0.1", 0), BOUNDS, most_sessions=12)
    d.start()
    yield d
    d.close()


def batch(tokens=3, seed=0):
    g = np.random.default_rng(seed)
    x = g.integers(1, 9, (tokens, H)).astype(np.float32)
    return x, np.zeros((tokens, K), np.int32), np.full((tokens, K), 1.5, np.float32)


def call(peer, number=1, tokens=3, **more):
    """One request; its answer is checked."""
    x, ids, w = batch(tokens, number)
    peer.send(request(number, x, ids, w, **more))
    answer = peer.receive()
    assert isinstance(answer, ForwardResponseView), answer
    assert answer.request_id == number
    assert np.array_equal(np.frombuffer(answer.output.raw, np.float32).reshape(tokens, H), 3 * x)
    return answer


def until(condition, within_s=20.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def gone(door, sessions=0):
    until(lambda: door.sessions == sessions)


# ---- who may enter ---------------------------------------------------------------------------------------------------


def test_a_client_comes_calls_and_goes(door):
    with Twin(door) as peer:
        assert peer.most_bytes == BOUNDS.most_message
        for n in range(1, 20):
            answer = call(peer, n, 1 + n % M)
            assert answer.routes_computed == K * (1 + n % M)
            assert (answer.timing.backend, answer.timing.batch_requests) == ("doubles", 1)
            assert answer.timing.kernel_ns > 0
            assert not answer.load.draining
        assert door.sessions == 1
    gone(door)


@pytest.mark.parametrize("token", ["0" * 64, "z" * 64, "\x00" * 64, "f" * 64])
def test_a_token_that_is_not_valid_gets_nothing(door, token, caplog):
    good, endpoint, _ = door.offer("caller", "")
    with dial(endpoint) as sock, pytest.raises((EntryError, ConnectionError), match=r"refused|reset"):
        enter(sock, token, 10)
    assert door.sessions == 0
    assert good not in caplog.text
    assert token not in caplog.text
    with Twin(door) as peer:  # the next one is served
        call(peer)


def test_a_token_is_good_for_one_client_and_for_a_while(door, monkeypatch):
    token, endpoint, _ = door.offer("caller", "")
    with dial(endpoint) as first:
        enter(first, token, 10)
        with dial(endpoint) as second, pytest.raises((EntryError, ConnectionError)):
            enter(second, token, 10)
    late, *_ = door.offer("caller", "")
    monkeypatch.setattr(tickets.time, "monotonic", (lambda now: lambda: now() + 11)(time.monotonic))
    with dial(endpoint) as sock, pytest.raises((EntryError, ConnectionError)):
        enter(sock, late, 10)


def test_who_says_nothing_or_something_else_is_sent_away(door, monkeypatch):
    monkeypatch.setattr(module, "_ENTER_S", 0.2)
    _, endpoint, _ = door.offer("caller", "")
    strangers = [dial(endpoint) for _ in range(10)]
    for n, sock in enumerate(strangers):
        sock.sendall([b"", b"expdtcp1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(72, b"\n")][n % 3])
    with Twin(door) as peer:
        call(peer)
        for sock in strangers:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
            sock.close()
    gone(door)


def test_sessions_are_bounded_and_a_draining_door_offers_nothing(door):
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(Twin(door))
        assert "no room for more" in door.offer("caller", "")[2]
    gone(door)
    door.close()
    assert door.offer("caller", "")[2] == "the server drains"


# ---- what a frame may hold: as the way of a message in Python answers ------------------------------------------------


class Outlet:
    """Gets what a Session says."""

    def __init__(self):
        self.said = []

    def answer(self, request, answer):
        self.said.append(np.array(answer.output).tobytes())

    def send(self, message):
        self.said.append(message)

    def released(self, memory):
        pass


def in_python(engine, data):
    """What a Session makes of a message's bytes: the output's bytes, or the error's (code, reason, retryable)."""
    outlet = Outlet()
    session = Service(engine, Metrics(), Limits(M, 64 << 10, 8)).session(outlet, "caller")
    session.take(decode_stream_request(data), time.monotonic_ns())
    until(lambda: outlet.said)
    said = outlet.said[0]
    return said if isinstance(said, bytes) else (said.code, said.reason, said.retryable)


def over_tcp(peer, data):
    peer.send_bytes(data)
    said = peer.receive()
    if isinstance(said, pb.RequestError):
        assert 0 < len(said.message) < 600
        return said.code, said.reason, said.retryable
    return bytes(said.output.raw)


def changed(**fields):
    x, ids, w = batch()
    r = request(7, x, ids, w)
    for name, value in fields.items():
        setattr(r, name, value)
    return r


X, IDS, W = batch()
SCALES = np.full((3, 1), 0.5, np.float32)


def scaled(view, scales, block=128):
    return TensorView(view.dtype, view.shape, view.spelling, view.data, ScalesView(block, scales.tobytes()))


def e4m3(scales=SCALES, block=128):
    """Codes of 1, 2, 3: their halves are the values."""
    codes = np.tile(np.array([0x38, 0x40, 0x44, 0xC4], np.uint8), (3, H // 4))
    return scaled(TensorView.of_raw(pb.DATA_TYPE_E4M3, codes.shape, codes.tobytes()), scales, block)


E4M3 = e4m3()
REQUESTS = {
    "as it should be": changed(),
    "f16": changed(hidden_states=tensor(X, "f16")),
    "f16 out": changed(output_dtype=pb.DATA_TYPE_F16),
    "bf16 out": changed(output_dtype=pb.DATA_TYPE_BF16),
    "i64 ids": changed(topk_ids=tensor(IDS, "i64")),
    "f16 weights": changed(topk_weights=tensor(W, "f16")),
    "absent experts": changed(topk_ids=tensor(np.full_like(IDS, -1))),
    "nobody's token": changed(hidden_states=tensor(X[:0]), topk_ids=tensor(IDS[:0], "i32"), topk_weights=tensor(W[:0])),
    "one route": changed(topk_ids=tensor(IDS[:, :1], "i32"), topk_weights=tensor(W[:, :1])),
    "no id": changed(request_id=0),
    "another layer": changed(layer=3),
    "no hidden states": changed(hidden_states=None),
    "no ids": changed(topk_ids=None),
    "no weights": changed(topk_weights=None),
    "e4m3": changed(hidden_states=E4M3),
    "e4m3 without scales": changed(hidden_states=TensorView.of_raw(pb.DATA_TYPE_E4M3, (3, H), E4M3.raw)),
    "scales of other rows": changed(hidden_states=e4m3(scales=SCALES[:2])),
    "scales of floats": changed(hidden_states=scaled(tensor(X), SCALES)),
    "other blocks": changed(hidden_states=e4m3(block=64)),
    "e4m3 for weights": changed(topk_weights=TensorView.of_raw(pb.DATA_TYPE_E4M3, (3, K), b"8" * 3 * K)),
    "scales of ids": changed(topk_ids=scaled(tensor(IDS, "i32"), SCALES)),
    "integers for hidden states": changed(hidden_states=tensor(X, "i32")),
    "floats for ids": changed(topk_ids=tensor(IDS, "f32")),
    "integers for weights": changed(topk_weights=tensor(W, "i32")),
    "other rows": changed(hidden_states=tensor(np.ones((3, H + 1)))),
    "one extent": changed(hidden_states=tensor(X, shape=(3 * H,))),
    "three extents": changed(hidden_states=tensor(X, shape=(3, H, 1))),
    "too few bytes": changed(hidden_states=tensor(X[:2], shape=(3, H))),
    "too many bytes of ids": changed(topk_ids=tensor(IDS, "i32", shape=(3, 1)), topk_weights=tensor(W[:, :1])),
    "ids of other tokens": changed(topk_ids=tensor(IDS[:2], "i32")),
    "weights of other routes": changed(topk_weights=tensor(W[:, :1])),
    "more routes than experts": changed(
        topk_ids=tensor(np.zeros((3, E + 1)), "i32"), topk_weights=tensor(np.ones((3, E + 1)))
    ),
    "too many tokens": changed(
        hidden_states=tensor(np.ones((M + 1, H))),
        topk_ids=tensor(np.zeros((M + 1, K)), "i32"),
        topk_weights=tensor(np.ones((M + 1, K))),
    ),
    "too many routes": changed(
        hidden_states=tensor(np.ones((M, H))),
        topk_ids=tensor(np.zeros((M, E)), "i32"),
        topk_weights=tensor(np.ones((M, E))),
    ),
    "an expert that is none": changed(topk_ids=tensor(np.full_like(IDS, 99), "i32")),
    "weights that are not finite": changed(topk_weights=tensor(np.full_like(W, np.nan))),
    "an output that is none": changed(output_dtype=pb.DATA_TYPE_I32),
    "a weight on the input of two routes": changed(router_weight_on_input=True),
}
REQUESTS["absent experts"].topk_ids = tensor(np.full_like(IDS, -1), "i32")


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_by_python(door, engine, name):
    data = encode_stream_request(REQUESTS[name])
    want = in_python(engine, data)
    with Twin(door) as peer:
        assert over_tcp(peer, data) == want
        call(peer, 8)  # and the session goes on


def test_what_has_no_form_here_is_refused_by_name(door):
    with Twin(door) as peer:
        grouped = changed(topk_ids=None, topk_weights=None, grouped=pb.GroupedRows(expert_ids=[0], row_counts=[3]))
        peer.send(grouped)
        assert peer.receive().reason == "UNSUPPORTED_COMBINATION"
        peer.send(changed(output_form=pb.OUTPUT_FORM_DIGEST))
        assert peer.receive().reason == "UNSUPPORTED_COMBINATION"
        drawn = pb.StreamForwardRequest(forward=pb.ForwardRequest(request_id=3))
        drawn.forward.hidden_states.dtype = pb.DATA_TYPE_F32
        drawn.forward.hidden_states.shape.extend([3, H])
        drawn.forward.hidden_states.synthetic.seed = 1
        peer.send_bytes(drawn.SerializeToString())
        assert peer.receive().reason == "BAD_TENSOR_SPELLING"
        for odd in (b"", pb.StreamForwardRequest(session=pb.SessionOffer()).SerializeToString() or b"\x1a\x00"):
            if odd:
                peer.send_bytes(odd)
                assert (said := peer.receive()).reason == "MALFORMED_MESSAGE"
                assert said.request_id == 0
        call(peer, 9)


def test_serializers_may_spell_a_message_otherwise(door):
    """Fields in another order, shapes that are not packed, fields that nobody knows."""
    x, ids, w = batch()
    message = pb.StreamForwardRequest.FromString(encode_stream_request(request(5, x, ids, w)))

    def field(number, data):
        return bytes([number << 3 | 2]) + _varint(len(data)) + data

    parts = []
    for number, name in ((5, "topk_weights"), (4, "topk_ids"), (3, "hidden_states")):
        t = getattr(message.forward, name)
        shape = b"".join(b"\x10" + _varint(n) for n in t.shape)
        parts.append(field(number, b"\xa2\x06\x01x" + field(3, t.raw) + shape + b"\x08" + _varint(t.dtype)))
    data = field(1, b"".join(parts) + b"\xa2\x06\x03new" + b"\x08\x05")
    with Twin(door) as peer:
        peer.send_bytes(data)
        answer = peer.receive()
        assert np.array_equal(np.frombuffer(answer.output.raw, np.float32).reshape(3, H), 3 * x)


def _varint(n):
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


@pytest.mark.parametrize("lead", [0, 1, 63, 64, 70, 2**32 - 1])
def test_a_lead_is_a_hint(door, lead):
    x, ids, w = batch()
    with Twin(door) as peer:
        peer.send_bytes(encode_stream_request(request(1, x, ids, w)), lead=lead)
        assert peer.receive().routes_computed == 3 * K


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_requests_are_answered_by_their_numbers_and_more_than_the_bound_are_refused(door, doubles):
    doubles.gate.clear()
    with Twin(door) as peer:
        x, ids, w = batch(1)
        for n in range(1, 12):
            peer.send(request(n, x * n, ids, w))
        refused = [peer.receive() for _ in range(3)]
        assert {e.reason for e in refused} == {"TOO_MANY_REQUESTS_IN_FLIGHT"}
        assert [e.request_id for e in refused] == [9, 10, 11]
        assert all(e.retryable for e in refused)
        peer.send(request(4, x, ids, w))
        assert peer.receive().reason == "DUPLICATE_REQUEST_ID"
        doubles.gate.set()
        found = {a.request_id: np.frombuffer(a.output.raw, np.float32) for a in (peer.receive() for _ in range(8))}
        assert {n: np.array_equal(out, 3 * n * x[0]) for n, out in found.items()} == dict.fromkeys(range(1, 9), True)


def test_a_request_is_taken_back_and_its_number_is_free(door, doubles):
    with Twin(door) as peer:
        doubles.hold()
        x, ids, w = batch(1)
        peer.send(request(1, x, ids, w))
        doubles.until_held()  # it is computed, and the second waits
        peer.send(request(2, x, ids, w))
        for n in (2, 1, 77):
            peer.send(pb.CancelRequest(request_id=n))
        assert [(e.request_id, e.reason) for e in (peer.receive(), peer.receive())] == [
            (2, "CANCELLED"),
            (1, "CANCELLED"),
        ]
        doubles.gate.set()
        call(peer, 1)
        call(peer, 2)


def test_a_request_has_its_time(door, engine, doubles):
    with Twin(door) as peer:
        doubles.hold()
        peer.send(request(1, *batch(1)))
        doubles.until_held()
        peer.send(request(2, *batch(1), timeout_us=300_000))
        until(lambda: engine.load().queued_requests == 2)
        time.sleep(0.4)
        doubles.gate.set()
        said = {m.request_id: m for m in (peer.receive(), peer.receive())}
        assert said[2].reason == "DEADLINE_EXCEEDED"
        assert said[1].routes_computed == K


def test_a_drain_answers_what_was_taken(door, engine, doubles):
    with Twin(door) as peer:
        doubles.hold()
        peer.send(request(1, *batch()))
        doubles.until_held()
        engine.drain()
        peer.send(request(2, *batch()))
        assert peer.receive().reason == "DRAINING"
        drained = []
        thread = threading.Thread(target=lambda: drained.append(door.drain(time.monotonic() + 10)))
        thread.start()
        time.sleep(0.05)
        assert not drained
        doubles.gate.set()
        assert peer.receive().routes_computed == 3 * K
        thread.join(10)
        assert drained == [True]
        assert peer.receive() is None


# ---- hostile peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        {"magic": b"exf2"},
        {"sequence": 0},
        {"sequence": 3},
        {"length": 0},
        {"length": BOUNDS.most_message + 1},
        {"length": 2**32 - 1},
    ],
)
def test_a_forged_head_ends_its_session_alone(door, head):
    with Twin(door) as other, Twin(door) as peer:
        call(peer)
        x, ids, w = batch()
        peer.send_bytes(encode_stream_request(request(2, x, ids, w)), **head)
        assert peer.ended()
        gone(door, sessions=1)
        call(other)


def test_half_a_frame_goes_in_time_and_hurts_nobody(door):
    data = encode_stream_request(request(1, *batch()))
    with Twin(door) as other, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(Twin(door)) for _ in range(8)]
        for n, peer in enumerate(halves):
            peer.sock.sendall(peer.frame(data)[: 1 + 9 * n])
        call(other)
        for peer in halves:
            assert peer.ended()
        gone(door, sessions=1)
        call(other, 2)


def test_a_frame_that_trickles_does_not_live_for_ever(engine):
    door = TcpDoor(engine, Address("127.0.0.1", 0), PeerBounds(64 << 10, half_s=0.2))
    door.start()
    try:
        with Twin(door) as peer:
            frame = peer.frame(encode_stream_request(request(1, *batch())))
            trickled = 0
            with contextlib.suppress(ConnectionError):
                for byte in frame:
                    peer.sock.sendall(bytes([byte]))
                    trickled += 1
                    time.sleep(0.1)
            assert 5 < trickled < len(frame) / 2, "it has some time, and not all that it takes"
            gone(door)
    finally:
        door.close()


def test_claimed_lengths_are_bounded_over_all_sessions_and_leave_room(door):
    """Each claims the largest message and sends none of it: together they may not have more than the bound."""
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(Twin(door)) for _ in range(11)]
        for peer in greedy:
            peer.sock.sendall(HEAD.pack(b"exf1", BOUNDS.most_message, 1, 0))
        with Twin(door) as honest:
            call(honest, tokens=M)
        gone(door)


def test_a_reader_that_stops_is_read_no_further_and_cut_off(door, engine):
    """It has thousands of answers unread; another session is served meanwhile."""
    with Twin(door) as other, Twin(door) as peer:
        x, ids, w = batch(1)
        frame = encode_stream_request(request(1, x, ids, w, layer=3))  # refused: small answers
        sent, sending = 0, time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < sending:
                peer.send_bytes(frame)
                sent += 1
                if sent % 500 == 0:
                    call(other, sent)
        assert time.monotonic() < sending, "it is read without end"
        call(other, 1)
        gone(door, sessions=1)
    assert engine.load().queued_requests == 0


def test_a_slow_reader_gets_everything(door):
    """Answers that the socket does not take at once."""
    with Twin(door) as peer:
        x, ids, w = batch(M)
        got = []

        def read():
            time.sleep(0.1)  # the answers of meanwhile fill the socket
            got.extend(peer.receive() for _ in range(400))

        reader = threading.Thread(target=read)
        reader.start()
        for n in range(1, 401):
            peer.send(request(n, x, ids, w, layer=3))
        reader.join(20)
        assert sorted(e.request_id for e in got) == list(range(1, 401))
        assert {e.reason for e in got} <= {"LAYER_NOT_HELD", "TOO_MANY_REQUESTS_IN_FLIGHT"}


def hammer(endpoint, token):
    peer = Twin.__new__(Twin)
    peer.sock, peer.sent, peer.received = dial(endpoint), 0, 0
    enter(peer.sock, token, 10)
    n = 0
    while True:
        n += 1
        peer.send(request(n, *batch(M)))


def test_clients_killed_at_any_moment_leave_nothing_and_hurt_nobody(door, engine):
    with Twin(door) as good:
        call(good)
        gc.collect()  # engines of other tests have descriptors
        before = len(os.listdir("/proc/self/fd"))
        for n in range(10):
            token, endpoint, _ = door.offer("caller", "")
            child = multiprocessing.get_context("fork").Process(target=hammer, args=(endpoint, token))
            child.start()
            time.sleep(0.01 + 0.01 * (n % 5))
            call(good, 2 * n + 2)
            os.kill(child.pid, signal.SIGKILL)
            child.join(10)
            child.close()
            call(good, 2 * n + 3)
            gone(door, sessions=1)
        until(lambda: engine.load().queued_requests == 0)
        until(lambda: len(os.listdir("/proc/self/fd")) == before)


FRAMES = int(os.environ.get("EXPERTD_FUZZ_FRAMES", "4000"))
"""Of all hostile sessions together; 100000 for the long form."""


def garbled(rng, peer, n):
    """A frame of which something is wrong, mostly in the message."""
    tokens = int(rng.integers(0, M + 2))
    x, ids, w = np.ones((tokens, H)), rng.integers(-2, E + 1, (tokens, K)), np.ones((tokens, K))
    r = request(n, x, ids, w, hidden=rng.choice(["f32", "f16"]), layer=int(rng.integers(0, 2)))
    r.timeout_us = int(rng.choice([0, 1, 10**6]))
    data = bytearray(encode_stream_request(r))
    for _ in range(int(rng.integers(0, 4))):
        at = int(rng.integers(0, min(len(data), 80)))
        data[at] = int(rng.integers(0, 256))
    if rng.random() < 0.1:
        data = data[: int(rng.integers(1, len(data) + 1))]
    if rng.random() < 0.05:
        data = bytearray(rng.integers(0, 256, int(rng.integers(1, 300)), np.uint8).tobytes())
    frame = bytearray(peer.frame(bytes(data), lead=int(rng.integers(0, 1 << 32))))
    if rng.random() < 0.002:
        frame[int(rng.integers(0, HEAD.size))] ^= 1 << int(rng.integers(0, 8))
    return bytes(frame)


def test_garbled_frames_hurt_nobody_else(door, engine):
    with Twin(door) as good:
        call(good)
        gc.collect()  # engines of other tests have descriptors
        fds = len(os.listdir("/proc/self/fd"))
        left, seed = FRAMES, 0
        while left > 0:
            seed += 1
            rng = np.random.default_rng(seed)
            with Twin(door) as peer:
                peer.sock.setblocking(False)
                for _ in range(min(left, 500)):
                    left -= 1
                    try:
                        frame, sent = garbled(rng, peer, left + 1), 0
                        end_s = time.monotonic() + 5
                        while sent < len(frame) and time.monotonic() < end_s:
                            with contextlib.suppress(BlockingIOError):
                                sent += peer.sock.send(frame[sent:])
                            with contextlib.suppress(BlockingIOError):
                                if not peer.sock.recv(1 << 16):
                                    raise ConnectionResetError
                    except ConnectionError:
                        break
            call(good, seed + 1)
        gone(door, sessions=1)
        until(lambda: len(os.listdir("/proc/self/fd")) == fds)
    until(lambda: engine.load().queued_requests == 0)


def test_every_reason_travels_as_its_row(door):
    """Code and retryable of an error are those of the table."""
    with Twin(door) as peer:
        peer.send(changed(layer=3))
        said = peer.receive()
        row = TABLE["LAYER_NOT_HELD"]
        assert (said.code, said.retryable, said.request_id) == (int(row.code), row.retryable, 7)


def test_no_thread_and_no_socket_is_left_behind(engine):
    gc.collect()  # engines of other tests have descriptors
    before = len(os.listdir("/proc/self/fd"))
    door = TcpDoor(engine, Address("127.0.0.1", 0), BOUNDS)
    door.start()
    after = len(os.listdir("/proc/self/fd"))
    peers = [Twin(door) for _ in range(3)]
    for peer in peers:
        call(peer)
    door.close()
    assert door.sessions == 0
    for peer in peers:
        assert peer.ended()
        peer.close()
    assert after - len(os.listdir("/proc/self/fd")) == 2, "the listener, and what woke the thread"
    assert before < after
    assert not [t for t in threading.enumerate() if t.name.startswith("expertd-tcp")]


assert ARRAYS.keys() == NUMBERS.keys()
assert struct.calcsize("<4sIII") == HEAD.size
