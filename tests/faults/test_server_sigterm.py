"""SIGTERM under load: what was taken is answered, what comes later gets UNAVAILABLE, and the exit code is 0 in time."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub

pytestmark = pytest.mark.timeout(400)  # each test starts servers
SERVICE = "expertd.v1.ExpertService"
H, K = 256, 2
GRACE_S = 100


class Process:
    """`expertd serve` as a process of its own."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--listen", "127.0.0.1:0", *args]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Read lines up to one that matches; returns the first group."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError("".join(self.lines))

    def end(self) -> tuple[int, str]:
        """(exit code, everything it printed)."""
        out, _ = self.process.communicate(timeout=GRACE_S)
        return self.process.returncode, "".join(self.lines) + out


@pytest.fixture
def start():
    made: list[Process] = []

    def start(*args: str) -> Process:
        made.append(Process("--synthetic", "tiny:int4_g128", "--device", "cpu", "--grace-s", str(GRACE_S), *args))
        return made[-1]

    yield start
    for p in made:
        if p.process.poll() is None:
            p.process.kill()
            p.process.communicate()


def request(n: int, tokens: int = 2) -> pb.ForwardRequest:
    rng = np.random.default_rng(n)
    ids = rng.integers(0, 8, (tokens, K)).astype(np.int32)
    x = rng.normal(size=(tokens, H)).astype(np.float32)
    return pb.ForwardRequest(
        request_id=n,
        layer=n % 2,
        hidden_states=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=x.shape, raw=x.tobytes()),
        topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, raw=ids.tobytes()),
        topk_weights=pb.Tensor(
            dtype=pb.DATA_TYPE_F32, shape=ids.shape, raw=np.full(ids.shape, 0.5, np.float32).tobytes()
        ),
    )


class Load:
    """Callers that go on until they are told that the server goes away.  answered: answers received; outcomes: how each
    caller ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.answered = 0
        self.outcomes: Counter[str] = Counter()
        self.threads = [threading.Thread(target=self.unary, args=(i,)) for i in range(4)]
        self.threads += [threading.Thread(target=self.stream, args=(i,)) for i in range(3)]
        for t in self.threads:
            t.start()

    def count(self, outcome: str) -> None:
        with self.lock:
            if outcome == "answer":
                self.answered += 1
            else:
                self.outcomes[outcome] += 1

    def unary(self, i: int) -> None:
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = ExpertServiceStub(channel)
            n = 0
            while True:
                n += 1
                try:
                    answer = stub.Forward(request(n), timeout=GRACE_S)
                except grpc.RpcError as e:
                    self.count(f"unary {e.code().name}")
                    return
                assert answer.routes_computed == 2 * K
                self.count("answer")

    def stream(self, i: int) -> None:
        """Keeps 8 in flight; every request must have exactly one outcome."""
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            outbox: queue.SimpleQueue = queue.SimpleQueue()
            n = 0
            for _ in range(8):
                n += 1
                outbox.put(pb.StreamForwardRequest(forward=request(n)))
            waiting = set(range(1, 9))
            try:
                for message in ExpertServiceStub(channel).StreamForward(iter(outbox.get, None)):
                    kind = message.WhichOneof("kind")
                    if kind == "forward":
                        waiting.remove(message.forward.request_id)
                        self.count("answer")
                        n += 1
                        waiting.add(n)
                        outbox.put(pb.StreamForwardRequest(forward=request(n)))
                    elif kind == "error":
                        waiting.remove(message.error.request_id)
                        self.count(f"in band {message.error.reason}")
                    else:
                        assert message.load.draining
                        self.count("told of the drain")
            except grpc.RpcError as e:
                self.count(f"stream {e.code().name}")
            finally:
                outbox.put(None)


def test_sigterm_under_load_loses_nothing_that_was_taken(start):
    server = start()
    address = server.until(r"serving on (\S+)")
    load = Load(address)
    until(lambda: load.answered >= 200, 100)
    server.process.send_signal(signal.SIGTERM)
    for t in load.threads:
        t.join(GRACE_S)
        assert not t.is_alive()
    code, out = server.end()
    assert code == 0, out
    taken = int(re.search(r"stopped: all (\d+) accepted requests were answered or refused", out)[1])
    assert load.answered == taken, f"every request that was taken has its answer at its caller: {load.outcomes}"
    assert load.outcomes["unary UNAVAILABLE"] == 4, load.outcomes
    assert load.outcomes["stream UNAVAILABLE"] == 3, load.outcomes
    assert load.outcomes["told of the drain"] == 3, load.outcomes
    assert set(load.outcomes) <= {
        "unary UNAVAILABLE",
        "stream UNAVAILABLE",
        "told of the drain",
        "in band DRAINING",
    }


def test_health_follows_the_server_s_life_and_idle_streams_do_not_hold_it_up(start):
    server = start("--metrics-listen", "127.0.0.1:0")
    metrics = server.until(r"metrics on (\S+)")
    address = server.until(r"serving on (\S+)")
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as e:
            health.Check(health_pb2.HealthCheckRequest(service="zebra"))
        assert e.value.code() is grpc.StatusCode.NOT_FOUND
        text = urllib.request.urlopen(metrics).read().decode()
        assert "expertd_serving 1.0" in text
        assert 'expertd_backend_info{activation_scheme="none",backend="' in text
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        outbox: queue.SimpleQueue = queue.SimpleQueue()
        idle = ExpertServiceStub(channel).StreamForward(iter(outbox.get, None))
        outbox.put(pb.StreamForwardRequest(forward=request(1)))
        assert next(idle).forward.request_id == 1
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(idle).load.draining
        with pytest.raises(grpc.RpcError) as e:
            next(idle)
        assert e.value.code() is grpc.StatusCode.UNAVAILABLE
        outbox.put(None)
        code, out = server.end()
    assert code == 0, out
    assert "Traceback" not in out


def computed(metrics: str) -> float:
    """Tokens, over all layers."""
    text = urllib.request.urlopen(metrics).read().decode()
    return sum(float(n) for n in re.findall(r"^expertd_tokens_total\{.*\} (\S+)$", text, re.M))


@pytest.fixture
def unread(start):
    """A server that has computed for a caller who does not read his answers of 4 MB."""
    server = start("--metrics-listen", "127.0.0.1:0")
    metrics = server.until(r"metrics on (\S+)")
    address = server.until(r"serving on (\S+)")
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        call = ExpertServiceStub(channel).StreamForward(iter(outbox.get, None))
        for n in range(1, 9):
            outbox.put(pb.StreamForwardRequest(forward=request(n, tokens=4096)))
        until(lambda: computed(metrics) >= 2 * 4096, 60)  # more than both sides' buffers take
        yield server
        call.cancel()
        outbox.put(None)


def test_a_caller_who_does_not_read_does_not_hold_up_the_end(unread):
    unread.process.send_signal(signal.SIGTERM)
    code, out = unread.end()
    assert code == 0, out
    assert "its client has read nothing" in out
    assert "grace time" not in out, "it did not take all of it"
    assert "Traceback" not in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(unread, number):
    unread.process.send_signal(number)
    unread.until(r"(draining)")
    unread.process.send_signal(number)
    code, out = unread.end()
    assert code == -number, out
    assert "stopped" not in out, "it was not over by itself"
    assert "Traceback" not in out


def test_not_serving_while_loading_and_sigterm_then_stops_it(start):
    server = start("--synthetic", "qwen3-30b-a3b:int4_g128", "--experts", "0-7")
    address = server.until(r"listening on (\S+)")
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as e:
            ExpertServiceStub(channel).Forward(request(1))
        assert e.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(e.value.trailing_metadata())["expertd-reason"] == "NOT_READY"
        with pytest.raises(grpc.RpcError) as e:
            ExpertServiceStub(channel).Describe(pb.DescribeRequest())
        assert dict(e.value.trailing_metadata())["expertd-reason"] == "NOT_READY"
    server.process.send_signal(signal.SIGTERM)
    code, out = server.end()
    assert code == 0, out
    assert "stopped while loading" in out
    assert "serving on" not in out
