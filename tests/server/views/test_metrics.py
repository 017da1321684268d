"""The metrics endpoint: what a scrape sees."""

from __future__ import annotations

import importlib.metadata
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd_server.engine.report import BatchReport, LoadNow, Waits
from expertd_server.engine.request import Stages
from expertd_server.engine.served import ServedLayer
from expertd_server.views.metrics import BackendFacts, Metrics, Rpc
from expertd_server.views.metrics_http import MetricsHttp


@pytest.fixture
def metrics():
    return Metrics()


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
    rpc = Rpc(metrics, "unary", "Forward")
    rpc.started()
    rpc.finished("OK")
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
    assert get("expertd_build_info", version=importlib.metadata.version("expertd")) == 1
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
