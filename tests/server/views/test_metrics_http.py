"""/healthz, unknown paths, and /metrics under clients that send half of a request, or nothing."""

from __future__ import annotations

import contextlib
import http.client as http_client
import socket
import threading
import time
import types
import urllib.request

import pytest
from short import NoThreads, Shortage
from waiting import until

from expertd_server.views import metrics_http
from expertd_server.views.metrics import Metrics
from expertd_server.views.metrics_http import MetricsHttp

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def http():
    made = MetricsHttp(Metrics(), "127.0.0.1", 0, limit_s=1.0)
    yield made
    made.close()


def scrape(http: MetricsHttp) -> str:
    until(lambda: http._server._room._value == 4)  # those before have left
    with urllib.request.urlopen(f"http://127.0.0.1:{http.port}/metrics", timeout=20) as answer:
        return answer.read().decode()


def status(http: MetricsHttp, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http_client.HTTPConnection("127.0.0.1", http.port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_healthz_follows_what_the_server_takes():
    metrics = Metrics()
    with contextlib.closing(MetricsHttp(metrics, "127.0.0.1", 0)) as http:
        assert status(http, "/healthz") == (503, "NOT_SERVING\n")
        metrics.serving(True)
        assert status(http, "/healthz") == (200, "SERVING\n")
        assert status(http, "/healthz", "HEAD") == (200, "")
        metrics.serving(False)
        assert status(http, "/healthz") == (503, "NOT_SERVING\n")


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/nowhere"])
def test_the_answer_to_head_has_no_body(http, path):
    """By its bytes: http.client reads no body after HEAD."""
    with socket.create_connection(("127.0.0.1", http.port), timeout=20) as sock:
        sock.sendall(b"HEAD %s HTTP/1.0\r\n\r\n" % path.encode())
        said = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 ")
    assert body == b""


@pytest.mark.parametrize("path", ["/", "/page.json", "/metrics/", "/healthz2", "/nowhere"])
def test_an_unknown_path_is_404(http, path):
    assert status(http, path) == (404, "want /metrics, /healthz, or / in a browser\n")


def test_nothing_is_posted(http):
    assert status(http, "/healthz", "POST")[0] == 405
    assert "expertd_serving" in status(http, "/metrics")[1]


def test_half_requests_take_few_threads_and_go_in_time(http):
    before = threading.active_count()
    held = []
    for _ in range(50):
        sock = socket.create_connection(("127.0.0.1", http.port), timeout=5)
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        held.append(sock)
    until_s, most = time.monotonic() + 20, 0
    while threading.active_count() > before:
        most = max(most, threading.active_count() - before)
        assert time.monotonic() < until_s, "they stay"
        time.sleep(0.005)
    assert most <= 16, "four at once and their alarms, and as many that are about to end"
    for sock in held:
        sock.settimeout(20)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b"", "hung up on"
        sock.close()
    assert "expertd_serving" in scrape(http)


def test_who_sends_a_byte_now_and_then_is_hung_up_on_too(http):
    with socket.create_connection(("127.0.0.1", http.port), timeout=5) as sock:
        begin = time.monotonic()
        with contextlib.suppress(OSError):  # a broken pipe, or a reset
            while time.monotonic() - begin < 20:
                sock.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begin < 20
    assert "expertd_serving" in scrape(http)


def test_many_scrapes_one_after_another_are_all_answered(http):
    assert all("expertd_serving" in scrape(http) for _ in range(20))


def test_without_descriptors_it_rests_and_the_scrape_waits(http, monkeypatch):
    free, rested = threading.Event(), []

    def rest(seconds):
        rested.append(seconds)
        free.wait(20)

    monkeypatch.setattr(metrics_http, "time", types.SimpleNamespace(sleep=rest), raising=False)
    shortage = Shortage(monkeypatch)
    shortage.lasts = True
    with socket.create_connection(("127.0.0.1", http.port), timeout=20) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        try:
            until(lambda: rested)
            assert shortage.asked == 1
            shortage.lasts = False
        finally:
            free.set()
        assert sock.recv(9) == b"HTTP/1.0 "


def test_without_threads_no_place_is_lost(http, monkeypatch):
    short = NoThreads(monkeypatch, "process_request_thread")
    for _ in range(6):  # more than there are places
        with (
            socket.create_connection(("127.0.0.1", http.port), timeout=20) as sock,
            contextlib.suppress(ConnectionError),
        ):
            assert sock.recv(1) == b""
    assert short.asked == 6
    short.lasts = False
    assert "expertd_serving" in scrape(http)
