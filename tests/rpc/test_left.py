"""What calls leave behind that end before their answer: at most a line at debug, and nothing of their messages."""

import gc
import logging
import random
import threading
import time
import tracemalloc
from collections import Counter

import grpc
import pytest
from google.protobuf.internal import encoder
from grpc._cython.cygrpc import ExecuteBatchError
from in_process import hosts

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as stubs
from expertd_server.config.values import Address

pytestmark = pytest.mark.timeout(60)

GRPC = logging.getLogger("grpc._cython.cygrpc")
SERVICE = "/expertd.v1.ExpertService/"
CALLS = [
    (SERVICE + "Describe", b"\xff"),
    (SERVICE + "Describe", b""),
    (SERVICE + "Forward", b"\xff"),
    ("/grpc.health.v1.Health/Check", b""),
    ("/inference.GRPCInferenceService/ModelInfer", b"\xff"),
]
STATUS = ("/expertd.v1.AdminService/Status", b"")


@pytest.fixture(scope="module")
def host():
    with hosts(synthetic="tiny:int4_g128", kserve=True, admin_listen=Address("127.0.0.1", 0)) as serve:
        yield serve()


def ask(address, calls, end_s, deadline_s, ended):
    """Call after call with hardly any time, each counted by how it ended."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        grpc.channel_ready_future(channel).result(10)
        methods = [(channel.unary_unary(method), data) for method, data in calls]
        while time.monotonic() < end_s:
            for method, data in methods:
                try:
                    method(data, timeout=deadline_s())
                    ended["OK"] += 1
                except grpc.RpcError as e:
                    ended[e.code().name] += 1


def test_calls_with_no_time_left_leave_no_trace(host, caplog):
    """Without disconnects.py about one call in a thousand leaves a trace: one that ends in the moment of its answer."""
    caplog.set_level(logging.INFO)
    with grpc.insecure_channel(host.address) as channel:
        admin = stubs.ExpertServiceStub(channel).Describe(pb.DescribeRequest()).admin_address
    end_s, ended = time.monotonic() + 3.0, Counter()
    deadlines = (lambda: 1e-5, lambda: 3e-3 * random.random(), lambda: 3e-3 * random.random())
    told = [(host.address, CALLS, d) for d in deadlines] + [(admin, [STATUS], deadlines[1])]
    threads = [threading.Thread(target=ask, args=(a, calls, end_s, d, ended)) for a, calls, d in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended["DEADLINE_EXCEEDED"] > 100
    assert not [r for r in caplog.records if r.exc_info]


def say(text):
    """What gRPC logs of a call that failed so."""
    try:
        raise ExecuteBatchError(text)
    except ExecuteBatchError:
        GRPC.exception("ExecuteBatchError raised in core by servicer method [%s]", "/a/B")


def test_an_answer_that_finds_nobody_is_a_line_at_debug(host, caplog):
    caplog.set_level(logging.DEBUG)
    say('Failed "execute_batch": (<SendStatusFromServerOperation>)')
    (line,) = [r for r in caplog.records if "/a/B" in r.getMessage()]
    assert line.levelno == logging.DEBUG
    assert not line.exc_info


def test_a_call_that_we_get_wrong_is_told_with_its_trace(host, caplog):
    say("Failed grpc_call_start_batch: 8 with grpc_call_error value: 'GRPC_CALL_ERROR_INVALID_FLAGS'")
    (line,) = [r for r in caplog.records if "/a/B" in r.getMessage()]
    assert line.levelno == logging.ERROR
    assert line.exc_info


@pytest.mark.parametrize(
    "method", [SERVICE + "Forward", SERVICE + "Describe", "/grpc.health.v1.Health/Check", CALLS[-1][0]]
)
def test_a_refused_message_is_let_go_of_at_once(host, method):
    """And not when the collector of cycles comes: until then a hundred calls hold a hundred messages."""
    raw = b"\x1a" + encoder._VarintBytes(1_000_000) + bytes(1_000_000)
    tensor = b"\x08\x01\x12\x02\x01\x01" + raw  # F32 [1, 1]
    data = b"\x1a" + encoder._VarintBytes(len(tensor)) + tensor
    data = b"\xff" * len(data) if "Health" in method else data
    with grpc.insecure_channel(host.address) as channel:
        call = channel.unary_unary(method)

        def refused():
            with pytest.raises(grpc.RpcError) as e:
                call(data, timeout=20)
            assert e.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED

        refused()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(20):
                refused()
            held = [s.size for s in tracemalloc.take_snapshot().statistics("lineno") if s.size > 500_000]
        finally:
            tracemalloc.stop()
            gc.enable()
    assert sum(held) < 5_000_000
