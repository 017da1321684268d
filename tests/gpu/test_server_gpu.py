"""`expertd serve` on an accelerator, as a process: boots, answers, what it says of itself, a second boot from the
cache, a drain, and a kernel that takes the device down.  tests/load/device_server.py has the figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from faulty_program import faulty_program

from expertd_kernels import detect_device, reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

try:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from expertd.errors import BackendFailedError, DrainingError, UnavailableError
    from expertd_client import ExpertClient, GrpcTransport
    from expertd_client.requests.e4m3 import quantize
    from expertd_client.transports.tcp.connection import TcpTransport
except Exception as e:  # a machine for kernels alone: nothing installed, or other versions of grpcio and protobuf
    pytest.skip(f"the server cannot run here: {type(e).__name__}: {e}", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(detect_device("auto").kind == "cpu", reason="runs on an accelerator, this machine has none"),
]
BOOT_S = 300.0
MODEL = "tiny:int4_g128"
E, K, H = 8, 2, 256

FAULTY = faulty_program(
    """
class Experts(reference.ReferenceExperts):
    def __call__(self, x, ids, w, **more):
        if len(x) == 13:
            torch.zeros(4, device=x.device)[torch.full((1,), 99, device=x.device)] = 1.0  # an assertion in a kernel
        return super().__call__(x, ids, w, **more)
"""
)


class Process:
    """`expertd serve` and what it printed."""

    def __init__(self, log, *args: str, program: tuple[str, ...] = ("-m", "expertd_server.commands.cli")) -> None:
        command = [sys.executable, *program, "serve", "--listen", "127.0.0.1:0", *args]
        self.log = log
        with log.open("wb") as out:
            env = os.environ | {"PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    def text(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str) -> str:
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            if found := re.search(pattern, self.text()):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"no {pattern!r} (exit code {self.process.poll()}):\n{self.text()}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def eight_at_once(caller) -> None:
    """caller(0) to caller(7) on threads of their own; the first error of any."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(caller, i) for i in range(8)]:
            done.result()


@pytest.fixture
def start(tmp_path):
    made: list[Process] = []

    def start(*args: str, **more) -> Process:
        made.append(Process(tmp_path / f"log{len(made)}", *args, **more))
        return made[-1]

    yield start
    for p in made:
        if p.process.poll() is None:
            p.process.kill()
            p.process.wait()


def assert_right(client: ExpertClient, tokens: int, layer: int = 0) -> None:
    x, ids, w = random_inputs(tokens, H, E, K, seed=tokens)
    ids[0, 0] = -1
    answer = client.forward(layer, x, ids, w, timeout_s=60)
    right = reference(SyntheticModel.parse(MODEL).load(layer), x, ids, w)
    assert relative_error(torch.as_tensor(answer.output), right) <= tolerance("bf16")
    assert answer.routes_computed == tokens * K - 1
    assert answer.timing.kernel_ns > 0


def test_answers_what_it_says_of_itself_drains_and_boots_again_from_the_cache(start, tmp_path):
    args = ("--synthetic", MODEL, "--cache", str(tmp_path / "cache"), "--metrics-listen", "127.0.0.1:0")
    backends = []
    for run in ("first", "second"):
        server = start(*args)
        metrics = server.until(r"metrics on (\S+)")
        address = server.until(r"serving on (\S+)")
        with ExpertClient(address) as client:
            for tokens in (1, 5, 200):
                assert_right(client, tokens, layer=tokens % 2)
            described = client.describe(include_decisions=True)
        for layer in described.layers:
            assert layer.backend != "reference"
            assert layer.from_cache == (run == "second")
            served = next(v for v in layer.verdicts if v.backend == layer.backend)
            assert 0 < served.relative_error <= tolerance("bf16")
        backends.append(described.layers[0].backend)
        text = urllib.request.urlopen(metrics).read().decode()
        assert f'device="{detect_device("auto")}"' in text
        assert f'backend="{backends[-1]}"' in text
        assert server.stop() == 0, server.text()
        assert "accepted requests were answered or refused" in server.text()
    assert backends[0] == backends[1]


def test_e4m3_from_both_ways_is_widened_on_the_device(start):
    """Against bf16 of what the codes stand for; 300 rows are beyond what copy engines move of bf16."""
    address = start("--synthetic", MODEL).until(r"serving on (\S+)")
    for server in (address, GrpcTransport(address)):
        with ExpertClient(server, timeout_s=60) as plain, ExpertClient(server, wire_dtype="e4m3", timeout_s=60) as e4m3:
            assert plain.session().transport == e4m3.session().transport
            for tokens in (1, 5, 300):
                x, ids, w = random_inputs(tokens, H, E, K, seed=tokens)
                q = quantize(x)
                wide = q.codes.view(torch.float8_e4m3fn).float() * q.scales.repeat_interleave(128, 1)
                want = torch.as_tensor(plain.forward(0, wide.bfloat16(), ids, w).output).float()
                for hidden in (x, x.to("cuda")) if torch.cuda.is_available() else (x,):
                    answer = e4m3.forward(0, hidden, ids, w)
                    assert answer.output.device == hidden.device
                    assert relative_error(answer.output.float(), want) <= 1e-3
                    assert answer.timing.backend
                right = reference(SyntheticModel.parse(MODEL).load(0), x, ids, w)
                assert relative_error(torch.as_tensor(answer.output), right) <= 0.04 + tolerance("bf16")


def test_cuda_tensors_go_straight_into_shared_memory_in_the_order_of_their_stream(start):
    """Inputs that a stream still computes, rows that are apart, outputs that are read at once and kept."""
    if not torch.cuda.is_available():
        pytest.skip("its tensors are CUDA's")
    address = start("--synthetic", MODEL, "--layers", "0").until(r"serving on (\S+)")
    weights, kept = SyntheticModel.parse(MODEL).load(0), []
    with ExpertClient(address, timeout_s=60) as client:
        assert client.session().transport == "shm"
        with torch.cuda.stream(torch.cuda.Stream()):
            for n, tokens in enumerate((1, 5, 64, 300) * 10):
                x, ids, w = (t.to("cuda") for t in random_inputs(tokens, H, E, K, seed=n))
                late = torch.full((tokens, 2 * H), float("nan"), dtype=x.dtype, device="cuda")
                torch.cuda._sleep(2_000_000)  # a millisecond until the values are there
                late[:, :H] = x
                output = client.forward(0, late[:, :H], ids, w).output
                kept.append((output, output.float() + 0, reference(weights, *(t.cpu() for t in (x, ids, w)))))
            torch.cuda.current_stream().synchronize()
        pinned = client._exchange._link.session_connection._pinned
        assert pinned is not None, "copied on the host"
        for output, read_at_once, want in kept:
            assert relative_error(output.float().cpu(), want) <= tolerance("bf16")
            assert torch.equal(output.float(), read_at_once)


def test_sessions_over_tcp_by_one_and_by_eight_callers(start):
    """Also as e4m3 and from CUDA tensors; 300 rows are beyond what travels in one piece, and a drain answers all."""
    server = start("--synthetic", MODEL, "--layers", "0-1", "--tcp-listen", "127.0.0.1:0")
    address = server.until(r"serving on (\S+)")

    def connected(**options) -> ExpertClient:
        made = ExpertClient(GrpcTransport(address, offers=[TcpTransport(address)]), timeout_s=60, **options)
        assert made.session().transport == "tcp", made.session()
        return made

    with connected() as client, connected(wire_dtype="e4m3") as e4m3:
        for tokens in (1, 5, 300):
            assert_right(client, tokens, layer=tokens % 2)
            x, ids, w = random_inputs(tokens, H, E, K, seed=tokens)
            want = reference(SyntheticModel.parse(MODEL).load(0), x, ids, w)
            for hidden in (x, x.to("cuda")) if torch.cuda.is_available() else (x,):
                for c, more in ((client, 0.0), (e4m3, 0.04)):
                    output = c.forward(0, hidden, ids, w).output
                    assert output.device == hidden.device
                    assert relative_error(output.float().cpu(), want) <= tolerance("bf16") + more

        def caller(i: int) -> None:
            with connected() as mine:
                for n in range(10):
                    assert_right(mine, 1 + (i + n) % 9)

        eight_at_once(caller)
    assert server.stop() == 0, server.text()


def test_measured_with_two_copies_and_eight_callers_at_once(start):
    server = start("--synthetic", MODEL, "--layers", "0", "--oracle", "measure", "--copies", "2", "--max-tokens", "64")
    address = server.until(r"serving on (\S+)")
    with ExpertClient(address) as client:
        layer = client.describe(include_decisions=True).layers[0]
        assert layer.chosen_by == "measure"
        measured = {v.backend: [t.tokens for t in v.times] for v in layer.verdicts if v.times}
        assert measured[layer.plan[-1].backend] == [1, 8, 64]

        def caller(i: int) -> None:
            for n in range(10):
                assert_right(client, 1 + (i + n) % 9)

        eight_at_once(caller)
    assert server.stop() == 0, server.text()


def test_a_kernel_that_takes_the_device_down_ends_the_server_with_the_reason(start, tmp_path):
    """Every call after it would fail: the server says so, is NOT_SERVING, and ends with an error code."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    server = start("--synthetic", MODEL, "--layers", "0", program=(str(script),))
    address = server.until(r"serving on (\S+)")
    with grpc.insecure_channel(address) as channel, ExpertClient(address) as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert_right(client, 5)
        with pytest.raises(BackendFailedError, match="backend faulty, layer 0, 13 tokens: "):
            client.forward(0, *random_inputs(13, H, E, K), timeout_s=60)
        with pytest.raises((DrainingError, UnavailableError)):
            client.forward(0, *random_inputs(5, H, E, K), timeout_s=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.process.wait(60) != 0
    assert "the device is lost to this process: " in server.text()
    assert "restart the server" in server.text()
