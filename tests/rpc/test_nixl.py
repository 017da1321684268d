"""Sessions over NIXL between real servers and clients: who gets one, that answers are right, ends and drains."""

import argparse
import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
from beside_kit import needs_nixl
from core_library import needs_core
from in_process import hosts
from waiting import until

from expertctl import cli
from expertctl.bench.path import command
from expertd.errors import UnavailableError
from expertd.nixl import find
from expertd_client import AsyncExpertClient, Credentials, ExpertClient
from expertd_client.cluster import ExpertCluster
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import BootError, open_source
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.values import Address, Ranges

pytestmark = [needs_core, pytest.mark.timeout(120)]

HERE = Address("127.0.0.1", 0)
TINY = {
    "synthetic": "tiny:int4_g128",
    "device": "cpu",
    "threads": 1,
    "layers": Ranges.parse("0-1"),
    "shm": "off",
    "nixl_listen": HERE,
}


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("EXPERTD_NIXL", "on")


@pytest.fixture(scope="module")
def serve():
    with hosts(**TINY) as start:
        yield start


@pytest.fixture(scope="module")
def host(serve):
    return serve()


@pytest.fixture(scope="module")
def batches():
    """By layer: (arguments of forward, the float32 reference)"""
    source = open_source(ServeConfig(**{**TINY, "nixl_listen": None, "listen": HERE}))
    found = {}
    for layer in (0, 1):
        x, ids, w = random_inputs(9 + layer, 256, 8, 2, seed=3 + layer)
        x = x.bfloat16()
        found[layer] = (layer, x, ids, w), reference(source.load(layer, range(8)), x, ids, w)
    return found


def relays():
    """Pids of all relays that run here."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0] for line in lines if "expertd.nixl.relay" in line and "defunct" not in line}


def right(answer, want):
    assert relative_error(answer.output.float(), want) < tolerance("bf16")


@needs_nixl
def test_answers_are_those_of_the_float32_reference_with_several_layers_in_flight(host, batches, asked):
    with ExpertClient(host.address, timeout_s=30) as client:
        assert client.session(timeout_s=30).transport == "nixl", client.session()
        assert "--shm off" in client.session().refused["shm"]
        assert "no --nixl-listen" not in str(client.session())
        assert list(client.describe().transports) == ["nixl"]
        for n in range(20):
            args, want = batches[n % 2]
            right(client.forward(*args), want)
        futures = [(client.submit(*batches[n % 2][0]), batches[n % 2][1]) for n in range(60)]
        for future, want in futures:
            right(future.result(30), want)
        slot = client.slot(9, 256, 2, "bf16")
        (_, x, ids, w), want = batches[0]
        slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = x.float().numpy(), ids, w
        slot.output[:] = 7
        for layer in (0, 1, 0):
            out = slot.forward(layer)
        assert relative_error(torch.from_numpy(out.astype("f4")), want) < tolerance("bf16")

    async def in_a_loop():
        async with AsyncExpertClient(host.address, timeout_s=30) as client:
            assert (await client.session(timeout_s=30)).transport == "nixl"
            answers = await asyncio.gather(*(client.forward(*batches[n % 2][0]) for n in range(12)))
            for n, answer in enumerate(answers):
                right(answer, batches[n % 2][1])

    asyncio.run(in_a_loop())


@needs_nixl
def test_a_cluster_uses_it(serve, batches, asked):
    servers = [serve(experts=Ranges.parse(experts)) for experts in ("0-3", "4-7")]
    args, want = batches[1]
    with ExpertCluster([s.address for s in servers], timeout_s=30) as cluster:
        until(lambda: right(cluster.forward(*args), want) or all(s.service.doors["nixl"].sessions for s in servers))
        for _ in range(5):
            right(cluster.forward(*args), want)


def test_nobody_gets_it_who_did_not_ask(host, monkeypatch):
    for value in (None, "", "off"):
        if value is None:
            monkeypatch.delenv("EXPERTD_NIXL", raising=False)
        else:
            monkeypatch.setenv("EXPERTD_NIXL", value)
        with ExpertClient(host.address) as client:
            assert client.session().transport == "inline"
            assert "nixl" not in client.session().refused


if find.missing():  # the fixture needs it to listen
    test_nobody_gets_it_who_did_not_ask = needs_nixl(test_nobody_gets_it_who_did_not_ask)


def test_a_server_that_was_not_asked_says_so(asked):
    with hosts(**{**TINY, "nixl_listen": None}) as serve, ExpertClient(serve().address) as client:
        assert client.session().transport == "inline"
        assert "no --nixl-listen; --nixl-listen HOST:PORT allows it" in client.session().refused["nixl"]


@needs_nixl
def test_a_client_without_the_package_stays_inline_and_says_why(host, batches, asked, monkeypatch):
    monkeypatch.setattr(find, "_NAMES", ("no_such_nixl",))
    with ExpertClient(host.address, timeout_s=30) as client:
        args, want = batches[0]
        right(client.forward(*args), want)
        assert client.session().transport == "inline"
        assert client.session().refused["nixl"] == "nixl: nixl is not installed: pip install 'expertd[nixl]'"


def test_a_server_without_the_package_does_not_boot(monkeypatch):
    monkeypatch.setattr(find, "_NAMES", ("no_such_nixl",))
    with hosts(**TINY) as serve, pytest.raises(BootError, match=r"--nixl-listen .*pip install 'expertd\[nixl\]'"):
        serve()


def test_beyond_this_host_it_wants_a_closed_network_also_with_tls(tmp_path):
    options = {**TINY, "listen": HERE, "nixl_listen": Address("0.0.0.0", 0)}
    tls = {"tls_cert": tmp_path / "c", "tls_key": tmp_path / "k"}
    for more in ({}, tls):
        with pytest.raises(ConfigError, match=r"--nixl-listen 0\.0\.0\.0:0: .*plain text; want an address of"):
            ServeConfig(**options, **more)
        ServeConfig(**options, **more, insecure=True)


@needs_nixl
def test_a_drain_answers_what_was_taken(serve, batches, asked):
    host = serve()
    args, want = batches[0]
    with ExpertClient(host.address, timeout_s=30) as client:
        assert client.session(timeout_s=30).transport == "nixl"
        futures = [client.submit(*args) for _ in range(50)]
        futures[0].result(20)
        drained = threading.Thread(target=host.drain, args=(20,))
        drained.start()
        for f in futures:
            error = f.exception(20)
            assert error is None or error.reason == "DRAINING", error
            if error is None:
                right(f.result(), want)
        drained.join(30)
        assert not drained.is_alive()


@needs_nixl
def test_where_grpc_has_tls_it_is_entered_through_tls(serve, batches, asked, tmp_path):
    pytest.importorskip("cryptography", reason="makes certificates; pip install cryptography")
    from certificates import Authority

    ca = Authority(tmp_path / "pki")
    certificate, key = ca.sign("localhost")
    host = serve(tls_cert=certificate, tls_key=key)
    args, want = batches[0]
    with ExpertClient(host.address, credentials=Credentials(ca=ca.ca, server_name="localhost"), timeout_s=30) as client:
        assert client.session(timeout_s=30).transport == "nixl", client.session()
        for _ in range(5):
            right(client.forward(*args), want)
        door = host.service.doors["nixl"]
        token, endpoint, _ = door.offer("caller", "")
        assert endpoint.startswith("tls://")
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 5) as plain:
            plain.sendall(b"expdtcp1" + token.encode())
            plain.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert b"expdtcp1" not in plain.recv(100), "it speaks without TLS"
        assert door.sessions == 1


@needs_nixl
def test_a_server_that_is_killed_fails_what_is_in_flight_and_no_relay_stays(asked, tmp_path):
    log, before = tmp_path / "log", relays()
    words = ["--synthetic", "tiny:int4_g128", "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1"]
    words += ["--shm", "off", "--nixl-listen", "127.0.0.1:0", "--test-route-us", "2000"]
    server = [sys.executable, "-m", "expertd_server.cli", "serve", *words]
    x, ids, w = random_inputs(200, 256, 8, 2, seed=1)
    with log.open("wb") as out, subprocess.Popen(server, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            until(lambda: process.poll() is not None or b"serving on " in log.read_bytes(), 60)
            address = re.search(r"serving on (\S+)", log.read_text())[1]
            with ExpertClient(address, timeout_s=30) as client:
                assert client.session(timeout_s=30).transport == "nixl"
                client.forward(0, x[:1].bfloat16(), ids[:1], w[:1])
                futures = [client.submit(0, x.bfloat16(), ids, w) for _ in range(4)]
                process.send_signal(signal.SIGKILL)
                for future in futures:
                    with pytest.raises(UnavailableError):
                        future.result(20)
        finally:
            process.kill()
    assert b"Traceback" not in log.read_bytes(), log.read_text()
    until(lambda: relays() == before)


@needs_nixl
def test_commands_show_it(host, asked, capsys):
    assert cli.main(["describe", host.address]) == 0
    assert re.search(r"session\s+nixl; not shm: ", capsys.readouterr().out)


@needs_nixl
def test_bench_path_measures_it(capsys):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    grid = ("--tokens", "1,40", "--callers", "1", "--hidden-size", "64", "--seconds", "0.2", "--json")
    assert command.run_command(parser.parse_args(["--transport", "nixl", "--client", "threads,asyncio", *grid])) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["refused"]
    assert [(r["transport"], r["client"], r["tokens"], r["bare"]) for r in found["rows"]] == [
        ("nixl", client, tokens, "socket") for tokens in (1, 40) for client in ("threads", "asyncio")
    ]
    assert all(r["p50_us"] > 0 for r in found["rows"])
