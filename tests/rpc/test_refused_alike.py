"""Whatever is wrong with a request, it is refused with the same reason and the same text over gRPC, shared memory and
TCP, and with every text of the table."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from core_library import needs_core
from in_process import hosts
from tcp_kit import Twin
from waiting import until

from expertd.errors import TABLE
from expertd.shm.client import Client
from expertd.shm.layout import FORWARD, ROUTER_WEIGHT_ON_INPUT, Completion, Submission
from expertd.shm.region import Region, host_id, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.config.values import Address
from expertd_server.engine.refusal_texts import TEXTS

pytestmark = [
    needs_core,
    pytest.mark.skipif(bool(supported()), reason=supported() or "there"),
    pytest.mark.timeout(120),
]

H, E, K, M, MOST = 256, 8, 2, 3, 8
F32, F16, BF16, E4M3, I32, I64 = 1, 2, 3, 4, 5, 6
STORAGE = {F32: "<f4", F16: "<f2", BF16: "<u2", E4M3: "u1", I32: "<i4", I64: "<i8"}


# ---- the three transports: bytes of a StreamForwardRequest -> (code, reason, retryable, text) of its error -----------


class Grpc:
    def __init__(self, host):
        self._channel = grpc.insecure_channel(host.address)

    def refused(self, data):
        call = self._channel.stream_stream("/expertd.v1.ExpertService/StreamForward")
        said = pb.StreamForwardResponse.FromString(next(call(iter([data])))).error
        return said.code, said.reason, said.retryable, said.message

    def close(self):
        self._channel.close()


class Tcp:
    def __init__(self, host):
        self._door = host.service.offered["tcp"]

    def refused(self, data):
        with Twin(self._door) as peer:
            peer.send_bytes(data)
            said = peer.receive()
        assert isinstance(said, pb.RequestError), said
        return said.code, said.reason, said.retryable, said.message

    def close(self):
        pass


class Shm:
    def __init__(self, host):
        token, endpoint, why = host.service.offered["shm"].offer("caller", host_id())
        assert not why
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(20)
        self._sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        self._sock.sendall(token.encode())
        self._client = Client(Region.receive(self._sock))

    def refused(self, data, once_sent=lambda: None):
        s, answer = self._submission(pb.StreamForwardRequest.FromString(data).forward), Completion()
        ticket = self._client.submit(s)
        once_sent()
        assert self._client.wait(ticket, answer, 20 * 10**9)
        self._client.release(ticket)
        for block in filter(None, (s.hidden, s.ids, s.weights, s.out, s.scales)):
            self._client.give(block)
        assert answer.refused
        row = TABLE[answer.name.decode()]
        return int(row.code), row.reason, row.retryable, answer.text.decode()

    def _submission(self, r):
        x, ids, weights = r.hidden_states, r.topk_ids, r.topk_weights
        s = Submission(
            kind=FORWARD, layer=r.layer, tokens=x.shape[0], hidden_size=x.shape[1], top_k=ids.shape[1],
            hidden_dtype=x.dtype, ids_dtype=ids.dtype, weights_dtype=weights.dtype, out_dtype=r.output_dtype,
            flags=ROUTER_WEIGHT_ON_INPUT if r.router_weight_on_input else 0, weights_version=r.weights_version,
        )  # fmt: skip
        s.hidden, s.ids, s.weights = (self._put(t.raw) for t in (x, ids, weights))
        s.out = self._put(bytes(4 * MOST * H))
        if x.dtype == E4M3:
            s.scales = self._put(x.scales.raw)
        return s

    def _put(self, raw):
        # The first block is at offset 0, which says "none" for scales: nothing here is put there.
        while not (block := self._client.take(len(raw) or 1)):
            assert block is not None
        self._client.region.view(block, len(raw))[:] = raw
        return block

    def close(self):
        self._sock.close()
        self._client.end()
        self._client.close()


@pytest.fixture(scope="module")
def transports():
    with hosts(**OPTIONS, nonfinite="refuse") as serve:
        host = serve()
        found = {"grpc": Grpc(host), "shm": Shm(host), "tcp": Tcp(host)}
        yield found
        for transport in found.values():
            transport.close()


# ---- requests --------------------------------------------------------------------------------------------------------


def tensor(values, dtype, shape=None):
    values = np.asarray(values).astype(STORAGE[dtype])
    return pb.Tensor(dtype=dtype, shape=values.shape if shape is None else shape, raw=values.tobytes())


def batch(tokens=M, top_k=K, columns=H):
    return pb.ForwardRequest(
        request_id=7,
        hidden_states=tensor(np.full((tokens, columns), 0.5), F32),
        topk_ids=tensor(np.ones((tokens, top_k)), I32),
        topk_weights=tensor(np.full((tokens, top_k), 0.25), F32),
    )


def scaled(block=128, scales=2 * M, **more):
    t = tensor(np.full((M, H), 0x38), E4M3)
    t.scales.CopyFrom(pb.BlockScales(block=block, raw=np.ones(scales, "<f4").tobytes(), **more))
    return t


def drawn(dtype, shape, **more):
    return pb.Tensor(dtype=dtype, shape=shape, synthetic=pb.SyntheticValues(seed=1, **more))


def typed(t, **values):
    out = pb.Tensor(dtype=t.dtype, shape=t.shape)
    for name, numbers in values.items():
        getattr(out, name).values.extend(numbers)
    return out


def changed(*parts, **fields):
    r = batch()
    for name in parts:
        r.ClearField(name)
    for name, value in fields.items():
        if isinstance(value, (pb.Tensor, pb.GroupedRows)):
            getattr(r, name).CopyFrom(value)
        else:
            setattr(r, name, value)
    return r


def with_shape(name, *shape):
    r = batch()
    del getattr(r, name).shape[:]
    getattr(r, name).shape.extend(shape)
    return r


def grouped(ids, counts, each=0, **fields):
    rows = pb.GroupedRows(expert_ids=ids, row_counts=counts, rows_per_expert=each)
    return changed("topk_ids", "topk_weights", grouped=rows, **fields)


B = batch()
NAN = np.full((M, H), 0.5)
NAN[1, 2] = np.nan
EVERYWHERE = {
    "layer_not_held": changed(layer=9),
    "version_not_held": changed(weights_version=7),
    "hidden_shape": batch(columns=H - 1),
    "too_many_tokens": batch(MOST + 1),
    "too_many_routes": batch(MOST, K + 1),
    "dtype": changed(hidden_states=tensor(np.ones((M, H)), I32)),
    "dtype of ids": changed(topk_ids=tensor(np.ones((M, K)), F32)),
    "dtype of weights": changed(topk_weights=tensor(np.ones((M, K)), I32)),
    "dtype that is none": changed(hidden_states=pb.Tensor(dtype=77, shape=[M, H])),
    "dtype unspecified": changed(hidden_states=pb.Tensor(shape=[M, H])),
    "e4m3_elsewhere": changed(topk_weights=tensor(np.ones((M, K)), E4M3)),
    "ids_shape": batch(1, E + 1),
    "weight_on_input": changed(router_weight_on_input=True),
    "output_dtype": changed(output_dtype=I32),
    "output_dtype unknown": changed(output_dtype=77),
    "expert_id": changed(topk_ids=tensor(np.full((M, K), E), I32)),
    "expert_id too small": changed(topk_ids=tensor(np.full((M, K), -2), I64)),
    "nonfinite_weight": changed(topk_weights=tensor(np.full((M, K), np.inf), F16)),
    "nonfinite_hidden_state": changed(hidden_states=tensor(NAN, F32)),
}
"""By the text that refuses them: what a submission in shared memory can say, too."""
MESSAGES = {
    "missing_hidden_states": changed("hidden_states"),
    "missing_routes": changed("topk_ids"),
    "missing_routes of weights": changed("topk_weights"),
    "missing_request_id": changed(request_id=0),
    "hidden_shape of one extent": with_shape("hidden_states", M * H),
    "hidden_shape of three extents": with_shape("hidden_states", M, H, 1),
    "shape_too_long": with_shape("hidden_states", *[1] * 9),
    "ids_shape of other tokens": changed(topk_ids=tensor(np.ones((M - 1, K)), I32)),
    "ids_shape without routes": with_shape("topk_ids", M, 0),
    "weights_shape": changed(topk_weights=tensor(np.ones((M, K + 1)), F32)),
    "raw_bytes": changed(hidden_states=tensor(np.ones((M - 1, H)), F32, (M, H))),
    "raw_bytes of ids": changed(
        topk_ids=tensor(np.ones((M, K)), I32, (M, 1)), topk_weights=tensor(np.ones((M, 1)), F32)
    ),
    "raw_bytes of weights": changed(topk_weights=tensor(np.ones((M, 1)), F16, (M, K))),
    "no_data": changed(topk_ids=pb.Tensor(dtype=I32, shape=[M, K])),
    "missing_scales": changed(hidden_states=tensor(np.ones((M, H)), E4M3)),
    "scale_block": changed(hidden_states=scaled(block=64)),
    "scale_bytes": changed(hidden_states=scaled(scales=5)),
    "scales_elsewhere": changed(
        hidden_states=pb.Tensor(dtype=F32, shape=[M, H], raw=B.hidden_states.raw, scales=pb.BlockScales(block=128))
    ),
    "output_form": changed(output_form=9),
}
"""What a message can say, too."""
ON_GRPC = {
    "synthetic_e4m3": changed(hidden_states=drawn(E4M3, [M, H])),
    "scales_twice": changed(hidden_states=scaled(floats=pb.FloatValues(values=[1] * 6))),
    "typed_values": changed(topk_ids=typed(B.topk_ids, floats=[1] * M * K)),
    "typed_values of weights": changed(topk_weights=typed(B.topk_weights, ints=[1] * M * K)),
    "typed_count": changed(topk_ids=typed(B.topk_ids, ints=[1] * 5)),
    "zipf_exponent": changed(topk_ids=drawn(I32, [M, K], zipf_exponent=-1)),
    "grouped_beside": changed(grouped=pb.GroupedRows(expert_ids=[1], row_counts=[M])),
    "grouped_lengths": grouped([1, 2], [M]),
    "grouped_rows": grouped([1, 2], [M, 1]),
    "grouped_each": grouped([1, 2], [M, 1], M),
    "grouped_most": grouped([1], [M + 1], M),
    "digest_of_e4m3": changed(output_dtype=E4M3, output_form=pb.OUTPUT_FORM_DIGEST),
}
"""What the stream alone carries: TCP refuses them for that."""
ELSEWHERE = {
    *("malformed", "no_kind", "duplicate_request_id", "too_many_in_flight", "unread_bytes", "not_over_tcp"),
    *("values_not_over_tcp", "e4m3_on_device", "offsets", "offsets_on_device", "number_unprepared"),
    *(
        "number_of_prepared",
        "draining",
        "came_late",
        "would_be_late",
        "too_slow",
        "queue_full",
        "no_memory",
        "cancelled",
    ),
    *("overtaken", "expired"),
}
"""Texts that are no request's content: see the tests below and those of each transport."""


def message(r):
    return pb.StreamForwardRequest(forward=r).SerializeToString()


def is_text(name, said):
    """Whether `said` is that text of the table, with its reason."""
    error, text = TEXTS[name]
    code, reason, retryable, told = said
    pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(text))
    return (code, reason, retryable) == (int(error.code), error.reason, error.retryable) and re.fullmatch(pattern, told)


@pytest.mark.parametrize("name", [*EVERYWHERE, *MESSAGES, *ON_GRPC])
def test_a_wrong_request_is_refused_alike_by_every_transport_that_carries_it(transports, name):
    data = message((EVERYWHERE | MESSAGES | ON_GRPC)[name])
    said = {"grpc": transports["grpc"].refused(data)}
    if name not in ON_GRPC:
        said["tcp"] = transports["tcp"].refused(data)
    if name in EVERYWHERE:
        said["shm"] = transports["shm"].refused(data)
    for transport, found in said.items():
        assert is_text(name.split()[0], found), (transport, found)
    assert len(set(said.values())) == 1, said


def test_every_text_of_the_table_is_here_or_named_as_another_tests():
    here = {name.split()[0] for name in (*EVERYWHERE, *MESSAGES, *ON_GRPC)}
    assert here | ELSEWHERE == set(TEXTS)
    assert not here & ELSEWHERE


OPTIONS = {"synthetic": "tiny:int4_g128", "max_tokens": MOST, "tcp_listen": Address("127.0.0.1", 0)}


def test_a_full_queue_and_a_drain_are_told_alike():
    gate, held = threading.Event(), threading.Event()

    def hold():
        held.set()
        assert gate.wait(60)

    with hosts(**OPTIONS, max_queue_requests=1) as serve, ThreadPoolExecutor(1) as pool:
        host = serve()
        found = {"grpc": Grpc(host), "shm": Shm(host), "tcp": Tcp(host)}
        holding = pool.submit(host.engine.between, hold)
        held.wait()
        call = grpc.insecure_channel(host.address).stream_stream("/expertd.v1.ExpertService/StreamForward")
        first = call(iter([message(B)]))
        until(lambda: host.engine.load().queued_requests == 1)
        said = {name: found[name].refused(message(B)) for name in ("grpc", "tcp")}
        said["shm"] = found["shm"].refused(message(B), once_sent=gate.set)
        for transport, told in said.items():
            assert is_text("queue_full", told), (transport, told)
            assert "got 1 requests waiting" in told[3]
        assert pb.StreamForwardResponse.FromString(next(first)).WhichOneof("kind") == "forward"
        holding.result()
        host.engine.drain()
        said = [found[name].refused(message(B)) for name in ("shm", "tcp")]  # it ends gRPC's streams
        assert is_text("draining", said[0])
        assert said[0] == said[1]
        for transport in found.values():
            transport.close()


@pytest.mark.parametrize("name", ON_GRPC)
def test_what_tcp_does_not_carry_says_so(transports, name):
    said = transports["tcp"].refused(message(ON_GRPC[name]))
    assert is_text("not_over_tcp", said) or is_text("values_not_over_tcp", said), said


def test_bytes_that_are_no_message_are_refused_alike(transports):
    for data in (message(B)[:-5], b"\x0a\x05\x08", b"\xff" * 9):
        said = [transports[name].refused(data) for name in ("grpc", "tcp")]
        assert is_text("malformed", said[0])
        assert said[0] == said[1]


def test_a_message_without_a_kind_is_refused(transports):
    for name, wanted in (("grpc", "forward, cancel or session"), ("tcp", "forward or cancel")):
        said = transports[name].refused(b"\x9a\x06\x01x")
        assert is_text("no_kind", said), said
        assert said[3].endswith(wanted)
