"""Servers of a cluster that are functions of this process: every expert is a known function, so every answer can be
checked, and a test says what a server does wrong."""

from __future__ import annotations

import asyncio
import threading

import ml_dtypes
import numpy as np
from waiting import until

from expertd.codec import ForwardResponseView, TensorView
from expertd.errors import ExpertdError, RequestCancelledError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import FunctionTransport
from expertd_client.transports.protocol import no_session

H, E, K = 16, 8, 3
RNG = np.random.default_rng(5)
SCALE = RNG.uniform(0.5, 2.0, (64, H)).astype(np.float32)
SHIFT = RNG.uniform(-1.0, 1.0, (64, H)).astype(np.float32)
NUMPY = {pb.DATA_TYPE_F32: np.float32, pb.DATA_TYPE_BF16: ml_dtypes.bfloat16, pb.DATA_TYPE_F16: np.float16}
NUMPY |= {pb.DATA_TYPE_I32: np.int32, pb.DATA_TYPE_I64: np.int64}


def experts_of(x, ids, w, held):
    """[M, H] f32: the sum over the routes to `held`, expert by expert in ascending order; and how many routes."""
    out = np.zeros(x.shape, np.float32)
    for e in sorted(held):
        weight = np.where(ids == e, w.astype(np.float32), 0).sum(axis=1, keepdims=True)
        out += weight * (x.astype(np.float32) * SCALE[e] + SHIFT[e])
    return out, int(np.isin(ids, list(held)).sum())


def batch(tokens, experts=E, seed=0, dtype=np.float32, top_k=K):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, H)).astype(dtype)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    return x, ids, rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)


def array(view):
    return np.frombuffer(view.raw, NUMPY[view.dtype]).reshape(view.shape)


class Fake:
    """A server.  held: layer -> experts; asked: the requests that came, as (layer, x, ids, w).

    A test sets `does`: called with each request before it is answered, may raise a row of the error table, or sleep.
    """

    def __init__(
        self, held, experts=E, max_tokens=0, fingerprint="f00d", load=None, max_in_flight=0, weights=None, inner=0
    ):
        self.held, self.experts, self.max_tokens, self.fingerprint = held, experts, max_tokens, fingerprint
        self.inner = inner  # the intermediate size that it says
        self.weights = weights or (lambda expert: [])  # expert -> digests of its weights
        self.asked, self.describes, self.away = [], 0, False
        self.does = lambda request: None
        self.routes = lambda n: n
        self.load = load or pb.Load(token_ns=1000.0)

    def serve(self, request):
        if self.away:
            raise UnavailableError("away")
        x, ids, w = array(request.hidden_states), array(request.topk_ids), array(request.topk_weights)
        self.asked.append((request.layer, x, ids, w))
        self.does(request)
        assert not self.max_tokens or len(x) <= self.max_tokens
        out, routes = experts_of(x, ids, w, self.held[request.layer])
        raw = out.astype(NUMPY[request.output_dtype]).tobytes()
        output = TensorView.of_raw(request.output_dtype, x.shape, raw)
        timing = pb.Timing(backend="fake")
        return ForwardResponseView(
            request.request_id, output, routes_computed=self.routes(routes), timing=timing, load=self.load
        )

    def describe(self, request):
        self.describes += 1
        if self.away:
            raise UnavailableError("away")
        layers = [
            pb.Layer(
                layer=n,
                num_experts=self.experts,
                intermediate_size=self.inner,
                held=[pb.ExpertRange(first=e, count=1) for e in sorted(held)],
                weight_digests=[digest for e in sorted(held) for digest in self.weights(e)],
            )
            for n, held in self.held.items()
        ]
        model = pb.Model(fingerprint=self.fingerprint, hidden_size=H)
        return pb.DescribeResponse(
            model=model, layers=layers, limits=pb.Limits(max_tokens=self.max_tokens), load=self.load
        )


class Threaded(FunctionTransport):
    """Answers from a thread for each request, so that answers come in any order and `does` may wait."""

    def connect(self, deliver, closed):
        return _Way(self._serve, deliver, closed)


class _Way:
    def __init__(self, serve, deliver, closed):
        self._serve, self._deliver, self._closed = serve, deliver, closed
        self.cancelled = set()

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        view = request.view(request_id, timeout_us)
        threading.Thread(target=self._run, args=(request_id, view), daemon=True).start()

    def _run(self, request_id, view):
        try:
            answer = self._serve(view)
        except Exception as error:
            answer = error.to_request_error(request_id)
        self._deliver(answer)

    def cancel(self, request_id):
        self.cancelled.add(request_id)

    def offer(self, offer):
        self._deliver(no_session(offer, "none"))

    def close(self):
        closed, self._closed = self._closed, lambda error: None
        closed(RequestCancelledError("closed"))


class Looped(FunctionTransport):
    """Answers in the event loop, at once or when `later` says."""

    def connect(self, deliver, closed):
        return _Later(self._serve, deliver, closed)


class _Later(_Way):
    def forward(self, request_id, timeout_us, request):
        loop, view = asyncio.get_running_loop(), request.view(request_id, timeout_us)
        try:
            answer, delay_s = self._serve(view), 0.0
        except Delayed as later:
            if later.seconds is None:
                return
            answer, delay_s = later.answer, later.seconds
        except ExpertdError as error:
            answer, delay_s = error.to_request_error(request_id), 0.0
        loop.call_later(delay_s, self._deliver, answer)


class Delayed(Exception):  # noqa: N818 - it is no error
    """What a Fake's answer is raised as where it is to come later."""

    def __init__(self, answer, seconds):
        super().__init__()
        self.answer, self.seconds = answer, seconds


def later(server, seconds):
    """Makes a Fake answer so many seconds later, over Looped."""
    serve = server.serve

    def delayed(request):
        raise Delayed(serve(request), seconds)

    server.serve = delayed


def transports(servers, kind=FunctionTransport):
    """For ExpertCluster(transport=...): address -> the transport to that Fake."""
    return lambda address: kind(lambda request: servers[address].serve(request), servers[address].describe, address)


def nothing_under_way(cluster):
    """Waits until no part is counted anywhere: what a timer sent as its call ended is taken back a moment later."""
    members = cluster._members.by_address.values()
    until(lambda: not any(m.outstanding or m.outstanding_tokens for m in members))
    assert not cluster._state.flights
