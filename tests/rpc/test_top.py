"""expertctl top: two looks at servers, and what they say together."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from in_process import HERE, hosts

from expertctl.commands.top import Seen, row_of, samples
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
