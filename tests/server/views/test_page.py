"""The page at /: what /page.json says, that the page may run nothing but its own script, and how a browser shows it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request

import numpy as np
import pytest

from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.report import BatchReport, Waits
from expertd_server.engine.request import Stages
from expertd_server.engine.served import ServedLayer
from expertd_server.views import page as pages
from expertd_server.views.metrics import Metrics
from expertd_server.views.metrics_http import MetricsHttp
from expertd_server.views.page import Page

pytestmark = pytest.mark.timeout(60)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser"))), None)


def described(decisions: bool) -> pb.DescribeResponse:
    layers = [
        pb.Layer(
            layer=n, num_experts=8, held=[pb.ExpertRange(first=2, count=3)], top_k=2, weight_scheme="int4_g128",
            activation_scheme="none", backend="cpu", chosen_by="order",
            verdicts=[pb.BackendVerdict(backend="gluon_sm90", refusals=["needs <b>Hopper</b>"])] * decisions,
        )
        for n in (0, 1, 2, 5)
    ]  # fmt: skip
    return pb.DescribeResponse(version="1.2.3", model=pb.Model(family="qwen3_moe", hidden_size=64), layers=layers)


@pytest.fixture
def metrics():
    made = Metrics(each_expert=False)
    made.serving(True)
    layer = ServedLayer(1, 8, (2, 3, 4), 2, 16, 32, None, "cpu")
    waits = Waits.of([1_000, 3_000_000])
    made.batch(BatchReport(layer, "cpu", 5, 2, waits, Stages(10, 20_000, 30), np.array([6, 0, 3])))
    made.answered(requests=2)
    return made


@pytest.fixture
def http(metrics):
    made = MetricsHttp(metrics, "127.0.0.1", 0, Page(metrics, described))
    yield made
    made.close()


def get(http: MetricsHttp, path: str):
    with urllib.request.urlopen(f"http://127.0.0.1:{http.port}{path}", timeout=10) as answer:
        return answer.headers, answer.read()


def test_what_it_shows(http):
    headers, body = get(http, "/page.json")
    facts = json.loads(body)
    assert headers["Cache-Control"] == "no-store"
    (group,) = facts["groups"]
    assert (group["layers"], group["experts"], group["backend"]) == ("0-2,5", "2-4", "cpu")
    assert group["verdicts"] == [{"backend": "gluon_sm90", "refusals": ["needs <b>Hopper</b>"]}]
    assert facts["now"]["expertd_serving"] == 1
    assert facts["counts"] == {"expertd_requests_total OK": 2, "expertd_tokens_total 1": 5}
    (experts,) = facts["experts"]
    assert (experts["layer"], experts["imbalance"]) == (1, pytest.approx(2.0))
    assert np.allclose(experts["recent"], [[2, 6.0], [3, 0.0], [4, 3.0]], rtol=1e-3)
    waits = facts["times"]["expertd_queue_seconds"]
    assert waits[-1] == ["+Inf", 2.0]
    assert "expertd_kernel_seconds cpu" in facts["times"]


def test_an_answer_serves_for_a_moment(http, metrics, monkeypatch):
    monkeypatch.setattr(pages, "_KEPT_S", 20.0)
    first = get(http, "/page.json")[1]
    metrics.answered()
    assert get(http, "/page.json")[1] == first
    monkeypatch.setattr(pages, "_KEPT_S", 0.0)
    assert json.loads(get(http, "/page.json")[1])["counts"]["expertd_requests_total OK"] == 3


def test_it_may_run_its_own_script_and_load_nothing(http):
    headers, body = get(http, "/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Content-Type"].startswith("text/html")
    text = body.decode()
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("  // ", ""), "an address, or a comment"
    assert "innerHTML" not in text, "what a server says is text"


def test_metrics_are_where_they_were(http):
    assert b"expertd_serving 1.0" in get(http, "/metrics")[1]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: chromium-headless-shell)")
def test_a_browser_shows_it(http, tmp_path):
    command = [CHROMIUM, "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=9000"]
    done = subprocess.run(
        [*command, "--dump-dom", f"http://127.0.0.1:{http.port}/"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    shown = done.stdout
    assert '<span id="state" class="state good">serving</span>' in shown
    assert "0-2,5" in shown
    assert "needs &lt;b&gt;Hopper&lt;/b&gt;" in shown, "as text"
    assert "Hottest: layer 1, 2.00 times its mean." in shown
    assert "requests/s" in shown
