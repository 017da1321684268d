"""The metrics endpoint: what a scrape sees."""

from __future__ import annotations

import importlib.metadata
import time
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd_server.engine.report import BatchReport, LoadNow, Waits
from expertd_server.engine.request import Stages
from expertd_server.engine.served import ServedLayer
from expertd_server.views.call_metrics import Rpc
from expertd_server.views.metrics import BackendFacts, Metrics
from expertd_server.views.metrics_http import MetricsHttp


@pytest.fixture
def metrics():
    return Metrics()


CALL = {"grpc_type": "unary", "grpc_service": "expertd.v1.ExpertService", "grpc_method": "Forward"}


class Scrape:
    """Samples by name and labels, from the text that the endpoint gives."""

    def __init__(self, http: MetricsHttp) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{http.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
        self.samples = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))


def report(tokens, expert_tokens, held=(4, 6)) -> BatchReport:
    layer = ServedLayer(3, 8, held, 2, 16, 32, None, "reference")
    stages = Stages(10, 20_000, 30)
    return BatchReport(layer, "reference", tokens, 2, Waits.of([1_000, 3_000_000]), stages, np.array(expert_tokens))


def test_a_scrape_sees_batches_experts_and_calls(metrics):
    rpc = Rpc(metrics.calls, "unary", "Forward")
    rpc.started()
    rpc.ended("OK", 0.25, 1500, 3000)
    metrics.batch(report(5, [3, 0]))
    metrics.batch(report(7, [1, 6]))
    metrics.answered("NOT_FOUND", "LAYER_NOT_HELD")
    metrics.hold([BackendFacts(3, "reference", "int4_g128", "none", "cpu:x86_64", "order", False)])
    metrics.booted({"pack": 1.5}, {"hit": 3, "stale": 1})
    metrics.watch_load(lambda: LoadNow(11, 2, 1.0, False, 30_000_000))
    http = MetricsHttp(metrics, "127.0.0.1", 0)
    try:
        get = Scrape(http)
    finally:
        http.close()
    assert get("expertd_expert_tokens_total", layer="3", expert="4") == 4
    assert get("expertd_expert_tokens_total", layer="3", expert="6") == 6
    assert get("expertd_tokens_total", layer="3") == 12
    (build,) = [dict(labels) for name, labels in get.samples if name == "expertd_build_info"]
    assert build["version"] == importlib.metadata.version("expertd")
    assert build["torch"] == importlib.metadata.version("torch")
    assert get("grpc_server_handled_total", **CALL, grpc_code="OK") == 1
    assert get("grpc_server_handling_seconds_sum", **CALL) == 0.25
    method = {"grpc_method": "expertd.v1.ExpertService/Forward"}
    assert get("grpc_server_call_started_total", **method) == 1
    method["grpc_status"] = "OK"
    assert get("grpc_server_call_duration_seconds_bucket", **method, le="0.2") == 0
    assert get("grpc_server_call_duration_seconds_bucket", **method, le="0.25") == 1
    assert get("grpc_server_call_rcvd_total_compressed_message_size_bytes_sum", **method) == 1500
    assert get("grpc_server_call_sent_total_compressed_message_size_bytes_bucket", **method, le="2048.0") == 0
    assert get("grpc_server_call_sent_total_compressed_message_size_bytes_bucket", **method, le="4096.0") == 1
    assert get("expertd_routes_total", layer="3") == 10
    assert get("process_resident_memory_bytes") > 1 << 20
    assert get("expertd_batch_tokens_sum") == 12
    assert get("expertd_batch_requests_count") == 2
    assert get("expertd_queue_seconds_count") == 4
    assert get("expertd_queue_seconds_sum") == pytest.approx(0.006002)
    assert get("expertd_kernel_seconds_sum", backend="reference") == pytest.approx(40e-6)
    assert get("expertd_copy_seconds_sum", direction="out") == pytest.approx(60e-9)
    assert get("expertd_requests_total", code="NOT_FOUND", reason="LAYER_NOT_HELD") == 1
    info = {"layer": "3", "backend": "reference", "weight_scheme": "int4_g128", "device": "cpu:x86_64"}
    assert get("expertd_backend_info", activation_scheme="none", chosen_by="order", from_cache="false", **info) == 1
    assert get("expertd_boot_seconds", stage="pack") == 1.5
    assert get("expertd_cache_lookups_total", outcome="hit") == 3
    assert get("expertd_queued_tokens") == 11
    assert get("expertd_queued_requests") == 2
    assert get("expertd_predicted_wait_seconds") == pytest.approx(0.03)
    assert get("expertd_serving") == 0
    call = {"grpc_type": "unary", "grpc_service": "expertd.v1.ExpertService", "grpc_method": "Forward"}
    assert get("grpc_server_started_total", **call) == 1
    assert get("grpc_server_handled_total", grpc_code="OK", **call) == 1


def test_a_taken_port_is_an_error(metrics):
    http = MetricsHttp(metrics, "127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            MetricsHttp(Metrics(), "127.0.0.1", http.port)
    finally:
        http.close()


def samples(metrics: Metrics) -> set[str]:
    return {s.name for m in metrics.registry.collect() for s in m.samples}


def test_experts_have_series_of_their_own_on_request():
    few, many = Metrics(each_expert=False), Metrics(each_expert=True)
    for metrics in (few, many):
        metrics.batch(report(5, [3, 0]))
    assert samples(many) - samples(few) == {"expertd_expert_tokens_total"}
    assert few.registry.get_sample_value("expertd_routes_total", {"layer": "3"}) == 3


def test_the_imbalance_is_of_those_held_and_of_lately(monkeypatch):
    metrics, now_s = Metrics(each_expert=False), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def imbalance() -> float | None:
        return metrics.registry.get_sample_value("expertd_expert_imbalance", {"layer": "3"})

    assert imbalance() is None
    metrics.batch(report(5, [30, 10]))
    assert imbalance() == 1.5, "30 against a mean of 20"
    assert imbalance() == 1.5, "who looks twice sees the same"
    now_s += 600
    metrics.batch(report(5, [10, 10]))
    assert imbalance() == pytest.approx(1.0, abs=2e-3), "ten minutes ago is forgotten"
    now_s += 3600
    assert imbalance() == 0.0, "nothing was routed lately"


def test_the_plan_of_memory_is_told_by_what_it_is_for():
    metrics = Metrics()
    metrics.plan({"weights": 100, "scratch": 7})
    metrics.plan({"weights": 50, "scratch": 7})
    assert metrics.registry.get_sample_value("expertd_planned_bytes", {"what": "weights"}) == 50
