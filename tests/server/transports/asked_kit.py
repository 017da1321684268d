"""Requests, good and bad, and what Python answers them with."""

import time

import numpy as np
from listener_kit import E, H, K, M, batch
from tcp_kit import request, tensor
from waiting import until

from expertd.codec import ScalesView, TensorView, decode_stream_request
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import Limits
from expertd_server.service.connection import ClientConnection
from expertd_server.service.service import Service
from expertd_server.views.metrics import Metrics


class Outlet:
    """Gets what a Session says."""

    def __init__(self):
        self.said = []

    def answer(self, request, answer):
        self.said.append(np.array(answer.output).tobytes())

    def send(self, message):
        self.said.append(message)


def in_python(engine, data):
    """What a Session makes of a message's bytes: the output's bytes, or the error's (code, reason, retryable, text)."""
    outlet = Outlet()
    session = ClientConnection(Service(engine, Metrics(), Limits(M, 64 << 10, 8)), outlet, "caller")
    session.take(decode_stream_request(data), time.monotonic_ns())
    until(lambda: outlet.said)
    said = outlet.said[0]
    return said if isinstance(said, bytes) else (said.code, said.reason, said.retryable, said.message)


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
    "absent experts": changed(topk_ids=tensor(np.full_like(IDS, -1), "i32")),
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
