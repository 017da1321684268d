"""`expertd serve` whose device runs out of memory, and then is lost: right answers, or none; and an end that its
supervisor understands.  The device is a CPU with a backend that raises what a GPU's would; tests/gpu has a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest
from faulty_program import faulty_program
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expertd.errors import BackendFailedError, ExpertdError
from expertd_client import ExpertClient
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

pytestmark = pytest.mark.timeout(240)  # a process is started

E, K, H = 8, 2, 256
FAULTY = faulty_program(
    """
import os, time
from expertd_server.engine import engine, executor, plain

LOST = []

class Experts(reference.ReferenceExperts):
    def __call__(self, x, ids, w, **more):
        if 40 < len(x) < 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if len(x) == 13:
            LOST.append("CUDA error: an illegal memory access was encountered")
            while not os.path.exists(sys.argv[0] + ".now"):  # until others wait behind it
                time.sleep(0.01)
        if LOST:
            raise RuntimeError(LOST[0])
        return super().__call__(x, ids, w, **more)

for where in (executor.CpuExecutor, plain.PlainExecutor):
    where.fault = lambda self: LOST[0] if LOST else ""
if "--plain" in sys.argv:
    sys.argv.remove("--plain")
    engine.executor_of = lambda device, dtype, warm: (plain.PlainExecutor(device, dtype, "asked for"), "asked for")
"""
)


class Server:
    """A process of FAULTY that logs JSON."""

    def __init__(self, script, *args: str) -> None:
        options = ["--synthetic", "tiny:int4_g128", "--layers", "0", "--device", "cpu", "--threads", "1"]
        listen = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--log-format", "json"]
        command = [sys.executable, str(script), "serve", *options, *listen, *args]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines: list[dict] = []
        self.until("serving on")
        self.address = next(line["address"] for line in self.lines if "address" in line)
        self.metrics = next(line["metrics"] for line in self.lines if "metrics" in line)

    def until(self, text: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if text in self.lines[-1]["message"]:
                return
        raise AssertionError(self.lines)

    def end(self) -> tuple[int, list[str]]:
        assert self.process.stderr is not None
        rest = self.process.stderr.read()
        self.process.wait(60)
        self.lines += [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
        return self.process.returncode, [line["message"] for line in self.lines]

    def scrape(self) -> str:
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:
            return answer.read().decode()

    def faults(self) -> dict[str, float]:
        return {k: float(v) for k, v in re.findall(r'expertd_faults_total{kind="(\w+)"} (\S+)', self.scrape())}

    def queued(self, requests: int) -> None:
        """Until so many wait or are computed."""
        while f"expertd_queued_requests {requests:.1f}" not in self.scrape():
            time.sleep(0.02)


@pytest.fixture(params=[(), ("--plain",)], ids=["direct", "plain"])
def server(request, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    made = Server(script, *request.param)
    made.script = script
    yield made
    made.process.kill()
    made.process.communicate()


def right(client: ExpertClient, tokens: int) -> None:
    x, ids, w = random_inputs(tokens, H, E, K)
    answer = client.forward(0, x, ids, w, timeout_s=100)
    want = reference(SyntheticModel.parse("tiny:int4_g128").load(0, range(E)), x, ids, w)
    assert answer.routes_computed == tokens * K
    assert relative_error(answer.output.float(), want) <= tolerance("bf16")


def test_out_of_memory_is_halved_and_a_lost_device_ends_the_server(server):
    outcomes: list[ExpertdError | None] = []

    def ask(tokens: int) -> None:
        with ExpertClient(server.address) as client:
            try:
                client.forward(0, *random_inputs(tokens, H, E, K), timeout_s=100)
                outcomes.append(None)
            except ExpertdError as e:
                outcomes.append(e)

    with grpc.insecure_channel(server.address) as channel, ExpertClient(server.address) as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        right(client, 5)
        right(client, 50)
        assert server.faults() == {"split": 1, "failed": 0, "lost": 0}
        culprit = threading.Thread(target=ask, args=(13,))
        culprit.start()
        server.queued(1)
        waiting = [threading.Thread(target=ask, args=(5,)) for _ in range(4)]
        for t in waiting:
            t.start()
        server.queued(5)
        server.script.with_name(server.script.name + ".now").touch()
        for t in (culprit, *waiting):
            t.join(100)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert len(outcomes) == 5
    assert None not in outcomes, "nothing that a lost device computed is an answer"
    failed = [e for e in outcomes if isinstance(e, BackendFailedError)]
    assert len(failed) == 1, "the batch itself"
    for e in outcomes:
        assert e in failed or (e.retryable and e.code.name == "UNAVAILABLE"), repr(e)
    code, said = server.end()
    assert code == 3
    text = "\n".join(said)
    assert "CUDA out of memory.; freeing torch's cached memory and computing the batch again in halves" in text
    assert "the device is lost to this process: CUDA error: an illegal memory access" in text
    assert "restart the server" in text
