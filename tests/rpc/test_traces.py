"""Spans of traced requests over every transport, with OpenTelemetry's own SDK, and exemplars in a scrape."""

from __future__ import annotations

import itertools
import time
import urllib.request

import grpc
import numpy as np
import pytest
from core_library import needs_core
from in_process import hosts

from expertd.errors import ExpertIdOutOfRangeError, LayerNotHeldError
from expertd.kserve import inference_pb2 as kserve
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_client import ExpertClient
from expertd_server.boot.assignment import BootError
from expertd_server.config.values import Address
from expertd_server.host.host import Host

pytest.importorskip("opentelemetry.sdk", reason="the extra `test` has it: pip install opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

pytestmark = pytest.mark.timeout(90)

HERE = Address("127.0.0.1", 0)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"
STAGES = ["queue", "collect", "kernel", "deliver"]
WAYS = {
    "unary": ({"shm": "off"}, {"unary": True}),
    "inline": ({"shm": "off"}, {}),
    "shm": ({"shm": "on"}, {}),
    "tcp": ({"shm": "off", "tcp_listen": HERE}, {}),
}
"""Transport -> options of the server, and of the client."""


@pytest.fixture(scope="module")
def exporter():
    """Of the process's provider, which OpenTelemetry sets once."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter):
    """spans(n): the spans so far, once there are n."""
    exporter.clear()

    def spans(n: int):
        until_s = time.monotonic() + 10
        while len(exporter.get_finished_spans()) < n and time.monotonic() < until_s:
            time.sleep(0.01)
        return list(exporter.get_finished_spans())

    return spans


@pytest.fixture
def serve(exporter):
    with hosts(synthetic="tiny:int4_g128", traces=True) as start:
        yield start


def ask(client: ExpertClient, layer: int = 0, **more):
    ids = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    return client.forward(layer, x, ids, np.full((3, 2), 0.5, np.float32), **more)


def connect(host: Host, way: str) -> ExpertClient:
    client = ExpertClient(host.address, timeout_s=20, **WAYS[way][1])
    if way in ("shm", "tcp"):
        assert client.session().transport == way
    return client


def check(told, transport: str) -> None:
    """The spans of one request: as its own times say, under its caller's."""
    root = next(s for s in told if s.kind is trace.SpanKind.SERVER)
    stages = [s for s in told if s is not root]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert root.parent.is_remote
    assert root.name == "expertd.v1.ExpertService/" + ("Forward" if transport == "unary" else "StreamForward")
    told_of = {k.removeprefix("expertd."): v for k, v in root.attributes.items() if k.startswith("expertd.")}
    assert told_of.pop("backend") in ("cpu", "cpu_torch", "reference")
    assert told_of == {
        "transport": transport,
        "layer": 0,
        "tokens": 3,
        "top_k": 2,
        "batch_tokens": 3,
        "batch_requests": 1,
    }
    assert sorted(s.name for s in stages) == sorted(STAGES)
    stages.sort(key=lambda s: STAGES.index(s.name))
    assert all(s.parent.span_id == root.context.span_id for s in stages)
    assert all(a.end_time <= b.start_time for a, b in itertools.pairwise(stages))
    assert all(s.start_time <= s.end_time for s in stages)
    assert root.start_time <= stages[0].start_time
    assert stages[-1].end_time <= root.end_time
    assert stages[2].end_time > stages[2].start_time, "the kernel takes time"
    assert abs(root.end_time - time.time_ns()) < 60e9


@needs_core
@pytest.mark.parametrize("way", WAYS)
def test_a_traced_request_is_spans_of_its_callers_trace(serve, spans, way):
    host = serve(**WAYS[way][0])
    with connect(host, way) as client:
        ask(client)
        ask(client, traceparent=UNSAMPLED)
        ask(client, traceparent="nonsense")
        ask(client, traceparent=PARENT)
    told = spans(5)
    assert len(told) == 5, "one request of four is traced"
    check(told, way)


def test_the_context_of_a_call_is_that_of_its_metadata(serve, spans):
    host = serve(shm="off")
    request = pb.ForwardRequest(layer=0, request_id=1)
    tensors = (("hidden_states", [3, 256], "BF16"), ("topk_ids", [3, 2], "I32"), ("topk_weights", [3, 2], "F32"))
    for name, shape, dtype in tensors:
        tensor = getattr(request, name)
        tensor.dtype, tensor.synthetic.seed = pb.DataType.Value(f"DATA_TYPE_{dtype}"), 1
        tensor.shape.extend(shape)
    with grpc.insecure_channel(host.address) as channel:
        stub = ExpertServiceStub(channel)
        stub.Forward(request, metadata=(("traceparent", PARENT),), timeout=20)
        check(spans(5), "unary")
        messages = iter([pb.StreamForwardRequest(forward=request)])
        list(stub.StreamForward(messages, metadata=(("traceparent", PARENT),), timeout=20))
        check(spans(10)[5:], "inline")


@needs_core
@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_refused_request_is_a_span_with_its_reason(serve, spans, way):
    host = serve(**WAYS[way][0])
    with connect(host, way) as client, pytest.raises(LayerNotHeldError):
        ask(client, layer=77, traceparent=PARENT)
    (told,) = spans(1)
    assert told.status.status_code is trace.StatusCode.ERROR
    assert told.attributes["error.type"] == "LAYER_NOT_HELD"


@needs_core
@pytest.mark.parametrize("way", WAYS)
def test_a_call_within_a_span_is_told_of_without_a_word(serve, spans, way):
    host = serve(**WAYS[way][0])
    tracer = trace.get_tracer("caller")
    with connect(host, way) as client, tracer.start_as_current_span("step") as step:
        ask(client)
    told = spans(6)
    assert {s.context.trace_id for s in told} == {step.get_span_context().trace_id}
    (root,) = [s for s in told if s.kind is trace.SpanKind.SERVER]
    assert root.parent.span_id == step.get_span_context().span_id


@needs_core
@pytest.mark.parametrize("way", WAYS)
def test_nobody_is_told_where_traces_are_off(serve, spans, way):
    host = serve(**WAYS[way][0], traces=False)
    with connect(host, way) as client:
        ask(client, traceparent=PARENT)
        host.engine.delivery.report(scraped=True)
    host.close()
    assert spans(0) == []


BATCH = {f"expertd_{name}_bucket" for name in (
    "queue_seconds", "kernel_seconds", "copy_seconds", "batch_tokens", "batch_requests",
)}  # fmt: skip
CALL = {f"grpc_server_{name}_bucket" for name in (
    "handling_seconds", "call_duration_seconds", "call_rcvd_total_compressed_message_size_bytes",
    "call_sent_total_compressed_message_size_bytes",
)}  # fmt: skip


def scrape(host: Host, accept: str) -> str:
    at = f"http://127.0.0.1:{host._http.port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(at, headers={"Accept": accept}), timeout=5) as answer:
        return answer.read().decode()


def exemplified(host: Host, names: set[str]) -> dict[str, list[tuple[object, float]]]:
    """(sample, how many are in its bucket alone) of those with an exemplar, by name, once there are `names`."""
    found: dict[str, list[tuple[object, float]]] = {}
    end_s = time.monotonic() + 20  # a span is told before its exemplar
    while not names <= set(found) and time.monotonic() < end_s:
        found, before = {}, {}
        text = scrape(host, "application/openmetrics-text; version=1.0.0")
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "le")
                if sample.exemplar is not None:
                    found.setdefault(sample.name, []).append((sample, sample.value - before.get(series, 0.0)))
                before[series] = sample.value
    return found


def checked_exemplars(host: Host, spans, want: set[str]) -> dict[str, list[tuple[object, float]]]:
    """Two requests were traced: each of the histograms that `want` names has one of them, where it was counted."""
    roots = [s for s in spans(10) if s.kind is trace.SpanKind.SERVER]
    found = exemplified(host, want)
    assert set(found) == want
    assert {s.labels["direction"] for s, _ in found["expertd_copy_seconds_bucket"]} == {"in", "out"}
    ids = {f"{s.context.span_id:016x}" for s in roots}
    for samples in found.values():
        for sample, counted in samples:
            assert sample.exemplar.labels["trace_id"] == TRACE
            assert sample.exemplar.labels["span_id"] in ids
            assert 0 <= sample.exemplar.value <= float(sample.labels["le"])
            assert counted >= 1, f"nothing is counted in the bucket of {sample}"
    for name, value in (("expertd_batch_tokens_bucket", 3), ("expertd_batch_requests_bucket", 1)):
        assert [s.exemplar.value for s, _ in found[name]] == [value]
    assert "trace_id" not in scrape(host, "text/plain")
    return found


@needs_core
@pytest.mark.parametrize("way", WAYS)
def test_histograms_have_the_trace_as_exemplar(serve, spans, way):
    host = serve(**WAYS[way][0], metrics_listen=HERE)
    with connect(host, way) as client:
        for _ in range(2):
            ask(client)
            ask(client, traceparent=PARENT)
        host.engine.delivery.report(scraped=True)
        found = checked_exemplars(host, spans, BATCH | (CALL if way == "unary" else set()))
    assert all(s.exemplar.value > 0 for s, _ in found["expertd_copy_seconds_bucket"])


def test_a_call_of_no_tokens_is_of_no_batch(serve, spans):
    host = serve(shm="off", metrics_listen=HERE)
    none = np.empty((0, 2), np.int32)
    with connect(host, "unary") as client:
        client.forward(0, np.empty((0, 256), np.float32), none, none.astype(np.float32), traceparent=PARENT)
        assert set(exemplified(host, CALL)) == CALL


def test_a_call_that_fails_is_an_exemplar_of_its_status(serve, spans):
    host = serve(shm="off", metrics_listen=HERE)
    with connect(host, "unary") as client, pytest.raises(ExpertIdOutOfRangeError):
        client.forward(0, np.ones((1, 256), np.float32), np.int32([[99, 0]]), np.ones((1, 2), np.float32),
                       traceparent=PARENT)  # fmt: skip
    (told,) = spans(1)
    assert told.attributes["error.type"] == "EXPERT_ID_OUT_OF_RANGE"
    found = exemplified(host, CALL)
    assert set(found) == CALL
    assert {s.labels["grpc_status"] for s, _ in found["grpc_server_call_duration_seconds_bucket"]} == {
        "INVALID_ARGUMENT"
    }


def test_a_facades_call_has_its_own_name(serve, spans):
    host = serve(shm="off", kserve=True, metrics_listen=HERE)
    x, ids, weights = np.ones((3, 256), np.float32), np.tile(np.int32([0, 1]), (3, 1)), np.full((3, 2), 0.5, np.float32)
    request = kserve.ModelInferRequest(model_name="layer_0")
    for name, a in (("hidden_states", x), ("topk_ids", ids), ("topk_weights", weights)):
        request.inputs.add(name=name, datatype="INT32" if a.dtype == np.int32 else "FP32", shape=a.shape)
        request.raw_input_contents.append(a.tobytes())
    with grpc.insecure_channel(host.address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(request.SerializeToString(), metadata=(("traceparent", PARENT),), timeout=20)
    (root,) = [s for s in spans(5) if s.kind is trace.SpanKind.SERVER]
    assert root.name == "inference.GRPCInferenceService/ModelInfer"
    found = exemplified(host, CALL)
    assert {s.labels["grpc_method"] for s, _ in found["grpc_server_handling_seconds_bucket"]} == {"ModelInfer"}


def test_traces_without_the_package_say_what_to_install(serve, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(BootError, match="pip install 'opentelemetry-api"):
        serve()
