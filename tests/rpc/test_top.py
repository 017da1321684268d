"""expertctl top: two looks at servers, and what they say together."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from in_process import HERE, hosts

from expertctl.commands import top as top_module
from expertctl.commands.top import Seen, _cells, row_of, samples
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import ExpertClient

BEFORE = """# HELP expertd_tokens_total Tokens.
expertd_tokens_total{layer="0"} 100.0
expertd_kernel_seconds_sum{backend="cpu"} 1.0
expertd_queue_seconds_sum 0.5
expertd_queue_seconds_count 10
expertd_expert_tokens_total{layer="0",expert="3"} 50.0
"""
AFTER = """expertd_tokens_total{layer="0"} 300.0
expertd_tokens_total{layer="1"} 100.0
expertd_kernel_seconds_sum{backend="cpu"} 2.0
expertd_queue_seconds_sum 0.9
expertd_queue_seconds_count 30
expertd_expert_tokens_total{layer="0",expert="3"} 350.0
expertd_expert_tokens_total{layer="1",expert="0"} 100.0
expertd_gpu_utilization_ratio{of="compute"} 0.75
expertd_gpu_temperature_celsius 61.0
"""


def described(instance="a", **load):
    return pb.DescribeResponse(instance_id=instance, load=pb.Load(**load), memory=pb.Memory(free_bytes=1 << 30))


def test_two_looks_are_rates():
    before = Seen("s", 10.0, 0.001, described(), samples(BEFORE))
    now = described(queued_requests=3, queued_tokens=24, token_ns=2500)
    row = row_of(before, Seen("s", 12.0, 0.002, now, samples(AFTER)))
    assert (row.state, row.queued_requests, row.queued_tokens, row.token_us) == ("serving", 3, 24, 2.5)
    assert (row.tokens_per_s, row.busy, row.ping_ms, row.free_bytes) == (150.0, 0.5, 2.0, 1 << 30)
    assert row.queue_s == pytest.approx(0.02)
    assert (row.gpu, row.gpu_celsius) == (0.75, 61.0)
    assert row.hottest == [(0, 3, 0.75), (1, 0, 0.25)]


def test_what_is_not_known_is_not_told():
    looked = Seen("s", 12.0, 0.002, described("b", draining=True), samples(AFTER))
    again = row_of(Seen("s", 10.0, 0.001, described("a"), samples(BEFORE)), looked)
    assert (again.state, again.tokens_per_s, again.gpu) == ("draining", None, 0.75)  # another process: no rates
    alone = row_of(Seen("s", 10.0), Seen("s", 12.0, 0.002, described()))
    assert (alone.busy, alone.hottest, alone.token_us) == (None, (), None)
    assert row_of(Seen("s", 10.0), Seen("s", 12.0, error="no")).state == "gone"


HOSTILE = """expertd_tokens_total{layer="0"} many
expertd_tokens_total{layer="0"} 1e999
expertd_kernel_seconds_sum nan
expertd_queue_seconds_count 10
expertd_expert_tokens_total{layer="0"} 5
expertd_expert_tokens_total{layer="x",expert="3"} 5
expertd_expert_tokens_total{layer="-1",expert="1e9"} 5
expertd_expert_tokens_total{layer="%s",expert="3"} 7
expertd_expert_tokens_total{layer="1",expert="2"} inf
""" % ("9" * 5000)


def test_metrics_of_a_hostile_server_end_no_command():
    before = Seen("s", 10.0, 0.001, described(), {("nothing", frozenset()): 0.0})
    load = {"queued_requests": 2**32 - 1, "queued_tokens": 2**32 - 1, "token_ns": 2**32 - 1}
    row = row_of(before, Seen("s", 12.0, 0.002, described(**load), samples(HOSTILE)))
    assert row.hottest == [(999999999, 3, 1.0)]
    assert len(_cells(row)) == 11


class Trickle:
    """An answer that never ends."""

    def __init__(self) -> None:
        self.read = 0

    def read1(self, most: int) -> bytes:
        self.read += 1
        return b"x" * most


@pytest.mark.parametrize("left_s", [-1.0, 1e6])
def test_metrics_that_never_end_are_read_no_further(monkeypatch, left_s):
    """Not beyond their time, and not beyond their bytes."""
    monkeypatch.setattr(top_module, "_MOST_BYTES", 1 << 20)
    with pytest.raises(OSError, match="too many, or too slow"):
        top_module._read(answer := Trickle(), time.monotonic() + left_s)
    assert answer.read == (1 if left_s < 0 else 16)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/metrics\r\nContent-Length: 0\r\n\r\n",
        b"\xff" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"",
    ],
    ids=["elsewhere", "no http", "many headers", "nothing"],
)
def test_a_metrics_port_that_is_none_gives_none(sent):
    """And nobody is asked whom it names."""
    listener, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    port, elsewhere = (s.getsockname()[1] for s in (listener, other))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(1 << 16)
            sock.sendall(sent % elsewhere if b"%d" in sent else sent)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    shown = dict.fromkeys(("ca", "cert", "key", "token_file", "server_name"))
    look = top_module._Look("127.0.0.1:1", argparse.Namespace(timeout=30.0, metrics=port, tls=False, **shown))
    try:
        assert look._counted() == {}
        thread.join(30)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
    finally:
        look.client.close()
        listener.close()
        other.close()


@pytest.mark.timeout(120)  # four commands, each a process that imports its client
def test_as_a_command():
    with hosts(synthetic="tiny:int4_g128", metrics_listen=HERE, expert_metrics=True) as serve:
        host = serve()
        address, port = str(host.address), str(host.metrics_address).rpartition(":")[2]
        with ExpertClient(address) as client:
            ids = np.tile(np.int32([1, 5]), (6, 1))
            client.forward(0, np.ones((6, 256), np.float32), ids, np.full((6, 2), 0.5, np.float32))

        def top(*words, code=0):
            command = [sys.executable, "-m", "expertctl.cli", "top", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout + done.stderr if "--once" in words else done.stdout

        one, gone = json.loads(top(address, "127.0.0.1:1", "--metrics", port, "--every", "0.3", "--json"))["servers"]
        assert (one["address"], one["state"], gone["state"]) == (address, "serving", "gone")
        assert one["tokens_per_s"] == 0.0
        assert one["ping_ms"] > 0 < one["free_bytes"]
        table = top(address, "--once")
        assert address in table
        assert "serving" in table
        hint = "tokens/s, busy, queue, GPU and hottest need --metrics PORT"
        assert hint in table
        assert hint not in top(address, "--once", "--every", "0.2", "--metrics", port)
        top("127.0.0.1:1", "--once", code=1)
        command = [sys.executable, "-m", "expertctl.cli", "top", address, "--every", "0.2"]
        env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as live:
            try:
                shown = b""
                while shown.count(address.encode()) < 2:  # drawn twice
                    shown += os.read(live.stdout.fileno(), 1 << 16)
                live.send_signal(signal.SIGINT)
                live.communicate(timeout=20)
            finally:
                live.kill()
        assert live.returncode == 130
        assert b"serving" in shown
