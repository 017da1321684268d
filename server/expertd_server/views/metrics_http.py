"""The HTTP endpoint: /metrics; /healthz, 200 while the server takes requests and 503 otherwise; and the page at /.

Few threads, and a time limit for each request: a client that sends half of one must not keep a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from expertd.common.accepting import REST_S, is_shortage, tell_shortage
from expertd_server.views.metrics import Metrics
from expertd_server.views.page import Page

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["MetricsHttp"]

_AT_ONCE, _LIMIT_S = 4, 5.0
"""Scrapes at once, beyond which connections are closed unread; and seconds for one, from its connection to its end."""


class MetricsHttp:
    """Serves `metrics`, and `page` where there is one, until close().  limit_s: for one scrape.  Raises OSError where
    the address is taken."""

    def __init__(
        self, metrics: Metrics, host: str, port: int, page: Page | None = None, limit_s: float = _LIMIT_S
    ) -> None:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._server = _Server(family, where, limit_s)
        self._server.set_app(_by_path(metrics, page))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="expertd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _by_path(metrics: Metrics, page: Page | None) -> WSGIApplication:
    scrape = make_wsgi_app(metrics.registry)

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        body = found(environ, start)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else body

    def found(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answered: Iterable[bytes] = scrape(environ, start)
            return answered
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _text(start, "405 Method Not Allowed", "want GET\n", [("Allow", "GET, HEAD")])
        if path == "/healthz":
            serving = metrics.is_serving
            return _text(start, "200 OK" if serving else "503 Service Unavailable", f"{_HEALTH[serving]}\n")
        if page is not None and path in ("/", "/page.json"):
            return _page(page, path, start)
        return _text(start, "404 Not Found", "want /metrics, /healthz, or / in a browser\n")

    return answer


_HEALTH = {True: "SERVING", False: "NOT_SERVING"}
"""The words of grpc.health.v1."""


def _text(start: StartResponse, status: str, text: str, more: Iterable[tuple[str, str]] = ()) -> Iterable[bytes]:
    body = text.encode()
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *more])
    return [body]


def _page(page: Page, path: str, start: StartResponse) -> Iterable[bytes]:
    policy = "default-src 'none'"
    body, kind = b"", "application/json"
    if path == "/":
        (body, policy), kind = page.html(), "text/html; charset=utf-8"
    else:
        body = page.facts()
    start("200 OK", [
        ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
        ("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
    ])  # fmt: skip
    return [body]


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, family: int, where: Any, limit_s: float) -> None:
        self.address_family = family
        self._limit_s = limit_s
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        """As WSGIServer's, without asking DNS for this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Rests where the process has no descriptor left: the connection waits, and would be there again at once."""
        try:
            return super().get_request()
        except OSError as e:
            if is_shortage(e):
                tell_shortage("metrics: scrapes", e)
                time.sleep(REST_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the host has no thread left
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        alarm = threading.Timer(self._limit_s, _hang_up, (request,))
        alarm.daemon = True
        alarm.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            alarm.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went, or was sent away, is no news."""


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
