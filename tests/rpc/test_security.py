"""TLS, mTLS, tokens and rights over a real socket, with certificates made here."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import ssl
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from in_process import hosts
from waiting import until

from expertd.errors import ExpertdError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from expertd.shm.region import host_id
from expertd.tcp.entry import connect, enter, parse_endpoint
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import Credentials, ExpertClient
from expertd_client.transports.credentials import Rotating
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.shm.connection import ShmTransport, enter_session
from expertd_client.transports.tcp.connection import TcpTransport
from expertd_server.boot.assignment import BootError
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address
from expertd_server.host.host import Host
from expertd_server.service.access import Admitted
from expertd_server.transports import security
from expertd_server.transports.x509 import certificate_until_s

pytest.importorskip("cryptography", reason="makes certificates; pip install cryptography (the extra `test` has it)")

from certificates import Authority
from cryptography import x509

pytestmark = pytest.mark.timeout(90)

TOKEN, OTHER = "s3cret-s3cret-s3cret", "an0ther-an0ther-an0ther"
RIGHT_LOST = f'[callers.pool]\ntokens = ["{TOKEN}"]\nrights = ["describe"]\n'
TINY = {"synthetic": "tiny:int4_g128", "device": "cpu", "backend": "reference", "threads": 1}


@pytest.fixture
def serve():
    with hosts(**TINY) as start:
        yield start


@pytest.fixture
def ca(tmp_path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def tls(ca) -> dict[str, Path]:
    certificate, key = ca.sign("localhost")
    return {"tls_cert": certificate, "tls_key": key}


def call(address: str, credentials: Credentials | None = None, unary=False, **more) -> None:
    """One request, which has to be answered."""
    ids = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    x = np.ones((3, 256), np.float32)
    with ExpertClient(address, credentials=credentials, unary=unary, timeout_s=10) as client:
        answer = client.forward(0, x, ids, np.full((3, 2), 0.5, np.float32), **more)
        assert answer.routes_computed == 6


def fails(address: str, credentials: Credentials | None = None) -> str:
    """What a call ends with that never comes to the server's methods."""
    with pytest.raises((UnavailableError, ExpertdError)) as e:
        call(address, credentials)
    return str(e.value)


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unary", [False, True])
def test_tls_is_taken_by_those_who_know_its_authority(serve, ca, tls, unary):
    host = serve(**tls)
    call(host.address, Credentials(ca=ca.ca), unary)


def test_who_does_not_trust_the_server_does_not_talk_to_it(serve, ca, tls, tmp_path):
    host = serve(**tls)
    stranger = Authority(tmp_path / "other", "other")
    assert "CERTIFICATE_VERIFY_FAILED" in fails(host.address, Credentials(ca=stranger.ca))
    assert fails(host.address)  # plain text
    call(host.address, Credentials(ca=ca.ca))


def test_an_expired_certificate_and_one_of_another_host_are_not_taken(serve, ca):
    expired = serve(**dict(zip(("tls_cert", "tls_key"), ca.sign("old", days=(-2, -1)), strict=True)))
    assert "CERTIFICATE_VERIFY_FAILED" in fails(expired.address, Credentials(ca=ca.ca))
    elsewhere = ca.sign("elsewhere", alternative="elsewhere.example")
    other = serve(**dict(zip(("tls_cert", "tls_key"), elsewhere, strict=True)))
    assert fails(other.address, Credentials(ca=ca.ca))
    call(other.address, Credentials(ca=ca.ca, server_name="elsewhere.example"))


def test_mtls_wants_a_certificate_of_its_authority(serve, ca, tls, tmp_path):
    host = serve(**tls, tls_client_ca=ca.ca)
    good, expired = ca.sign("worker"), ca.sign("late", days=(-2, -1))
    foreign = Authority(tmp_path / "other", "other").sign("worker")
    call(host.address, Credentials(ca=ca.ca, certificate=good[0], key=good[1]))
    assert fails(host.address, Credentials(ca=ca.ca))
    assert fails(host.address, Credentials(ca=ca.ca, certificate=expired[0], key=expired[1]))
    assert fails(host.address, Credentials(ca=ca.ca, certificate=foreign[0], key=foreign[1]))


def test_certificates_are_replaced_under_load_and_nothing_fails(serve, ca, tls):
    """20 times, while clients come and go and one stays."""
    host = serve(**tls)
    show = Credentials(ca=ca.ca)
    failed, answered, over = [], [0], threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            try:
                call(host.address, show)
                answered[0] += 1
            except ExpertdError as e:
                failed.append(str(e))

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for t in threads:
        t.start()
    with ExpertClient(host.address, credentials=show, timeout_s=10) as stays:
        for _ in range(20):
            ca.sign("localhost")  # in place: certificate, then key; between them they are no pair
            time.sleep(0.1)
            stays.describe()
    over.set()
    for t in threads:
        t.join(20)
    assert not failed
    assert answered[0] > 20
    reloads = host.metrics.registry.get_sample_value("expertd_reloads_total", {"what": "tls", "outcome": "ok"})
    assert reloads is not None
    assert reloads >= 10


def test_the_authority_of_clients_is_replaced_under_load_and_nothing_fails(serve, ca, tls, tmp_path):
    """From the old one to both, then to the new one, while clients come and go and strangers send no handshake."""
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    of_old, of_new = ((a.ca.read_bytes(), Credentials(True, ca.ca, *a.sign("worker"))) for a in (old, new))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(of_old[0])
    host = serve(**tls, tls_client_ca=trusted)
    show, failed, answered, over = [of_old[1]], [], [0], threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            try:
                call(host.address, show[0])
                answered[0] += 1
            except ExpertdError as e:
                failed.append(str(e))

    def no_handshakes() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(_split(host.address), 10) as sock:
                sock.sendall(os.urandom(200))
                sock.recv(64)

    def put(data: bytes) -> None:
        (tmp_path / "next.pem").write_bytes(data)
        os.replace(tmp_path / "next.pem", trusted)

    def some_calls() -> None:
        wanted = answered[0] + 8
        until(lambda: answered[0] >= wanted or failed)

    threads = [threading.Thread(target=target, daemon=True) for target in (come_and_go, come_and_go, no_handshakes)]
    for t in threads:
        t.start()
    try:
        with ExpertClient(host.address, credentials=of_old[1], timeout_s=30) as stays:
            stays.describe()
            some_calls()
            assert fails(host.address, of_new[1])
            put(b"half of")  # what was good stays
            some_calls()
            put(of_old[0] + of_new[0])
            some_calls()
            show[0] = of_new[1]
            some_calls()
            call(host.address, of_old[1])
            some_calls()  # no call of the old one's is under way
            put(of_new[0])
            some_calls()
            assert fails(host.address, of_old[1])
            stays.describe()  # a connection that stands stays
    finally:
        over.set()
        for t in threads:
            t.join(30)
    assert not failed
    seen = host.metrics.registry.get_sample_value
    assert seen("expertd_reloads_total", {"what": "tls", "outcome": "ok"}) == 2
    assert seen("expertd_reloads_total", {"what": "tls", "outcome": "broken"}) == 1


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_new_certificates_wait_for_handshakes_that_have_just_begun(ca, tls, monkeypatch):
    """gRPC holds its lock while it asks: nobody begins one meanwhile."""
    asked, waited = [], []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, fetch, **_: asked.append(fetch))
    monkeypatch.setattr(security.time, "sleep", waited.append)
    security.tls_credentials(security.Security(tls["tls_cert"], tls["tls_key"]), lambda what, good: None)
    [fetch] = asked
    assert fetch() is None
    assert not waited
    ca.sign("localhost")
    assert fetch() is not None
    assert waited == [security._SETTLE_S]
    assert fetch() is None
    assert len(waited) == 1


def test_broken_files_leave_what_was_good_and_are_told(serve, ca, tls, caplog):
    host = serve(**tls)
    good = tls["tls_key"].read_bytes()
    tls["tls_key"].write_text("no key")
    call(host.address, Credentials(ca=ca.ca))
    call(host.address, Credentials(ca=ca.ca))
    count = host.metrics.registry.get_sample_value
    assert count("expertd_reloads_total", {"what": "tls", "outcome": "broken"}) == 1, "once, not each time"
    assert count("expertd_files_broken", {"what": "tls"}) == 1
    assert count("expertd_files_broken", {"what": "callers"}) == 0
    assert "are no certificate and its key" in caplog.text
    assert "keeping the last valid version" in caplog.text
    tls["tls_key"].unlink()
    call(host.address, Credentials(ca=ca.ca))
    tls["tls_key"].write_bytes(good)
    call(host.address, Credentials(ca=ca.ca))
    assert count("expertd_files_broken", {"what": "tls"}) == 0
    away = tls["tls_key"].rename(tls["tls_key"].with_suffix(".away"))
    call(host.address, Credentials(ca=ca.ca))
    assert count("expertd_files_broken", {"what": "tls"}) == 1
    away.rename(tls["tls_key"])
    call(host.address, Credentials(ca=ca.ca))
    assert count("expertd_files_broken", {"what": "tls"}) == 0, "the same file is back"


@pytest.mark.parametrize("file", ["tls_cert", "tls_key", "tls_client_ca", "callers"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_holds_up_nobody(serve, ca, tls, tmp_path, file):
    trusted, callers = tmp_path / "trusted.pem", tmp_path / "callers.toml"
    trusted.write_bytes(ca.ca.read_bytes())
    callers.write_text('[callers.pool]\ncertificates = ["worker"]\nrights = ["call"]\n')
    shown = Credentials(True, ca.ca, *ca.sign("worker"))
    files = {**tls, "tls_client_ca": trusted, "callers": callers}
    host = serve(**files)
    away = files[file].rename(tmp_path / "away")
    count = host.metrics.registry.get_sample_value
    broken = {"what": "callers" if file == "callers" else "tls"}
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(files[file])
        call(host.address, shown)
        until(lambda: call(host.address, shown) or count("expertd_files_broken", broken) == 1)
        files[file].unlink()
    away.rename(files[file])
    until(lambda: call(host.address, shown) or count("expertd_files_broken", broken) == 0)


@pytest.mark.parametrize("option", ["tls_cert", "tls_client_ca", "callers"])
def test_a_pipe_is_no_file_at_the_start_either(tls, tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    config = ServeConfig(checkpoint=tmp_path / "none", device="cpu", **{**tls, option: tmp_path / "pipe"})
    with pytest.raises(BootError, match=f"--{option.replace('_', '-')} .*pipe: cannot be read: is no regular file"):
        Host(config).start()


def test_no_file_of_a_clients_credentials_is_waited_for(ca, tmp_path):
    """What was good stays, for the channel; sockets beside it are told what is wrong."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    certificate, key = ca.sign("worker")
    shown = Credentials(True, ca.ca, certificate, key, token)
    channels = Rotating(shown, lambda secure, options: grpc.insecure_channel("localhost:1"), lambda c: c.close())
    first = channels.now()
    for path in (ca.ca, certificate, key, token):
        away = path.rename(tmp_path / "away")
        os.mkfifo(path)
        channels.refresh()
        assert channels.now() is first
        with pytest.raises(OSError, match="is no regular file"):
            shown.metadata() if path == token else shown.context()
        path.unlink()
        away.rename(path)
    shown.context()
    token.write_text(OTHER)
    channels.refresh()
    assert channels.now() is not first
    channels.close()


def test_when_the_certificate_expires_is_a_metric_also_of_a_new_one(serve, ca, tls):
    """Of the server's own, which is the first of a chain."""

    def renewed(days: float) -> float:
        ca.sign("localhost", days=(-1, days))
        own = tls["tls_cert"].read_bytes()
        tls["tls_cert"].write_bytes(own + ca.ca.read_bytes())
        return x509.load_pem_x509_certificate(own).not_valid_after_utc.timestamp()

    first = renewed(3)
    host = serve(**tls)
    seen = lambda: host.metrics.registry.get_sample_value("expertd_certificate_expiry_timestamp_seconds")  # noqa: E731
    assert seen() == first
    second = renewed(5)
    call(host.address, Credentials(ca=ca.ca))
    assert seen() == second > first


@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_client_ca", "callers"])
def test_a_file_that_is_not_there_is_named_with_its_option_before_the_plan(tls, tmp_path, option):
    """The plan would fail, too: it is not reached."""
    away = tmp_path / "away"
    config = ServeConfig(checkpoint=tmp_path / "none", device="cpu", **{**tls, option: away})
    with pytest.raises(BootError, match=f"--{option.replace('_', '-')} {away}: cannot be read: No such") as said:
        Host(config).start()
    assert said.value.exit_code == 2


def test_what_is_wrong_in_the_file_of_callers_is_named_with_file_and_option(tls, tmp_path):
    file = tmp_path / "short.toml"
    file.write_text('[callers.x]\ntokens = ["short"]\nrights = ["call"]\n')
    with pytest.raises(BootError, match=f"--callers {file}: callers.x.tokens: one has 5 characters"):
        Host(ServeConfig(checkpoint=tmp_path / "none", device="cpu", callers=file, **tls)).start()


def test_a_key_of_another_certificate_is_named_with_the_options(tls, ca, tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("no PEM")
    config = ServeConfig(checkpoint=tmp_path / "none", device="cpu", **{**tls, "tls_key": broken})
    with pytest.raises(BootError, match=r"--tls-cert, --tls-key: .*broken\.pem: are no certificate and its key in PEM"):
        Host(config).start()


@pytest.mark.parametrize("shown", ["nothing", "no certificate"])
def test_a_client_that_tls_refuses_is_told_what_the_server_may_want(serve, ca, tls, shown):
    host = serve(**tls, tls_client_ca=ca.ca)
    credentials = None if shown == "nothing" else Credentials(ca=ca.ca)
    with pytest.raises(UnavailableError) as said:
        call(host.address, credentials)
    assert "with --tls-client-ca that of one without a certificate for client authentication" in str(said.value)


def test_a_server_does_not_start_with_broken_files(serve, ca, tls, tmp_path):
    other = ca.sign("other")
    with pytest.raises(BootError, match="are no certificate and its key in PEM"):
        serve(tls_cert=tls["tls_cert"], tls_key=other[1])
    with pytest.raises(BootError, match="No such file"):
        serve(tls_cert=tmp_path / "nowhere", tls_key=other[1])
    (tmp_path / "callers.toml").write_text("[callers.x]\ntokens = ['short']\nrights = ['call']")
    with pytest.raises(BootError, match=r"callers.x.tokens: one has 5 characters"):
        serve(callers=tmp_path / "callers.toml")


# ---- who calls -------------------------------------------------------------------------------------------------------


@pytest.fixture
def callers(tmp_path) -> Path:
    path = tmp_path / "callers.toml"
    path.write_text(
        f'[callers.pool]\ntokens = ["{TOKEN}"]\nrights = ["call"]\n'
        f'[callers.eyes]\ntokens = ["{OTHER}"]\nrights = ["describe"]\n'
        '[callers.worker]\ncertificates = ["worker"]\nrights = ["admin"]\n'
    )
    return path


def with_token(folder: Path, token: str, **more) -> Credentials:
    path = folder / f"token-{token[:4]}"
    path.write_text(token + "\n")
    return Credentials(token_file=path, **more)


def replace_at_once(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_the_file_of_callers_is_looked_at_though_nobody_calls(serve, callers, caplog):
    """A pod without calls, or with Kubernetes' probes alone, which show no token."""
    host = serve(callers=callers)
    count, broken = host.metrics.registry.get_sample_value, {"what": "callers", "outcome": "broken"}
    good = callers.read_text()
    replace_at_once(callers, "a = " + 100_000 * "[")
    until(lambda: count("expertd_files_broken", {"what": "callers"}) == 1)
    assert "the file of callers is no TOML" in caplog.text
    replace_at_once(callers, good)
    until(lambda: count("expertd_files_broken", {"what": "callers"}) == 0)
    assert count("expertd_reloads_total", broken) == 1, "once, not at each look"


@pytest.mark.parametrize("unary", [False, True])
def test_a_call_needs_a_token_that_is_known_and_the_right(serve, callers, tmp_path, unary):
    host = serve(callers=callers)
    call(host.address, with_token(tmp_path, TOKEN), unary)
    for credentials in (None, with_token(tmp_path, "wrong-wrong-wrong-wrong")):
        with pytest.raises(UnauthenticatedError) as e:
            call(host.address, credentials, unary)
        assert "wrong-wrong" not in str(e.value)
    with pytest.raises(PermissionDeniedError, match="caller eyes: got rights describe, want call"):
        call(host.address, with_token(tmp_path, OTHER), unary)


def test_describe_and_reflection_need_a_right_and_health_none(serve, callers, tmp_path):
    host = serve(callers=callers)
    with ExpertClient(host.address, credentials=with_token(tmp_path, OTHER)) as client:
        assert client.describe().layers
    with (
        ExpertClient(host.address, credentials=with_token(tmp_path, TOKEN)) as client,
        pytest.raises(PermissionDeniedError, match="want describe"),
    ):
        client.describe()
    with grpc.insecure_channel(host.address) as channel:
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        with pytest.raises(grpc.RpcError) as e:
            list(reflect(iter(ask)))
        assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (answer,) = list(reflect(iter(ask), metadata=[("authorization", f"Bearer {OTHER}")]))
        assert "expertd.v1.ExpertService" in {s.name for s in answer.list_services_response.service}
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1


def test_reflection_and_health_can_be_closed(serve):
    host = serve(reflection=False, health=False)
    call(host.address)
    with grpc.insecure_channel(host.address) as channel:
        for ask in (
            lambda: health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()),
            lambda: list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([]))),
        ):
            with pytest.raises(grpc.RpcError) as e:
                ask()
            assert e.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_certificate_has_rights_by_its_name(serve, ca, tls, callers):
    host = serve(**tls, tls_client_ca=ca.ca, callers=callers)
    worker, nobody = ca.sign("worker"), ca.sign("nobody")
    call(host.address, Credentials(ca=ca.ca, certificate=worker[0], key=worker[1]))
    with pytest.raises(UnauthenticatedError, match="no certificate that is known"):
        call(host.address, Credentials(ca=ca.ca, certificate=nobody[0], key=nobody[1]))


def test_a_refused_call_is_logged_under_the_callers_name(serve, callers, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    host = serve(callers=callers)
    with pytest.raises(PermissionDeniedError):
        call(host.address, with_token(tmp_path, OTHER), unary=True)
    with pytest.raises(UnauthenticatedError):
        call(host.address, with_token(tmp_path, "nobody-nobody-nobody"), unary=True)
    found = [f for r in caplog.records if (f := getattr(r, "fields", None)) and "caller" in f]
    assert [f["caller"] for f in found if f["reason"] == "PERMISSION_DENIED"] == ["eyes"]
    assert [f["caller"].partition(":")[0] for f in found if f["reason"] == "UNAUTHENTICATED"] == ["ipv4"]


@pytest.mark.parametrize("left", ["", RIGHT_LOST], ids=["gone", "without the right"])
def test_who_is_taken_out_of_the_file_is_out_also_on_a_stream_that_stands(serve, callers, tmp_path, left):
    """Or loses the right to call."""
    host = serve(callers=callers)
    ids, x = np.zeros((1, 1), np.int32), np.ones((1, 256), np.float32)
    with ExpertClient(host.address, credentials=with_token(tmp_path, TOKEN), timeout_s=10) as client:
        client.forward(0, x, ids, ids.astype(np.float32))
        callers.write_text("[callers.x")  # broken
        until(lambda: client.forward(0, x, ids, ids.astype(np.float32)) and reloads(host, "callers", "broken"))
        client.forward(0, x, ids, ids.astype(np.float32))  # keeping the last valid version
        callers.write_text(f'[callers.eyes]\ntokens = ["{OTHER}"]\nrights = ["call"]\n{left}')
        until(lambda: refused(client, x, ids, PermissionDeniedError if left else UnauthenticatedError))


def reloads(host, what, how) -> float:
    return host.metrics.registry.get_sample_value("expertd_reloads_total", {"what": what, "outcome": how}) or 0.0


def refused(client, x, ids, by: type[ExpertdError] = UnauthenticatedError) -> bool:
    try:
        client.forward(0, x, ids, ids.astype(np.float32))
    except by:
        return True
    except UnavailableError:  # of a call that the end of its session meets; the next one is refused
        return False
    return False


def entered(listener, caller):
    """A session of `caller` that no stream's end ends, and the socket that tells of its own."""
    token, endpoint, why = listener.offer(caller, host_id())
    assert not why, why
    if endpoint.startswith("tcp:"):
        at = parse_endpoint(endpoint)
        sock = connect(at.host, at.port, 5)
        enter(sock, token, 5)
        return sock
    sock, client = enter_session(pb.SessionAnswer(token=token, endpoint=endpoint))
    client.close()
    return sock


def ended(sock) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("left", ["", RIGHT_LOST], ids=["gone", "without the right"])
@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_who_is_taken_out_of_the_file_loses_sessions_beside_the_stream_too(serve, callers, way, left):
    """Or loses the right to call.  A client of ours goes with its stream; another one need not."""
    host = serve(callers=callers, tcp_listen=Address("127.0.0.1", 0))
    listener = host.service.offered[way]
    if isinstance(listener, str):
        pytest.skip(listener)
    with entered(listener, "pool") as gone, entered(listener, "worker") as stays:
        unused = listener.offer("pool", host_id())[0]
        until(lambda: listener.sessions == 2)
        callers.write_text(f'[callers.worker]\ncertificates = ["worker"]\nrights = ["admin"]\n{left}')
        assert ended(gone)
        until(lambda: listener.sessions == 1)
        assert listener._tokens.take(bytes.fromhex(unused)) is None
        stays.settimeout(0.7)
        with pytest.raises(TimeoutError):
            stays.recv(1)


@pytest.mark.parametrize("way", ["inline", "shm", "tcp"])
def test_a_token_that_is_replaced_is_out_on_every_session_that_stands(serve, callers, tmp_path, way):
    """The caller's name stays in the file."""
    host = serve(callers=callers, tcp_listen=Address("127.0.0.1", 0))
    credentials = with_token(tmp_path, TOKEN)
    offers = {"inline": [], "shm": [ShmTransport()], "tcp": [TcpTransport(host.address, credentials)]}[way]
    ids, x = np.zeros((1, 1), np.int32), np.ones((1, 256), np.float32)
    transport = GrpcTransport(host.address, credentials=credentials, offers=offers)
    with ExpertClient(transport, timeout_s=10) as client:
        client.forward(0, x, ids, ids.astype(np.float32))
        assert client.session().transport == way
        text = callers.read_text()
        callers.write_text(text.replace(TOKEN, "an0ther-token-of-the-pool"))
        until(lambda: refused(client, x, ids))
        callers.write_text(text)


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_sessions_beside_the_stream_end_with_their_credential(serve, callers, way):
    """Of callers whose stream does not end theirs."""
    callers.write_text(callers.read_text().replace('["worker"]', '["worker", "second"]'))
    host = serve(callers=callers, tcp_listen=Address("127.0.0.1", 0))
    listener = host.service.offered[way]
    if isinstance(listener, str):
        pytest.skip(listener)
    digest = hashlib.sha256(TOKEN.encode()).digest()
    shown = [Admitted("pool", digest), Admitted("worker", "second"), Admitted("worker", "worker"),
             Admitted("worker", "worker", time.time() + 1)]  # fmt: skip
    with contextlib.ExitStack() as stack:
        token, name, stays, expires = [stack.enter_context(entered(listener, a)) for a in shown]
        until(lambda: listener.sessions >= 3)
        text = callers.read_text().replace(', "second"', "")
        callers.write_text(text.replace(TOKEN, "an0ther-token-of-the-pool"))
        assert ended(token)
        assert ended(name)
        assert ended(expires)
        until(lambda: listener.sessions == 1)
        stays.settimeout(0.7)
        with pytest.raises(TimeoutError):
            stays.recv(1)


def test_a_stream_ends_when_its_certificates_name_is_replaced(serve, ca, tls, callers):
    host = serve(**tls, tls_client_ca=ca.ca, callers=callers, shm="off")
    certificate, key = ca.sign("worker")
    credentials = Credentials(ca=ca.ca, certificate=certificate, key=key)
    ids, x = np.zeros((1, 1), np.int32), np.ones((1, 256), np.float32)
    with ExpertClient(host.address, credentials=credentials, timeout_s=10) as client:
        client.forward(0, x, ids, ids.astype(np.float32))
        callers.write_text(callers.read_text().replace('["worker"]', '["another"]'))
        until(lambda: refused(client, x, ids))


def test_a_certificate_that_expires_ends_its_stream(serve, ca, tls, callers):
    host = serve(**tls, tls_client_ca=ca.ca, callers=callers, shm="off")
    certificate, key = ca.sign("worker", days=(-1, 6 / 86400))
    credentials = Credentials(ca=ca.ca, certificate=certificate, key=key)
    until_s = certificate_until_s(certificate.read_bytes())
    ids, x = np.zeros((1, 1), np.int32), np.ones((1, 256), np.float32)
    with ExpertClient(host.address, credentials=credentials, timeout_s=10) as client:
        client.forward(0, x, ids, ids.astype(np.float32))
        until(lambda: time.time() > until_s + 1)
        until(lambda: refused(client, x, ids))


@pytest.mark.parametrize("days", [(-1, 1), (-1, 3650), (-1, 40_000)])
def test_the_end_of_a_certificate_is_read_as_openssl_reads_it(ca, days):
    pem = ca.sign("worker", days=days)[0].read_bytes()
    assert certificate_until_s(pem) == x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    for n in range(0, 120, 7):
        with pytest.raises(ValueError, match=r"cut short|time data"):
            certificate_until_s(ssl.DER_cert_to_PEM_cert(der[:n]).encode())


def test_a_client_takes_a_new_token_from_its_file(serve, callers, tmp_path):
    host = serve(callers=callers)
    credentials = with_token(tmp_path, "stale-stale-stale-stale")
    ids, x = np.zeros((1, 1), np.int32), np.ones((1, 256), np.float32)
    with ExpertClient(host.address, credentials=credentials, timeout_s=10) as client:
        with pytest.raises(UnauthenticatedError):
            client.forward(0, x, ids, ids.astype(np.float32))
        Path(credentials.token_file).write_text(TOKEN)  # type: ignore[arg-type]
        until(lambda: not refused(client, x, ids))


# ---- where -----------------------------------------------------------------------------------------------------------


def test_a_unix_socket_is_its_owners_and_goes_with_the_server(serve, tmp_path):
    path = tmp_path / "s"
    host = serve(Address.parse_or_unix(f"unix:{path}"))
    assert host.address == f"unix:{path}"
    assert os.stat(path).st_mode & 0o777 == 0o600
    call(host.address)
    with pytest.raises(BootError, match="cannot listen there"):
        serve(Address.parse_or_unix(f"unix:{path}"))
    call(host.address)


def test_a_socket_that_a_killed_server_left_is_no_obstacle_and_a_file_is(serve, tmp_path):
    import socket

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))
    call(serve(Address.parse_or_unix(f"unix:{path}")).address)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BootError, match="no socket"):
        serve(Address.parse_or_unix(f"unix:{tmp_path / 'file'}"))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("listen", "more", "fine"),
    [
        ("127.0.0.1:1", {}, True),
        ("127.8.0.1:1", {}, True),
        ("[::1]:1", {}, True),
        ("localhost:1", {}, True),
        ("unix:/tmp/x", {}, True),
        ("0.0.0.0:1", {}, False),
        ("[::]:1", {}, False),
        ("10.0.0.1:1", {}, False),
        ("experts.example:1", {}, False),
        ("0.0.0.0:1", {"insecure": True}, True),
        ("0.0.0.0:1", {"tls_cert": Path("c"), "tls_key": Path("k")}, True),
        ("127.0.0.1:1", {"metrics_listen": Address("0.0.0.0", 1)}, False),
        ("127.0.0.1:1", {"metrics_listen": Address("0.0.0.0", 1), "insecure": True}, True),
        ("127.0.0.1:1", {"tls_cert": Path("c")}, False),
        ("127.0.0.1:1", {"tls_client_ca": Path("c")}, False),
    ],
)
def test_strangers_are_served_in_plain_text_only_where_that_is_asked_for(listen, more, fine):
    address = Address.parse_or_unix(listen)
    if fine:
        assert ServeConfig(**TINY, listen=address, **more).listen == address
    else:
        with pytest.raises(ConfigError, match=r"--insecure|--tls"):
            ServeConfig(**TINY, listen=address, **more)
