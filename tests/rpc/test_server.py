"""The server's methods, called with the generated classes: in process and over localhost, with one body.

The backend is the float32 reference on a small synthetic model, held in part: experts 1..6 of 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zlib
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
import torch

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.probe import detect_device
from expertd_kernels.synthetic import random_inputs
from expertd_server.boot import boot_layers, open_source, plan_layers
from expertd_server.config import Address, Ranges, ServeConfig
from expertd_server.describe import describe_layer, describe_server
from expertd_server.engine import Engine
from expertd_server.intake import Intake
from expertd_server.metrics import Metrics
from expertd_server.scheduler import Policy
from expertd_server.server import ExpertServer
from expertd_server.service import Limits
from expertd_server.servicer import Servicer

BF16, F16, F32, I32, I64 = (
    pb.DATA_TYPE_BF16,
    pb.DATA_TYPE_F16,
    pb.DATA_TYPE_F32,
    pb.DATA_TYPE_I32,
    pb.DATA_TYPE_I64,
)
TORCH = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32, I32: torch.int32, I64: torch.int64}
H, K, NUM_EXPERTS, MAX_TOKENS, MAX_BYTES, IN_FLIGHT = 256, 2, 8, 64, 1 << 17, 8
CONFIG = ServeConfig(synthetic="tiny:int4_g128", experts=Ranges.parse("1-6"), backend="reference", device="cpu")


class FailedError(Exception):
    """A call or a request that failed, however the transport says it."""

    def __init__(self, code: str, reason: str, text: str, retryable: bool) -> None:
        super().__init__(f"{code} {reason}: {text}")
        self.code, self.reason, self.text, self.retryable = code, reason, text, retryable

    @classmethod
    def of_status(cls, code: grpc.StatusCode, text: str, metadata) -> FailedError:
        found = dict(metadata)
        return cls(code.name, found.get("expertd-reason", ""), text, found.get("expertd-retryable") == "true")


class AbortedError(Exception):
    pass


class Context:
    """What grpc.aio gives a handler, as far as it is used."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.to_server: asyncio.Queue = asyncio.Queue()
        self.to_caller: asyncio.Queue = asyncio.Queue()
        self.status = None

    def time_remaining(self):
        return self.timeout

    async def abort(self, code, details="", trailing_metadata=()):
        self.status = (code, details, trailing_metadata)
        raise AbortedError

    async def read(self):
        return await self.to_server.get()

    async def write(self, data):
        await self.to_caller.put(data)


class InProcess:
    """The servicer's methods themselves."""

    def __init__(self, servicer: Servicer, address: Address) -> None:
        self._servicer = servicer

    async def forward(self, request: pb.ForwardRequest, timeout: float | None = None) -> pb.ForwardResponse:
        context = Context(timeout)
        call = self._servicer.forward(request.SerializeToString(), context)
        try:
            return pb.ForwardResponse.FromString(await asyncio.wait_for(call, timeout))
        except asyncio.TimeoutError:
            raise FailedError("DEADLINE_EXCEEDED", "", "the caller's own clock", False) from None
        except AbortedError:
            raise FailedError.of_status(*context.status) from None

    async def describe(self, **fields) -> pb.DescribeResponse:
        data = await self._servicer.describe(pb.DescribeRequest(**fields).SerializeToString(), Context())
        return pb.DescribeResponse.FromString(data)

    @contextlib.asynccontextmanager
    async def stream(self):
        context = Context()
        call = asyncio.create_task(self._servicer.stream_forward(None, context))

        class Stream:
            async def send(self, **fields):
                await context.to_server.put(pb.StreamForwardRequest(**fields).SerializeToString())

            async def send_bytes(self, data):
                await context.to_server.put(data)

            async def half_close(self):
                await context.to_server.put(grpc.aio.EOF)

            async def receive(self):
                get = asyncio.create_task(context.to_caller.get())
                await asyncio.wait({get, call}, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return pb.StreamForwardResponse.FromString(get.result())
                get.cancel()
                if context.status is not None:
                    raise FailedError.of_status(*context.status)
                return None

        try:
            yield Stream()
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def close(self) -> None:
        pass


class Localhost:
    """A plain grpcio client with the generated stub."""

    def __init__(self, servicer: Servicer, address: Address) -> None:
        self._channel = grpc.aio.insecure_channel(str(address), options=[("grpc.max_send_message_length", -1)])
        self._stub = ExpertServiceStub(self._channel)

    async def forward(self, request: pb.ForwardRequest, timeout: float | None = None) -> pb.ForwardResponse:
        try:
            return await self._stub.Forward(request, timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise FailedError.of_status(e.code(), e.details(), e.trailing_metadata()) from None

    async def describe(self, **fields) -> pb.DescribeResponse:
        return await self._stub.Describe(pb.DescribeRequest(**fields))

    @contextlib.asynccontextmanager
    async def stream(self):
        raw = self._channel.stream_stream("/expertd.v1.ExpertService/StreamForward")
        call = raw()

        class Stream:
            async def send(self, **fields):
                await call.write(pb.StreamForwardRequest(**fields).SerializeToString())

            async def send_bytes(self, data):
                await call.write(data)

            async def half_close(self):
                await call.done_writing()

            async def receive(self):
                try:
                    data = await call.read()
                except grpc.aio.AioRpcError as e:
                    raise FailedError.of_status(e.code(), e.details(), e.trailing_metadata()) from None
                if data is grpc.aio.EOF:
                    code = await call.code()
                    if code is not grpc.StatusCode.OK:
                        raise FailedError.of_status(code, await call.details(), await call.trailing_metadata())
                    return None
                return pb.StreamForwardResponse.FromString(data)

        try:
            yield Stream()
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


@dataclass
class Served:
    """A server, a caller of it, and what a test needs to make it slow."""

    call: InProcess | Localhost
    server: ExpertServer
    engine: Engine
    metrics: Metrics
    gate: threading.Event
    entered: threading.Event
    kernels: list[int]

    @contextlib.contextmanager
    def busy(self):
        """While inside, the engine waits in its kernel."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


class Gated:
    """Experts that wait for a gate and count the tokens they computed."""

    def __init__(self, inner, gate, entered, kernels) -> None:
        self.inner, self.gate, self.entered, self.kernels = inner, gate, entered, kernels
        self.backend = inner.backend

    def __call__(self, hidden_states, *args, **kwargs):
        self.entered.set()
        assert self.gate.wait(20)
        self.kernels.append(len(hidden_states))
        return self.inner(hidden_states, *args, **kwargs)


@pytest.fixture(scope="module")
def booted():
    source = open_source(CONFIG)
    plans = plan_layers(CONFIG, source, detect_device("cpu"), {})
    layers = boot_layers(plans, source, torch.device("cpu"), done=lambda b: None, stopped=lambda: False)
    return source, layers


@pytest.fixture(params=[InProcess, Localhost])
async def served(request, booted):
    source, layers = booted
    gate, entered, kernels = threading.Event(), threading.Event(), []
    gate.set()
    limits = Limits(MAX_TOKENS, MAX_BYTES, IN_FLIGHT)
    metrics = Metrics()
    server = ExpertServer(metrics, limits)
    address = await server.start(Address("127.0.0.1", 0))
    ready = {}
    for b in layers:
        fields = {f: getattr(b.served, f) for f in b.served.__dataclass_fields__ if f not in ("slot_of", "experts")}
        ready[b.served.layer] = type(b.served)(experts=Gated(b.served.experts, gate, entered, kernels), **fields)
    engine = Engine(ready, torch.device("cpu"), policy=Policy(MAX_TOKENS), max_queue_requests=32, observe=metrics.batch)
    metrics.watch_load(engine.load)
    engine.start()
    described = describe_server(
        instance_id="test",
        version="0",
        family=source.family,
        fingerprint=source.fingerprint,
        hidden_size=H,
        layers=[describe_layer(b.served, b.plan.info, b.plan.decision, b.error) for b in layers],
        limits=limits,
    )
    await server.ready(engine, Intake(engine.layers, MAX_TOKENS), described.__getitem__)
    call = request.param(Servicer(server.service), address)
    yield Served(call, server, engine, metrics, gate, entered, kernels)
    gate.set()
    await call.close()
    await server.drain(5)


def tensor(t: torch.Tensor, dtype: int) -> pb.Tensor:
    t = t.to(TORCH[dtype]).contiguous()
    raw = (t.view(torch.int16) if dtype == BF16 else t).numpy().tobytes()
    return pb.Tensor(dtype=dtype, shape=list(t.shape), raw=raw)


def values(t: pb.Tensor) -> torch.Tensor:
    raw = torch.from_numpy(np.frombuffer(t.raw, np.uint8).copy())
    return raw.view(TORCH[t.dtype]).view(list(t.shape))


def batch(tokens=4, seed=0, layer=0, dtypes=(BF16, I32, F32), **fields) -> pb.ForwardRequest:
    x, ids, w = random_inputs(tokens, H, NUM_EXPERTS, K, seed=seed)
    return pb.ForwardRequest(
        layer=layer,
        hidden_states=tensor(x, dtypes[0]),
        topk_ids=tensor(ids, dtypes[1]),
        topk_weights=tensor(w, dtypes[2]),
        **fields,
    )


@pytest.fixture(scope="module")
def weights():
    """Canonical weights of the experts 1..6 by layer."""
    source = open_source(CONFIG)
    return {n: source.load(n, range(1, 7)) for n in source.layers}


def expected(weights, r: pb.ForwardRequest, ids=None, w=None) -> torch.Tensor:
    """The reference's answer to `r`, whose ids are global."""
    ids = values(r.topk_ids) if ids is None else ids
    slots = torch.where((ids >= 1) & (ids <= 6), ids - 1, -1).int()
    w = values(r.topk_weights) if w is None else w
    return reference(
        weights[r.layer],
        values(r.hidden_states),
        slots,
        w,
        router_weight_on_input=r.router_weight_on_input,
    )


def held_routes(ids: torch.Tensor) -> int:
    return int(((ids >= 1) & (ids <= 6)).sum())


def check(weights, r: pb.ForwardRequest, a: pb.ForwardResponse) -> None:
    assert relative_error(values(a.output).float(), expected(weights, r)) <= tolerance("bf16")
    assert a.routes_computed == held_routes(values(r.topk_ids))


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(BF16, I32, F32), (F32, I64, BF16), (F16, I64, F32)])
@pytest.mark.parametrize("output", [0, BF16, F16, F32])
async def test_forward_is_right_in_every_dtype(served, weights, dtypes, output):
    r = batch(7, seed=3, layer=1, dtypes=dtypes, output_dtype=output)
    a = await served.call.forward(r)
    check(weights, r, a)
    assert a.output.dtype == (output or BF16)
    assert list(a.output.shape) == [7, H]
    t = a.timing
    assert (t.batch_tokens, t.batch_requests, t.backend) == (7, 1, "reference")
    assert min(t.decode_ns, t.kernel_ns, t.copy_in_ns) > 0
    assert (a.load.queued_tokens, a.load.queued_requests, a.load.draining) == (0, 0, False)
    assert a.load.token_ns > 0


async def test_a_stream_answers_each_request_with_its_own_id(served, weights):
    requests = {n: batch(n, seed=n, layer=n % 2, request_id=100 + n) for n in range(1, 8)}
    async with served.call.stream() as s:
        for r in requests.values():
            await s.send(forward=r)
        await s.half_close()
        answers = [await s.receive() for _ in requests]
        assert await s.receive() is None, "the stream ends well after the last answer"
    assert sorted(a.forward.request_id for a in answers) == [100 + n for n in requests]
    for a in answers:
        check(weights, requests[a.forward.request_id - 100], a.forward)


async def test_raw_typed_and_digest_give_the_same_answer(served):
    raw = batch(3, seed=5, dtypes=(BF16, I32, F32))
    typed = pb.ForwardRequest(
        layer=0,
        hidden_states=pb.Tensor(
            dtype=BF16,
            shape=[3, H],
            floats=pb.FloatValues(values=values(raw.hidden_states).float().reshape(-1).tolist()),
        ),
        topk_ids=pb.Tensor(
            dtype=I32, shape=[3, K], ints=pb.IntValues(values=values(raw.topk_ids).reshape(-1).tolist())
        ),
        topk_weights=pb.Tensor(
            dtype=F32, shape=[3, K], floats=pb.FloatValues(values=values(raw.topk_weights).reshape(-1).tolist())
        ),
    )
    a, b = await served.call.forward(raw), await served.call.forward(typed)
    assert a.output == b.output
    typed.output_form = pb.OUTPUT_FORM_DIGEST
    d = await served.call.forward(typed)
    assert not d.HasField("output")
    assert d.digest.crc32 == zlib.crc32(a.output.raw)
    out = values(a.output).double()
    assert d.digest.sum == pytest.approx(out.sum().item(), rel=1e-12)
    assert d.digest.sum_of_squares == pytest.approx(out.square().sum().item(), rel=1e-12)
    assert d.routes_computed == a.routes_computed


def drawn(shape, dtype, seed=7, **more):
    return pb.Tensor(dtype=dtype, shape=shape, synthetic=pb.SyntheticValues(seed=seed, **more))


async def test_synthetic_tensors_depend_on_their_seed_alone(served):
    def request(seed, zipf=0.0):
        return pb.ForwardRequest(
            layer=0,
            hidden_states=drawn([64, H], BF16, seed),
            topk_ids=drawn([64, K], I32, seed, zipf_exponent=zipf),
            topk_weights=drawn([64, K], F32, seed),
        )

    a, again, other = [await served.call.forward(request(seed)) for seed in (1, 1, 2)]
    assert a.output == again.output
    assert a.output != other.output
    assert 0.25 < values(a.output).float().std() < 4.0
    skewed = await served.call.forward(request(1, zipf=3.0))
    assert skewed.routes_computed < a.routes_computed, "Zipf prefers expert 0, which is not held here"


async def test_no_tokens_give_an_empty_tensor(served):
    a = await served.call.forward(batch(0, output_dtype=F16))
    assert (list(a.output.shape), a.output.dtype, a.output.raw, a.routes_computed) == ([0, H], F16, b"", 0)
    a = await served.call.forward(batch(0, output_form=pb.OUTPUT_FORM_DIGEST))
    assert a.digest == pb.Digest()
    async with served.call.stream() as s:
        await s.send(forward=batch(0, request_id=5))
        assert (await s.receive()).forward.request_id == 5
    assert served.kernels == []


async def test_rows_grouped_by_expert_are_answered_row_by_row(served, weights):
    x = random_inputs(6, H, NUM_EXPERTS, 1, seed=9)[0]
    grouped = pb.GroupedRows(expert_ids=[2, 0, 6], row_counts=[3, 1, 2])
    r = pb.ForwardRequest(layer=0, hidden_states=tensor(x, BF16), grouped=grouped)
    a = await served.call.forward(r)
    ids = torch.tensor([[2], [2], [2], [0], [6], [6]])
    want = expected(weights, r, ids, torch.ones(6, 1))
    assert relative_error(values(a.output), want) <= tolerance("bf16")
    assert a.routes_computed == 5, "expert 0 lives elsewhere"
    assert not values(a.output)[3].any()


async def test_router_weight_on_input(served, weights):
    x, ids, w = random_inputs(5, H, NUM_EXPERTS, 1, seed=4)
    w = w * 0.5
    r = pb.ForwardRequest(
        layer=0,
        hidden_states=tensor(x, BF16),
        topk_ids=tensor(ids, I32),
        topk_weights=tensor(w, F32),
        router_weight_on_input=True,
    )
    on_input = await served.call.forward(r)
    assert relative_error(values(on_input.output), expected(weights, r)) <= tolerance("bf16")
    r.router_weight_on_input = False
    assert relative_error(values(on_input.output), expected(weights, r)) > 0.05, "the test can tell them apart"


async def test_concurrent_calls_for_one_layer_become_one_batch(served, weights):
    requests = [batch(4, seed=s) for s in range(8)]
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1, seed=99)))
        await asyncio.to_thread(served.entered.wait, 20)
        calls = [asyncio.create_task(served.call.forward(r)) for r in requests]
        await wait_for(lambda: served.engine.load().queued_requests == 9)
    answers = await asyncio.gather(*calls)
    await first
    assert served.kernels == [1, 32]
    for r, a in zip(requests, answers, strict=True):
        check(weights, r, a)
        assert (a.timing.batch_tokens, a.timing.batch_requests) == (32, 8)


async def wait_for(condition, seconds=20.0):
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


# ---- refusals -------------------------------------------------------------------------------------------------------


def spoilt(change) -> pb.ForwardRequest:
    r = batch(4, seed=1)
    change(r)
    return r


def _nan(r):
    w = values(r.topk_weights)
    w[2, 1] = float("nan")
    r.topk_weights.CopyFrom(tensor(w, F32))


def _set_ids(value):
    def change(r):
        ids = values(r.topk_ids)
        ids[3, 0] = value
        r.topk_ids.CopyFrom(tensor(ids, I32))

    return change


def _scaled(r):
    r.hidden_states.scales.block = 128


def _typed_with_wrong_kind(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], floats=pb.FloatValues(values=[1.0] * 8)))


def _typed_with_wrong_count(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], ints=pb.IntValues(values=[1] * 7)))


def _typed_too_wide(r):
    r.topk_ids.CopyFrom(pb.Tensor(dtype=I32, shape=[4, K], ints=pb.IntValues(values=[1 << 40] * 8)))


def _grouped(ids, counts):
    def change(r):
        r.ClearField("topk_ids")
        r.ClearField("topk_weights")
        r.grouped.CopyFrom(pb.GroupedRows(expert_ids=ids, row_counts=counts))

    return change


BAD = {
    "no hidden states": (lambda r: r.ClearField("hidden_states"), "MALFORMED_MESSAGE", "hidden_states: absent"),
    "no ids": (lambda r: r.ClearField("topk_ids"), "MALFORMED_MESSAGE", "topk_ids: absent"),
    "no weights": (lambda r: r.ClearField("topk_weights"), "MALFORMED_MESSAGE", "topk_weights: absent"),
    "hidden dtype": (lambda r: setattr(r.hidden_states, "dtype", I32), "BAD_DTYPE", "got I32, want F32 or F16 or BF16"),
    "hidden dtype unset": (lambda r: setattr(r.hidden_states, "dtype", 0), "BAD_DTYPE", "got UNSPECIFIED"),
    "hidden dtype unknown": (lambda r: setattr(r.hidden_states, "dtype", 77), "BAD_DTYPE", "got 77"),
    "id dtype": (lambda r: setattr(r.topk_ids, "dtype", F32), "BAD_DTYPE", "topk_ids.dtype: got F32, want I32 or I64"),
    "weight dtype": (lambda r: setattr(r.topk_weights, "dtype", I32), "BAD_DTYPE", "topk_weights.dtype: got I32"),
    "e4m3": (lambda r: setattr(r.hidden_states, "dtype", pb.DATA_TYPE_E4M3), "SCALES_UNSUPPORTED", "E4M3"),
    "block scales": (_scaled, "SCALES_UNSUPPORTED", "block scales"),
    "hidden rank": (lambda r: r.hidden_states.shape.append(1), "BAD_SHAPE", "got [4, 256, 1], want [M, 256]"),
    "hidden width": (lambda r: r.hidden_states.shape.__setitem__(1, 255), "BAD_SHAPE", "got [4, 255], want [M, 256]"),
    "id rows": (lambda r: r.topk_ids.shape.__setitem__(0, 3), "BAD_SHAPE", "topk_ids: got [3, 2], want [4, top_k]"),
    "no top_k": (lambda r: r.topk_ids.shape.__setitem__(1, 0), "BAD_SHAPE", "top_k from 1 to 8"),
    "weight shape": (lambda r: r.topk_weights.shape.__setitem__(1, 1), "BAD_SHAPE", "topk_weights: got [4, 1]"),
    "hidden bytes": (
        lambda r: setattr(r.hidden_states, "raw", r.hidden_states.raw[:-1]),
        "BAD_BYTE_COUNT",
        "hidden_states.raw: got 2047 bytes, want 2048 for [4, 256] bf16",
    ),
    "id bytes": (lambda r: setattr(r.topk_ids, "raw", b""), "BAD_BYTE_COUNT", "topk_ids.raw: got 0 bytes, want 32"),
    "no data": (lambda r: r.topk_ids.ClearField("raw"), "BAD_TENSOR_SPELLING", "topk_ids: has no data"),
    "floats for ids": (_typed_with_wrong_kind, "BAD_TENSOR_SPELLING", "got floats, want ints"),
    "count of values": (_typed_with_wrong_count, "BAD_BYTE_COUNT", "topk_ids: typed values: got 7, want 8"),
    "typed id too wide": (_typed_too_wide, "EXPERT_ID_OUT_OF_RANGE", "got 1099511627776"),
    "zipf": (
        lambda r: r.topk_ids.CopyFrom(drawn([4, K], I32, zipf_exponent=float("nan"))),
        "BAD_TENSOR_SPELLING",
        "zipf_exponent",
    ),
    "layer": (lambda r: setattr(r, "layer", 9), "LAYER_NOT_HELD", "layer: got 9, want one of those held here: 0, 1"),
    "id too large": (_set_ids(8), "EXPERT_ID_OUT_OF_RANGE", "topk_ids[3, 0] of layer 0: got 8, want 0 to 7"),
    "id too small": (_set_ids(-2), "EXPERT_ID_OUT_OF_RANGE", "got -2"),
    "nan weight": (_nan, "NON_FINITE_WEIGHTS", "topk_weights[2, 1]: got nan"),
    "output dtype": (lambda r: setattr(r, "output_dtype", I32), "OUTPUT_DTYPE_UNSUPPORTED", "want BF16 (or 0)"),
    "output form": (lambda r: setattr(r, "output_form", 9), "OUTPUT_FORM_UNKNOWN", "got 9"),
    "input weights with top_k 2": (
        lambda r: setattr(r, "router_weight_on_input", True),
        "UNSUPPORTED_COMBINATION",
        "got top_k 2, want top_k 1",
    ),
    "grouped and routed": (
        lambda r: r.grouped.CopyFrom(pb.GroupedRows(expert_ids=[1], row_counts=[4])),
        "UNSUPPORTED_COMBINATION",
        "grouped: given together",
    ),
    "grouped rows": (_grouped([1, 2], [2, 3]), "BAD_SHAPE", "grouped.row_counts: got 5 rows, want the 4"),
    "grouped lengths": (_grouped([1, 2], [4]), "BAD_SHAPE", "2 expert_ids and 1 row_counts"),
    "grouped id": (_grouped([8], [4]), "EXPERT_ID_OUT_OF_RANGE", "got 8"),
    "too many tokens": (
        lambda r: r.CopyFrom(batch(MAX_TOKENS + 1)),
        "TOO_MANY_TOKENS",
        "got 65 tokens, want at most 64; split the batch",
    ),
    "message too large": (
        lambda r: setattr(r.hidden_states, "raw", b"\1" * (MAX_BYTES + 1)),
        "MESSAGE_TOO_LARGE",
        "want at most 131072",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_has_its_own_reason_and_harms_nobody(served, weights, name):
    change, reason, says = BAD[name]
    bad, good = spoilt(change), batch(4, seed=2, request_id=2)
    with pytest.raises(FailedError) as e:
        await served.call.forward(bad)
    assert e.value.reason == reason
    assert says in e.value.text
    assert not e.value.retryable
    bad.request_id = 1
    async with served.call.stream() as s:
        await s.send(forward=bad)
        await s.send(forward=good)
        both = [await s.receive(), await s.receive()]
    error, answer = sorted(both, key=lambda m: m.WhichOneof("kind") == "forward")
    assert (error.error.request_id, error.error.reason) == (1, reason)
    assert says in error.error.message
    assert error.error.code == grpc.StatusCode[e.value.code].value[0]
    check(weights, good, answer.forward)


async def test_bytes_that_are_no_message_fail_alone_on_a_stream(served, weights):
    good = batch(2, request_id=3)
    data = pb.StreamForwardRequest(forward=batch(2, request_id=77)).SerializeToString()
    async with served.call.stream() as s:
        await s.send_bytes(data[:-5])
        error = (await s.receive()).error
        assert (error.reason, error.request_id) == ("MALFORMED_MESSAGE", 77)
        await s.send_bytes(b"")
        assert (await s.receive()).error.reason == "MALFORMED_MESSAGE"
        await s.send(forward=good)
        check(weights, good, (await s.receive()).forward)


async def test_ids_of_requests_on_a_stream(served):
    with served.busy():
        async with served.call.stream() as s:
            await s.send(forward=batch(1))
            assert (await s.receive()).error.reason == "MISSING_REQUEST_ID"
            await s.send(forward=batch(1, request_id=1))
            await s.send(forward=batch(1, request_id=1))
            error = (await s.receive()).error
            assert (error.reason, error.request_id) == ("DUPLICATE_REQUEST_ID", 1)
            served.gate.set()
            assert (await s.receive()).forward.request_id == 1
            await s.send(forward=batch(1, request_id=1))
            assert (await s.receive()).forward.request_id == 1, "free again after its answer"


async def test_more_requests_than_a_stream_may_have_are_refused(served):
    with served.busy():
        async with served.call.stream() as s:
            for n in range(IN_FLIGHT + 1):
                await s.send(forward=batch(1, request_id=n + 1))
            error = (await s.receive()).error
            assert (error.reason, error.request_id, error.retryable) == (
                "TOO_MANY_REQUESTS_IN_FLIGHT",
                IN_FLIGHT + 1,
                True,
            )
            served.gate.set()
            done = {(await s.receive()).forward.request_id for _ in range(IN_FLIGHT)}
            assert done == set(range(1, IN_FLIGHT + 1))


async def test_a_full_queue_refuses_with_advice(served):
    with served.busy():
        calls = [asyncio.create_task(served.call.forward(batch(1)))]
        await asyncio.to_thread(served.entered.wait, 20)
        calls += [asyncio.create_task(served.call.forward(batch(1))) for _ in range(32)]
        await wait_for(lambda: served.engine.load().queued_requests == 33)
        with pytest.raises(FailedError, match="32 requests of 32 tokens waiting") as e:
            await served.call.forward(batch(1))
        assert (e.value.code, e.value.reason, e.value.retryable) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", True)
    await asyncio.gather(*calls)


# ---- deadlines, cancelling, sessions --------------------------------------------------------------------------------


async def test_a_request_whose_time_is_over_is_not_computed(served):
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=batch(5, request_id=1, timeout_us=20_000))
            await s.send(forward=batch(6, request_id=2, timeout_us=60_000_000))
            with pytest.raises(FailedError) as e:
                await served.call.forward(batch(7), timeout=0.05)
            assert e.value.code == "DEADLINE_EXCEEDED"
            served.gate.set()
            error, answer = sorted(
                [await s.receive(), await s.receive()], key=lambda m: m.WhichOneof("kind") == "forward"
            )
    await first
    assert (error.error.request_id, error.error.reason) == (1, "DEADLINE_EXCEEDED")
    assert answer.forward.request_id == 2
    assert served.kernels == [1, 6], "neither the 5 tokens nor the 7 were computed"


async def test_a_cancelled_request_is_answered_as_such_and_not_computed(served):
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=batch(5, request_id=1))
            await s.send(forward=batch(6, request_id=2))
            await s.send(cancel=pb.CancelRequest(request_id=1))
            await s.send(cancel=pb.CancelRequest(request_id=44))
            error = (await s.receive()).error
            assert (error.request_id, error.reason) == (1, "CANCELLED")
            unary = asyncio.create_task(served.call.forward(batch(7)))
            await wait_for(lambda: served.engine.load().queued_requests == 4)
            unary.cancel()
            await asyncio.gather(unary, return_exceptions=True)
            await asyncio.sleep(0.1)
            served.gate.set()
            assert (await s.receive()).forward.request_id == 2
    await first
    assert served.kernels == [1, 6]


async def test_a_stream_that_goes_away_takes_its_requests_along(served):
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            for n in range(3):
                await s.send(forward=batch(5, request_id=n + 1))
            await wait_for(lambda: served.engine.load().queued_requests == 4)
        await wait_for(lambda: served.server.service.open_calls == 1)
    await first
    await wait_for(served.engine.idle)
    assert served.kernels == [1]


async def test_a_session_offer_gets_a_verdict_for_each_transport(served):
    async with served.call.stream() as s:
        await s.send(session=pb.SessionOffer(transports=["shm", "nixl"], host_id="here"))
        answer = (await s.receive()).session
        assert [(v.transport, v.accepted, v.reason) for v in answer.verdicts] == [
            ("shm", False, "this server answers inline only"),
            ("nixl", False, "this server answers inline only"),
        ]
        await s.send(forward=batch(1, request_id=1))
        assert (await s.receive()).forward.request_id == 1


async def test_describe(served):
    brief = await served.call.describe()
    full = await served.call.describe(include_decisions=True)
    layer = full.layers[1]
    assert [(r.first, r.count) for r in layer.held] == [(1, 6)]
    assert (layer.layer, layer.num_experts, layer.top_k, layer.intermediate_size) == (1, 8, 2, 128)
    assert (layer.weight_scheme, layer.activation, layer.backend) == ("int4_g128", "silu_and_mul", "reference")
    assert (layer.activation_scheme, layer.checkpoint_activation_scheme) == ("none", "none")
    verdict = next(v for v in layer.verdicts if v.backend == "reference")
    assert verdict.eligible
    assert 0 < verdict.relative_error <= tolerance("bf16")
    assert all(v.refusals for v in layer.verdicts if not v.eligible)
    assert not brief.layers[1].verdicts
    assert (full.model.family, full.model.hidden_size) == ("qwen3_moe", H)
    assert (full.limits.max_tokens, full.limits.max_requests_in_flight) == (MAX_TOKENS, IN_FLIGHT)
    assert list(full.transports) == ["inline"]


# ---- the end --------------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_was_taken_and_refuses_the_rest(served, weights):
    mine = batch(3, request_id=1)
    with served.busy():
        unary = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=mine)
            await wait_for(lambda: served.engine.load().queued_requests == 2)
            end = asyncio.create_task(served.server.drain(20))
            told = await s.receive()
            assert told.load.draining
            await s.send(forward=batch(1, request_id=2))
            error = (await s.receive()).error
            assert (error.request_id, error.reason, error.code, error.retryable) == (2, "DRAINING", 14, True)
            with pytest.raises(FailedError) as e:
                await served.call.forward(batch(1))
            assert (e.value.code, e.value.reason, e.value.retryable) == ("UNAVAILABLE", "DRAINING", True)
            served.gate.set()
            check(weights, mine, (await s.receive()).forward)
            with pytest.raises(FailedError) as e:
                await s.receive()
            assert (e.value.code, e.value.reason) == ("UNAVAILABLE", "DRAINING")
    await unary
    assert await end


async def test_metrics_tell_what_happened(served):
    await served.call.forward(batch(4, seed=1))
    with pytest.raises(FailedError):
        await served.call.forward(batch(4, layer=9))
    async with served.call.stream() as s:
        await s.send(forward=batch(2, request_id=1, layer=1))
        await s.receive()
        await s.half_close()
        assert await s.receive() is None
    get = served.metrics.registry.get_sample_value
    # A batch is counted after its answers are given away; the last series of it stands for all.
    await wait_for(lambda: get("expertd_copy_seconds_count", {"direction": "out"}) == 2)
    await wait_for(lambda: get("expertd_expert_tokens_total", {"layer": "1", "expert": "1"}) is not None)
    rpc = {"grpc_service": "expertd.v1.ExpertService", "grpc_method": "Forward", "grpc_type": "unary"}
    stream = {"grpc_service": "expertd.v1.ExpertService", "grpc_method": "StreamForward", "grpc_type": "bidi_stream"}
    assert get("grpc_server_started_total", rpc) == 2
    assert get("grpc_server_handled_total", rpc | {"grpc_code": "OK"}) == 1
    assert get("grpc_server_handled_total", rpc | {"grpc_code": "NOT_FOUND"}) == 1
    assert get("grpc_server_handling_seconds_count", rpc) == 2
    assert get("grpc_server_msg_received_total", stream) == 1
    assert get("grpc_server_msg_sent_total", stream) == 1
    assert get("expertd_requests_total", {"code": "OK", "reason": ""}) == 2
    assert get("expertd_requests_total", {"code": "NOT_FOUND", "reason": "LAYER_NOT_HELD"}) == 1
    assert get("expertd_tokens_total", {"layer": "0"}) == 4
    assert get("expertd_batch_tokens_sum") == 6
    assert get("expertd_queue_seconds_count") == 2
    assert get("expertd_kernel_seconds_count", {"backend": "reference"}) == 2
    assert get("expertd_bytes_total", {"direction": "in"}) > 4 * H * 2
    assert get("expertd_bytes_total", {"direction": "out"}) > 4 * H * 2
    ids = values(batch(4, seed=1).topk_ids)
    for expert in range(1, 7):
        got = get("expertd_expert_tokens_total", {"layer": "0", "expert": str(expert)})
        assert got == int((ids == expert).sum())
    assert get("expertd_queued_tokens") == 0
    assert get("expertd_serving") == 1
