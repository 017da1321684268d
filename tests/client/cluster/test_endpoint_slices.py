"""A cluster follows a service's EndpointSlices, as an API server of this process tells them over HTTP."""

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from cluster_kit import E, Fake, batch, transports
from waiting import until

from expertd.errors import PlacementError
from expertd_client.cluster import EndpointSlices, ExpertCluster
from expertd_client.cluster import kubernetes as module
from expertd_client.cluster.sources import Source

kubernetes = pytest.importorskip("kubernetes", reason="the extra kubernetes is not installed")
pytestmark = pytest.mark.timeout(60)


def piece(name, *hosts, port=7070, ports=None, **conditions):
    """A slice whose endpoints are ready unless said otherwise: host=False."""
    ends = [{"addresses": [h], "conditions": {"ready": conditions.get(h.replace(".", "_"), True)}} for h in hosts]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {"name": name, "namespace": "moe", "labels": {"kubernetes.io/service-name": "experts"}},
        "endpoints": ends,
        "ports": ports if ports is not None else [{"name": "grpc", "port": port, "protocol": "TCP"}],
    }


class ApiServer:
    """Lists and watches of one service; asked: the query of each request; gone: how often it says 410 from now on."""

    def __init__(self):
        self.pieces, self.version, self.status, self.too_old, self.gone = {}, 100, 200, False, 0
        self.asked, self.watches, self.lock = [], [], threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                api.answer(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def say(self, kind, what):
        with self.lock:
            self.version += 1
            what["metadata"]["resourceVersion"] = str(self.version)
            if kind == "DELETED":
                self.pieces.pop(what["metadata"]["name"])
            else:
                self.pieces[what["metadata"]["name"]] = what
            for watch in self.watches:
                watch.put({"type": kind, "object": what})

    def answer(self, http):
        where = urlparse(http.path)
        query = {k: v[0] for k, v in parse_qs(where.query).items()}
        self.asked.append(query)
        assert where.path == "/apis/discovery.k8s.io/v1/namespaces/moe/endpointslices"
        assert query["labelSelector"] == "kubernetes.io/service-name=experts"
        if self.gone:
            self.gone -= 1
            self.body(http, 410, {"kind": "Status", "code": 410, "message": "gone"})
        elif self.status != 200:
            self.body(http, self.status, {"kind": "Status", "code": self.status, "message": "no"})
        elif query.get("watch"):
            self.watch(http, query)
        else:
            with self.lock:
                found = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.pieces.values())}
            self.body(http, 200, {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", **found})

    def body(self, http, status, value):
        raw = json.dumps(value).encode()
        http.send_response(status)
        http.send_header("Content-Type", "application/json")
        http.send_header("Content-Length", str(len(raw)))
        http.end_headers()
        http.wfile.write(raw)

    def watch(self, http, query):
        mine = queue.Queue()
        with self.lock:
            for one in self.pieces.values():  # what happened between the list and now
                if int(one["metadata"].get("resourceVersion", 0)) > int(query["resourceVersion"]):
                    mine.put({"type": "MODIFIED", "object": one})
            self.watches.append(mine)
            if self.too_old:
                self.too_old = False
                mine.put(
                    {
                        "type": "ERROR",
                        "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
                    }
                )
        http.send_response(200)
        http.send_header("Content-Type", "application/json")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        end_s = time.monotonic() + float(query["timeoutSeconds"])
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                line = json.dumps(mine.get(timeout=left_s)).encode() + b"\n"
                http.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                http.wfile.flush()
        except queue.Empty:
            http.wfile.write(b"0\r\n\r\n")
        except OSError:
            http.close_connection = True
        with self.lock:
            self.watches.remove(mine)


@pytest.fixture
def server():
    server = ApiServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


def source_of(server, **options):
    host = f"http://127.0.0.1:{server.http.server_port}"
    configuration = kubernetes.client.Configuration(host=host)
    configuration.retries = False
    api = kubernetes.client.DiscoveryV1Api(kubernetes.client.ApiClient(configuration))
    return EndpointSlices("experts", "moe", api=api, **options)


def test_ready_endpoints_of_all_slices(server):
    server.say("ADDED", piece("a", "10.0.0.2", "10.0.0.1", "10.0.0.3", **{"10_0_0_3": False}))
    server.say("ADDED", piece("b", "10.0.0.9", "10.0.0.1", **{"10_0_0_9": None}))
    server.say("ADDED", piece("six", "fd00::1"))
    server.say("ADDED", piece("empty", ports=[]))
    source = source_of(server)
    assert isinstance(source, Source)
    assert source.read() == ("10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.9:7070", "[fd00::1]:7070")


def test_a_change_comes_by_the_watch_at_once(server, monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 20)
    server.say("ADDED", piece("a", "10.0.0.1"))
    source = source_of(server)
    assert source.read() == ("10.0.0.1:7070",)
    timer = threading.Timer(0.3, server.say, ("ADDED", piece("b", "10.0.0.2")))
    timer.start()
    begin_s = time.monotonic()
    assert source.read() == ("10.0.0.1:7070", "10.0.0.2:7070")
    assert time.monotonic() - begin_s < 15
    server.say("MODIFIED", piece("a", "10.0.0.3"))  # while nobody watches
    assert source.read() == ("10.0.0.2:7070", "10.0.0.3:7070")
    timer = threading.Timer(0.2, server.say, ("DELETED", server.pieces["b"]))
    timer.start()
    assert source.read() == ("10.0.0.3:7070",)
    monkeypatch.setattr(module, "WATCH_S", 1)
    assert source.read() == ("10.0.0.3:7070",), "nothing changed"
    assert sum("watch" not in query for query in server.asked) == 1, "listed once"


def test_a_version_that_is_too_old_is_listed_anew(server):
    server.say("ADDED", piece("a", "10.0.0.1"))
    source = source_of(server)
    source.read()
    server.pieces = {"b": piece("b", "10.0.0.5")}
    server.too_old = True
    assert source.read() == ("10.0.0.5:7070",)


def test_an_api_that_always_says_gone_is_asked_once_more(server):
    server.say("ADDED", piece("a", "10.0.0.1"))
    source = source_of(server)
    source.read()
    server.gone = 10  # whoever asks again and again comes to an end, and gets an answer
    with pytest.raises(PlacementError, match="410"):
        source.read()
    assert server.gone >= 8
    server.gone = 0
    assert source.read() == ("10.0.0.1:7070",)


def test_what_cannot_be_read_says_what_it_needs(server):
    server.status = 403
    source = source_of(server)
    with pytest.raises(PlacementError, match=r"of moe/experts: got 403 Forbidden, want them; .*list and watch"):
        source.read()
    server.status = 200
    server.say("ADDED", piece("a", "10.0.0.1"))
    assert source.read() == ("10.0.0.1:7070",)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(PlacementError, match="want them"):
        source_of(server).read()


def test_one_port_is_meant(server):
    ports = [{"name": "grpc", "port": 7070}, {"name": "metrics", "port": 9090}]
    server.say("ADDED", piece("a", "10.0.0.1", ports=ports))
    with pytest.raises(PlacementError, match=r"moe/experts: ports: got .'grpc', 'metrics'., want one"):
        source_of(server).read()
    assert source_of(server, port="metrics").read() == ("10.0.0.1:9090",)
    with pytest.raises(PlacementError, match="want 'http'"):
        source_of(server, port="http").read()


def test_without_a_cluster_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(PlacementError, match="want a service account or a kubeconfig"):
        EndpointSlices("experts")


def test_a_cluster_follows_pods(server):
    servers = {f"10.0.0.{n}:7070": Fake({0: tuple(range(E))}) for n in (1, 2)}
    server.say("ADDED", piece("a", "10.0.0.1"))
    x, ids, w = batch(5)
    with ExpertCluster(source_of(server), transport=transports(servers), timeout_s=10.0) as cluster:
        cluster.forward(0, x, ids, w)
        server.say("MODIFIED", piece("a", "10.0.0.1", "10.0.0.2", **{"10_0_0_1": False}))
        until(lambda: list(cluster.servers) == ["10.0.0.2:7070"])
        answer = cluster.forward(0, x, ids, w)
        assert {part.server for part in answer.parts} == {"10.0.0.2:7070"}
        server.status = 500
        until(lambda: "500" in cluster.source_error)
        cluster.forward(0, x, ids, w)  # what was said before stays in force
