"""Messages of a gRPC stream that the core reads and answers: as Python would, and nobody's bounds are forgotten."""

import gc
import random
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from asked_kit import E4M3, IDS, REQUESTS, SCALES, W, X, changed, scaled
from core_library import needs_core
from listener_kit import E, H, K, M
from tcp_kit import tensor
from waiting import until, until_asleep

from expertd.codec import (
    AnswerReader,
    ForwardRequestView,
    RawAnswer,
    Spelling,
    decode_stream_request,
    decode_stream_response,
    encode_stream_request,
)
from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_echo.server import Echo
from expertd_server.engine.admission import Limits, State
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.service.connection import ClientConnection
from expertd_server.service.intake import facts_of
from expertd_server.service.service import Service
from expertd_server.views.metrics import Metrics

pytestmark = [needs_core, pytest.mark.timeout(120)]

IN_FLIGHT = 4
BRIEF = ((1, K, 1000), (M, K, 1000))
"""Measurements that say: whoever brings a request computes it."""


class Outlet:
    """Answers as values of the wire, in the order in which they came."""

    def __init__(self):
        self.said, self.raw = [], []
        self.reads = True

    def answer(self, request, answer):
        self.said.append((request.request_id, np.array(answer.output).tobytes()))
        self._read(request.answer_bytes)

    def ready(self, message, answer_bytes):
        view = decode_stream_response(message)
        self.raw.append(message)
        self.said.append((view.request_id, bytes(view.output.raw)))
        self._read(answer_bytes)

    def send(self, message):
        self.said.append(message)
        self._read(0)

    def _read(self, answer_bytes):
        if self.reads:
            self.session.written(answer_bytes)


class Peer:
    """A stream.  usual: messages that it took without decoding them."""

    def __init__(self, service, caller="caller"):
        self.outlet = Outlet()
        self.outlet.session = self.session = ClientConnection(service, self.outlet, caller)
        self.usual = 0

    def send(self, data, now_ns=0):
        now_ns = now_ns or time.monotonic_ns()
        try:
            taken = self.session.take_message(data, now_ns)
            if taken is not False:
                self.usual += 1
                if taken is not True:
                    self.outlet.ready(*taken)
            else:
                self.session.take(decode_stream_request(data), now_ns)
        except ExpertdError as e:
            self.session.refuse(e, e.request_id)

    def wait(self, count=1):
        until(lambda: len(self.outlet.said) >= count)
        return self.outlet.said


def new_service(engine):
    return Service(engine, Metrics(), Limits(M, 64 << 10, IN_FLIGHT))


@pytest.fixture
def service(engine):
    """Its experts are Python's: an answer comes later."""
    return new_service(engine)


@pytest.fixture
def brief():
    """Its answers are there at once; they are the hidden states."""
    e = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=M))
    e.hold([ServedLayer(0, E, range(E), K, H, 8, Echo(0, 0), "echo", measured=BRIEF)])
    e.start()
    e.open()
    until_asleep(e._thread)
    yield new_service(e)
    e.stop(10)


def data_of(number=7, **fields):
    return encode_stream_request(changed(request_id=number, **fields))


def nothing_left(service):
    engine = service.engine
    until(lambda: engine.idle())
    assert engine.delivery.waiting == 0
    all_, own = engine._core.waiting(engine._caller("caller"))
    assert (all_.requests, all_.bytes, own.requests) == (0, 0, 0)
    assert service._unread_bytes == 0


USUAL = {
    "as it should be",
    "f16",
    "f16 out",
    "bf16 out",
    "i64 ids",
    "f16 weights",
    "absent experts",
    "one route",
    "e4m3",
}
BAD_NUMBERS = {"an expert that is none", "weights that are not finite"}
"""Only a look at the elements finds these: both ways the core's."""


@pytest.mark.parametrize("kind", ["service", "brief"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_message_is_answered_as_by_python(request, kind, name):
    service = request.getfixturevalue(kind)
    data = encode_stream_request(REQUESTS[name])
    by_python, peer = Peer(service), Peer(service)
    by_python.session._messages = None
    by_python.send(data)
    (want,) = by_python.wait()
    assert by_python.usual == 0
    for n in (1, 2):  # what was learned from the first counts for the second
        peer.send(data)
        assert peer.wait(n)[-1] == want
    assert peer.usual == (2 if name in USUAL | BAD_NUMBERS else 0)
    until(lambda: not peer.session.busy)
    nothing_left(service)


def test_what_is_unusual_is_left_to_python(brief):
    looked, plain = brief.engine.messages.looked(), pb.StreamForwardRequest.FromString(data_of())

    def seen(change):
        m = pb.StreamForwardRequest()
        m.CopyFrom(plain)
        change(m.forward)
        return looked.look(m.SerializeToString())

    assert seen(lambda f: None)
    assert seen(lambda f: setattr(f, "timeout_us", 5))
    assert not seen(lambda f: setattr(f, "output_form", pb.OUTPUT_FORM_DIGEST))
    assert not seen(lambda f: setattr(f, "request_id", 0))
    assert not seen(lambda f: f.grouped.expert_ids.append(1))
    assert not seen(lambda f: f.hidden_states.synthetic.SetInParent())
    assert not seen(lambda f: f.topk_weights.floats.values.extend([1.0] * 6))
    assert not seen(lambda f: setattr(f, "output_dtype", pb.DATA_TYPE_E4M3))
    assert not looked.look(pb.StreamForwardRequest(cancel=pb.CancelRequest(request_id=7)).SerializeToString())
    assert not looked.look(b"")


SIZES = (1, 2, 3, 31, 64, 65, *range(8040, 8056), *range(1048429, 1048440))
"""Columns of f16: around sizes of an answer whose varint becomes longer."""


def test_an_answer_is_a_message_whatever_its_size():
    engine = Engine(torch.device("cpu"), policy=Policy(max_tokens=M))
    took = ((1, 1, 1000),)
    engine.hold([ServedLayer(n, E, range(E), 1, n, 8, Echo(0, 0), "echo", measured=took) for n in SIZES])
    engine.start()
    engine.open()
    service = Service(engine, Metrics(), Limits(M, 4 << 20, IN_FLIGHT))
    client = AnswerReader()
    peer, ids, w = Peer(service), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    for n in SIZES:
        x = (np.arange(n) % 200).astype(np.float16)[None]
        fields = {"hidden_states": tensor(x, "f16"), "topk_ids": tensor(ids, "i32"), "topk_weights": tensor(w)}
        peer.send(data_of(n, layer=n, **fields))
        peer.wait(1)
        (data,) = peer.outlet.raw
        f = pb.StreamForwardResponse.FromString(data).forward
        assert (f.request_id, f.routes_computed, list(f.output.shape)) == (n, 1, [1, n])
        assert f.output.raw == x.tobytes()
        assert data[64 : 64 + 2 * n] == f.output.raw, "elements lie at a multiple of 16"
        t = f.timing
        assert (t.backend, t.batch_tokens, t.batch_requests) == ("echo", 1, 1)
        assert 0 < t.arrival_ns <= time.monotonic_ns()
        assert 0 < t.decode_ns < 1e9
        assert f.load.token_ns > 0
        assert not f.load.draining
        client.read(data)
        usual = client.read(data)
        assert isinstance(usual, RawAnswer), "our own client reads it in few steps"
        assert usual.view() == decode_stream_response(data)
        peer.outlet.raw.clear()
        peer.outlet.said.clear()
    assert peer.usual == len(SIZES)
    engine.stop(10)


# ---- what only Python knows ------------------------------------------------------------------------------------------


def test_an_id_that_is_in_flight_is_refused_on_either_way(service, doubles):
    doubles.hold()
    peer = Peer(service)
    peer.send(data_of(1))
    doubles.until_held()
    assert peer.usual == 1
    peer.send(data_of(1))
    peer.session.take(changed(request_id=1), time.monotonic_ns())
    peer.session.take(changed(request_id=2), time.monotonic_ns())
    peer.send(data_of(2))
    assert [e.reason for e in peer.outlet.said] == ["DUPLICATE_REQUEST_ID"] * 3
    assert peer.usual == 1
    doubles.gate.set()
    assert [number for number, _ in peer.wait(5)[3:]] == [1, 2]
    nothing_left(service)


def test_bounds_of_a_stream_hold(service, doubles):
    doubles.hold()
    peer = Peer(service)
    peer.outlet.reads = False
    for number in range(1, IN_FLIGHT + 2):
        peer.send(data_of(number))
    assert peer.usual == IN_FLIGHT
    assert [e.reason for e in peer.outlet.said] == ["TOO_MANY_REQUESTS_IN_FLIGHT"]
    doubles.gate.set()
    peer.wait(1 + IN_FLIGHT)
    peer.send(data_of(99))
    assert peer.wait(2 + IN_FLIGHT)[-1].reason == "TOO_MANY_REQUESTS_IN_FLIGHT", "answers that are not read count"
    for _ in range(IN_FLIGHT):
        peer.session.written(3 * H * 4)
    for _ in range(2):
        peer.session.written()
    assert not peer.session.busy
    nothing_left(service)


def test_answers_of_one_stream_leave_room_for_others(brief):
    hoarder, other = Peer(brief, "caller"), Peer(brief, "other")
    hoarder.outlet.reads = False
    brief.limits = Limits(M, 64 << 10, IN_FLIGHT, max_unread_bytes=4 * 3 * H * 4 // 3)
    for number in (1, 2):
        hoarder.send(data_of(number))
    assert hoarder.usual == 1
    assert hoarder.outlet.said[-1].reason == "TOO_MANY_REQUESTS_IN_FLIGHT"
    other.send(data_of(1))
    assert other.usual == 1
    hoarder.session.close()
    nothing_left(brief)


def test_a_cancel_is_answered_and_its_request_is_not(service, doubles):
    doubles.hold()
    peer = Peer(service)
    for number in (1, 2):
        peer.send(data_of(number))
        doubles.until_held()
    for number in (1, 2):  # one is computed, one waits
        peer.session.take(pb.CancelRequest(request_id=number), time.monotonic_ns())
    assert [(e.request_id, e.reason) for e in peer.outlet.said] == [(1, "CANCELLED"), (2, "CANCELLED")]
    doubles.gate.set()
    nothing_left(service)
    assert len(peer.outlet.said) == 2
    assert peer.usual == 2
    assert not peer.session.busy


def test_a_stream_that_ends_with_requests_in_flight_leaves_nothing(service, doubles):
    doubles.hold()
    peer = Peer(service)
    for number in (1, 2, 3):
        peer.send(data_of(number))
    assert peer.usual == 3
    kept = weakref.ref(peer.session)
    peer.session.close()
    doubles.gate.set()
    nothing_left(service)
    assert peer.outlet.said == []
    peer.outlet.session = peer.session = None
    gc.collect()
    assert kept() is None, "somebody keeps the session, and with it what it was sent"


def test_a_message_is_kept_while_the_core_reads_it(service, doubles):
    doubles.hold()
    peer = Peer(service)
    data = data_of(1)
    nobody = sys.getrefcount(data)
    peer.send(data)
    doubles.until_held()
    assert sys.getrefcount(data) > nobody
    doubles.gate.set()
    nothing_left(service)
    until(lambda: sys.getrefcount(data) == nobody)


def test_an_outlet_that_fails_is_told_as_an_error(service):
    peer = Peer(service)

    def broken(message, answer_bytes):
        raise BrokenPipeError("the stream is gone")

    peer.outlet.ready = broken
    peer.send(data_of(1))
    assert [e.reason for e in peer.wait()] == ["INTERNAL"]
    until(lambda: not peer.session.busy)
    nothing_left(service)


def test_an_answer_for_nobody_leaves_nothing(brief):
    peer = Peer(brief)
    peer.session.close()
    peer.send(data_of(1))
    assert peer.outlet.said == []
    nothing_left(brief)


def test_a_message_is_checked_against_the_layer_that_is_held_now(brief):
    peer, engine = Peer(brief), brief.engine
    peer.send(data_of(1))
    assert peer.usual == 1
    engine.hold([ServedLayer(0, E, range(E), K, H // 2, 8, Echo(0, 0), "echo", measured=BRIEF)])
    peer.send(data_of(2))
    assert peer.wait(2)[-1].reason == "BAD_SHAPE"
    engine.hold([])
    peer.send(data_of(3))
    assert peer.wait(3)[-1].reason == "LAYER_NOT_HELD"
    engine.hold([ServedLayer(0, E, range(E), K, H, 8, Echo(0, 0), "other", measured=BRIEF)])
    peer.send(data_of(4))
    assert peer.wait(4)[-1][0] == 4
    assert peer.usual == 2


def test_who_is_not_ready_or_drains_takes_nothing_on_either_way(brief):
    early, engine = Peer(brief), brief.engine
    engine.state = State.LOADING
    early.send(data_of(1))
    engine.state = State.SERVING
    assert [e.reason for e in early.outlet.said] == ["NOT_READY"]
    peer = Peer(brief)
    brief.drain()
    peer.send(data_of(1))
    assert [e.reason for e in peer.outlet.said if isinstance(e, pb.RequestError)] == ["DRAINING"]
    assert peer.usual == 0


def test_a_deadline_counts_from_the_arrival(brief, service, doubles):
    peer = Peer(brief)
    peer.send(data_of(1, timeout_us=50_000), time.monotonic_ns() - 60_000_000)
    assert peer.outlet.said[-1].reason == "DEADLINE_EXCEEDED"
    assert peer.usual == 1
    nothing_left(brief)
    slow = Peer(service)
    doubles.hold()
    slow.send(data_of(1))
    doubles.until_held()
    slow.send(data_of(2, timeout_us=20_000))
    time.sleep(0.03)
    doubles.gate.set()
    assert slow.wait(2)[-1].reason in ("DEADLINE_EXCEEDED", "OVERLOADED")
    assert slow.usual == 2
    nothing_left(service)


def test_a_message_counts_its_way_here_as_python_does(brief):
    """By the time at which its caller sent it: what took longer than the quickest has waited."""
    peer, now_us = Peer(brief), time.monotonic_ns() // 1000
    peer.send(data_of(1, sent_us=now_us - 200_000), 1000 * (now_us - 200_000))
    assert peer.outlet.said[-1][0] == 1
    peer.send(data_of(2, sent_us=now_us - 60_000, timeout_us=50_000), 1000 * now_us)
    assert peer.outlet.said[-1].reason == "DEADLINE_EXCEEDED"


def test_a_traced_request_is_pythons(brief):
    told = []
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    peer = Peer(brief)
    peer.send(data_of(1, traceparent=parent))
    assert peer.usual == 1, "nobody looks for traces"
    brief.traced = told.append
    peer.send(data_of(2, traceparent=parent))
    until(lambda: told)
    assert told[0].context.hex() == parent[3:35] + parent[36:52]
    assert peer.usual == 1
    peer.send(data_of(3))
    assert peer.usual == 2


def test_what_is_answered_is_counted(brief):
    peer = Peer(brief)
    for number in (1, 2):
        peer.send(data_of(number))
    get = brief.metrics.registry.get_sample_value
    assert get("expertd_requests_total", {"code": "OK", "reason": ""}) == 2


# ---- reading ---------------------------------------------------------------------------------------------------------


def fields(*parts):
    """(number, value): a varint for numbers, else bytes."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def varint(n, odd=0):
    out = b""
    while n >= 0x80 or odd:
        out, n, odd = out + bytes([n & 0x7F | 0x80]), n >> 7, max(0, odd - 1)
    return out + bytes([n])


class Mutator:
    """Messages, most of them good ones, spelled in all ways, and broken in some."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def tensor(self, t, **more):
        r = self.r
        shape = [varint(n, r.random() < 0.02) for n in t.shape]
        parts = [(1, t.dtype), *([(2, b"".join(shape))] if r.random() < 0.9 else [(2, n) for n in t.shape])]
        parts.append((3, bytes(t.raw)))
        if t.scales is not None:
            parts.append((7, fields((1, t.scales.block), (2, bytes(t.scales.raw)))))
        return self.spelled(parts)

    def spelled(self, parts):
        r = self.r
        if r.random() < 0.1:
            r.shuffle(parts)
        if r.random() < 0.04:
            parts.insert(r.randrange(len(parts) + 1), r.choice(parts))  # twice
        if r.random() < 0.1:
            new = r.choice([(15, bytes(5)), (99, b"new"), (77, 5), (1, b"x"), (2, 1), (3, 9), (4, b""), (12, 3)])
            parts.insert(r.randrange(len(parts) + 1), new)
        if r.random() < 0.02:
            parts.pop(r.randrange(len(parts)))
        return fields(*parts)

    def message(self):
        r = self.r
        hidden = r.choice([tensor(X), tensor(X, "f16"), E4M3, scaled(E4M3, SCALES[: r.choice([3, 3, 2, 0])])])
        ids, w = tensor(IDS, r.choice(["i32", "i64"] * 4 + ["f32"])), tensor(W, r.choice(["f32", "f16"] * 4 + ["i32"]))
        parts = [(1, r.choice([1, 7, 1 << 63, 5, 300, 0])), (2, r.choice([0, 0, 0, 3])), (3, self.tensor(hidden))]
        parts += [(4, self.tensor(ids)), (5, self.tensor(w))]
        for number, values in (
            (7, (0, 5, 1 << 40)),
            (8, (0, 1, 2, 3, 1, 2, 4, 9, 1 << 33 | 1)),
            (9, (0, 1, 1, 0, 1, 2, 7)),
            (10, (b"", b"00-x", b"00-y", b"\xff", b"0" * 70)),
            (11, (0, 1, 2)),
            (12, (0, 77)),
            (6, (b"",)),
        ):
            if r.random() < (0.01 if number == 6 else 0.15):
                parts.append((number, r.choice(values)))
        data = fields((1, self.spelled(parts)))
        return self.broken(data) if r.random() < 0.3 else data

    def broken(self, data):
        r, kind = self.r, self.r.randrange(4)
        at = r.randrange(min(len(data), 40)) if r.random() < 0.7 else r.randrange(len(data))
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + bytes([r.randrange(256)]) + data[at + 1 :]
        if kind == 2:
            return (
                data[:at] + bytes([data[at] | 0x80, 0x80, 0x80, 0x80, 0x80][: r.randint(1, 5)]) + b"\0" + data[at + 1 :]
            )
        return data[:at] + r.randbytes(r.randint(1, 4)) + data[at:]


def test_what_the_core_reads_python_reads_alike(brief):
    """10,000 messages: nothing that Python reads otherwise or refuses is taken."""
    looked, seen, kinds = brief.engine.messages.looked(), 0, set()
    for seed in range(100):
        mutator = Mutator(seed)
        for _ in range(100):
            data = mutator.message()
            if not looked.look(data):
                continue
            seen += 1
            m = looked.message
            v = decode_stream_request(data)
            assert isinstance(v, ForwardRequestView), data
            for t, at in ((v.hidden_states, m.hidden), (v.topk_ids, m.ids), (v.topk_weights, m.weights)):
                assert t.spelling == Spelling.RAW or (t.spelling == Spelling.NONE and not at)
                assert data[at : at + len(t.raw)] == bytes(t.raw), data
            if m.scales:
                raw = v.hidden_states.scales.raw
                assert data[m.scales : m.scales + len(raw)] == bytes(raw)
            assert (m.request_id, m.timeout_us, m.sent_us) == (v.request_id, v.timeout_us, v.sent_us)
            assert m.traced == bool(v.traceparent)
            assert v.request_id
            assert v.grouped is None
            assert v.output_form in (0, 1)
            brief.engine.check(facts_of(v))
            kinds.add((v.hidden_states.dtype, v.topk_ids.dtype, v.topk_weights.dtype, m.out_dtype))
    assert seen > 1000
    assert len(kinds) > 10


def test_the_usual_message_is_read_by_the_core(brief):
    """What our own client sends must not fall to Python unnoticed: every truncation does, and does no harm."""
    looked, data = brief.engine.messages.looked(), data_of()
    assert looked.look(data)
    for n in range(len(data)):
        assert not looked.look(data[:n])
