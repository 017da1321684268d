"""Sessions over TCP between real servers and clients: who gets one, TLS, clusters, drains."""

import asyncio
import socket
import threading

import numpy as np
import pytest
import torch
from core_library import needs_core
from in_process import hosts

from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AsyncExpertClient, Credentials, ExpertClient
from expertd_client.cluster import AsyncExpertCluster, ExpertCluster
from expertd_client.transports.tcp.connection import TcpTransport
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import open_source
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address, Ranges

pytestmark = [needs_core, pytest.mark.timeout(90)]

LAYER = 1
TINY = {
    "synthetic": "tiny:int4_g128",
    "device": "cpu",
    "threads": 1,
    "layers": Ranges.parse("1"),
    "shm": "off",
    "tcp_listen": Address("127.0.0.1", 0),
}


@pytest.fixture
def serve():
    with hosts(**TINY) as start:
        yield start


@pytest.fixture(scope="module")
def batch():
    """(arguments of forward, the float32 reference)"""
    weights = open_source(ServeConfig(**{**TINY, "listen": Address("127.0.0.1", 0)})).load(LAYER, range(8))
    x, ids, w = random_inputs(9, 256, 8, 2, seed=3)
    return (LAYER, x.bfloat16(), ids, w), reference(weights, x.bfloat16(), ids, w), tolerance("bf16")


def right(answer, batch):
    assert relative_error(answer.output.float(), batch[1]) < batch[2]


def test_clients_take_it_where_there_is_no_shared_memory(serve, batch):
    host = serve()
    with ExpertClient(host.address, timeout_s=20) as client:
        assert client.session().transport == "tcp"
        assert "--shm off" in client.session().refused["shm"]
        assert list(client.describe().transports) == ["tcp"]
        for _ in range(3):
            answer = client.forward(*batch[0])
            right(answer, batch)
            assert 0 < answer.timing.decode_ns < 1e9
        right(client.submit(*batch[0]).result(20), batch)

    async def in_a_loop():
        async with AsyncExpertClient(host.address, timeout_s=20) as client:
            assert (await client.session()).transport == "tcp"
            for answer in await asyncio.gather(*(client.forward(*batch[0]) for _ in range(4))):
                right(answer, batch)

    asyncio.run(in_a_loop())


def test_it_is_asked_for(serve):
    host = serve(tcp_listen=None)
    with ExpertClient(host.address) as client:
        assert client.session().transport == "inline"
        assert "--tcp on switches it on, --tcp-listen HOST:PORT" in client.session().refused["tcp"]
    assert serve(tcp="off").service.offered["tcp"] == "the server has it off (--tcp off); --tcp on switches it on"
    on = serve(tcp="on", tcp_listen=None)
    with ExpertClient(on.address) as client:
        assert client.session().transport == "tcp"


def test_beyond_this_host_it_needs_tls_or_insecure():
    for tcp_listen, tcp in ((Address("0.0.0.0", 0), "auto"), (Address("0.0.0.0", 0), "on")):
        options = {**TINY, "tcp_listen": tcp_listen, "tcp": tcp}
        with pytest.raises(ConfigError, match=r"--tcp-listen 0\.0\.0\.0:0: .*plain text"):
            ServeConfig(**options)
        ServeConfig(**options, insecure=True)
    ServeConfig(**{**TINY, "tcp_listen": Address("0.0.0.0", 0), "tcp": "off"})


def test_a_server_on_every_address_is_found_where_grpc_found_it(serve, batch):
    host = serve(tcp_listen=Address("0.0.0.0", 0), insecure=True)
    for name in ("127.0.0.1", "localhost"):
        with ExpertClient(f"{name}:{host.address.rpartition(':')[2]}", timeout_s=20) as client:
            assert client.session().transport == "tcp"
            right(client.forward(*batch[0]), batch)


def test_a_client_by_a_unix_socket_stays_inline_and_says_why(serve, batch, tmp_path):
    host = serve(Address("", 0, str(tmp_path / "s")), tcp_listen=Address("0.0.0.0", 0), insecure=True)
    with ExpertClient(host.address, timeout_s=20) as client:
        assert client.session().transport == "inline"
        assert "names no host" in client.session().refused["tcp"]
        right(client.forward(*batch[0]), batch)


def test_a_drain_answers_what_was_taken_and_the_rest_travels_no_more(serve, batch):
    host = serve()
    with ExpertClient(host.address, timeout_s=20) as client:
        assert client.session().transport == "tcp"
        futures = [client.submit(*batch[0]) for _ in range(50)]
        futures[0].result(20)
        drained = threading.Thread(target=host.drain, args=(20,))
        drained.start()
        for f in futures:
            error = f.exception(20)
            assert error is None or error.reason in ("DRAINING", "UNAVAILABLE"), error
            if error is None:
                right(f.result(), batch)
        drained.join(30)
        assert not drained.is_alive()


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ca(tmp_path):
    pytest.importorskip("cryptography", reason="makes certificates; pip install cryptography")
    from certificates import Authority

    return Authority(tmp_path / "pki")


@pytest.fixture
def tls(ca):
    certificate, key = ca.sign("localhost")
    return {"tls_cert": certificate, "tls_key": key}


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_where_grpc_has_it(serve, batch, ca, tls, mutual):
    host = serve(**tls, **({"tls_client_ca": ca.ca} if mutual else {}))
    certificate, key = ca.sign("client.example") if mutual else (None, None)
    credentials = Credentials(ca=ca.ca, certificate=certificate, key=key, server_name="localhost")
    with ExpertClient(host.address, credentials=credentials, timeout_s=20) as client:
        assert client.session().transport == "tcp", client.session()
        for _ in range(3):
            right(client.forward(*batch[0]), batch)
        layer, x, ids, w = batch[0]
        many = client.forward(layer, x.repeat(200, 1), ids.repeat(200, 1), w.repeat(200, 1))
        assert torch.equal(many.output[:9], many.output[-9:])
        listener = host.service.offered["tcp"]
        token, endpoint, _ = listener.offer("caller", "")
        assert endpoint.startswith("tls://")
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 5) as plain:
            plain.sendall(b"expdtcp1" + token.encode())
            plain.settimeout(5)
            said = b""
            try:
                while more := plain.recv(100):
                    said += more
            except ConnectionError:
                pass
            assert b"expdtcp1" not in said, "it speaks without TLS"
        assert listener.sessions == 1
        if mutual:
            stranger = TcpTransport(host.address, Credentials(ca=ca.ca, server_name="localhost"))
            assert "tcp: " in str(opened(stranger, pb.SessionAnswer(token=token, endpoint=endpoint)))


def opened(channel, answer):
    """What becomes of it."""
    found, ready = [], threading.Event()
    channel.open(answer, lambda m: None, lambda e: None, lambda outcome: (found.append(outcome), ready.set()))
    assert ready.wait(10)
    return found[0]


def test_who_does_not_trust_the_server_gives_no_token(serve, ca, tls, tmp_path):
    from certificates import Authority

    host = serve(**tls)
    token, endpoint, _ = host.service.offered["tcp"].offer("caller", "")
    answer = pb.SessionAnswer(token=token, endpoint=endpoint)
    for wrong in (
        Credentials(ca=Authority(tmp_path / "other", "other").ca, server_name="localhost"),
        Credentials(ca=ca.ca, server_name="elsewhere.example"),
    ):
        assert "certificate verify failed" in str(opened(TcpTransport(host.address, wrong), answer)).lower()


def test_a_session_with_tls_takes_no_channel_without(serve, ca):
    host = serve()
    token, endpoint, _ = host.service.offered["tcp"].offer("caller", "")
    channel = TcpTransport(host.address, Credentials(ca=ca.ca))
    assert "without it" in str(opened(channel, pb.SessionAnswer(token=token, endpoint=endpoint)))
    assert host.service.offered["tcp"].sessions == 0


# ---- clusters --------------------------------------------------------------------------------------------------------


def test_a_cluster_uses_it_and_survives_a_server(serve, batch):
    hosts = [serve(experts=Ranges.parse(experts)) for experts in ("0-3", "4-7", "4-7")]
    addresses = [host.address for host in hosts]
    (layer, x, ids, w), want, bound = batch
    with ExpertCluster(addresses, timeout_s=20) as cluster:
        for n in range(12):
            answer = cluster.forward(layer, x, ids, w)
            assert relative_error(answer.output.float(), want) < bound
            assert answer.routes_computed == int((ids >= 0).sum())
            if n == 4:
                assert all(host.service.offered["tcp"].sessions for host in hosts[:1])
            if n == 6:
                hosts[2].close()

    async def in_a_loop():
        async with AsyncExpertCluster(addresses[:2], timeout_s=20) as cluster:
            for _ in range(3):
                assert relative_error((await cluster.forward(layer, x, ids, w)).output.float(), want) < bound

    asyncio.run(in_a_loop())
    assert np.isfinite(want.numpy()).all()
