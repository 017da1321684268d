"""One stream and a caller who does not do his part: who does not read, or says nothing for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
import torch
from grpc._cython.cygrpc import ExecuteBatchError

from expertd.errors import UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import Limits
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.service.service import Service
from expertd_server.transports.grpc.loop_thread import OnLoop
from expertd_server.transports.grpc.service import Servicer
from expertd_server.transports.grpc.stream import _MOST_UNREAD as MOST_UNREAD
from expertd_server.transports.grpc.stream import Stream
from expertd_server.views.call_metrics import Rpc
from expertd_server.views.metrics import Metrics

pytestmark = pytest.mark.timeout(30)


class Caller:
    """grpc.aio's context.  Sends bad messages without end, or nothing; `reads` = False: takes none of the answers."""

    def __init__(self, sends: bool, reads: bool) -> None:
        self.sends, self.reads = sends, reads
        self.sent, self.got = 0, []

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5000"

    def invocation_metadata(self):
        return ()

    async def read(self) -> bytes:
        if not self.sends:
            await asyncio.Event().wait()
        self.sent += 1
        await asyncio.sleep(0)
        return pb.StreamForwardRequest(forward=pb.ForwardRequest(request_id=self.sent)).SerializeToString()

    async def write(self, data: bytes) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        self.got.append(data)


def new_service(metrics: Metrics) -> Service:
    return Service(Engine(torch.device("cpu"), policy=Policy(64)), metrics, Limits(64, 1 << 20, 8))


async def stream(caller: Caller) -> Stream:
    metrics = Metrics()
    service = new_service(metrics)
    return Stream(service, OnLoop(), Rpc(metrics.calls, "bidi_stream", "StreamForward"), caller, "test")


async def begun(caller: Caller) -> tuple[Stream, asyncio.Task]:
    made: list[Stream] = []

    async def run() -> None:
        made.append(await stream(caller))
        await made[0].run()

    task = asyncio.create_task(run())
    await until(lambda: made)
    return made[0], task


async def until(so: Callable[[], object]) -> None:
    """The test's time limit ends it where that never comes."""
    while not so():
        await asyncio.sleep(0.005)


async def test_who_does_not_read_is_read_no_further():
    caller = Caller(sends=True, reads=False)
    stuck, task = await begun(caller)
    await until(lambda: caller.sent > MOST_UNREAD)
    for _ in range(10_000):  # turns, of which each would read a message
        await asyncio.sleep(0)
    assert caller.sent < 1000
    await until(lambda: stuck.unread_s(time.monotonic()) > 0.2)
    assert caller.sent < 1000
    stuck.cut_off()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_reads_is_read_on():
    caller = Caller(sends=True, reads=True)
    going, task = await begun(caller)
    await until(lambda: caller.sent > 1000)
    assert going.unread_s(time.monotonic()) == 0, "nothing waits for him"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_refusals_and_answers_take_turns():
    caller = Caller(sends=False, reads=True)
    one, task = await begun(caller)
    one._outbox.extend((b"answer", 0) for _ in range(3))
    one._small.extend(b"refusal" for _ in range(5))
    one._flush()
    await until(lambda: len(caller.got) == 8)
    assert caller.got == [b"refusal", b"answer"] * 3 + [b"refusal"] * 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stream_on_which_nothing_comes_is_closed_in_order():
    idle, task = await begun(Caller(sends=False, reads=True))
    await until(lambda: idle.idle_s(time.monotonic()) > 0.2)
    idle.retire(UnavailableError("nothing came for long"))
    with pytest.raises(UnavailableError, match="nothing came for long"):
        await task


class Gone(Caller):
    """Leaves after the first message that he sent."""

    async def write(self, data: bytes) -> None:
        raise ExecuteBatchError('Failed "execute_batch": (<SendMessageOperation>)')


async def test_a_caller_who_left_before_his_answer_is_no_fault_of_ours(caplog):
    metrics = Metrics()
    with pytest.raises(ExecuteBatchError):  # gRPC knows what it is
        await Servicer(new_service(metrics)).stream_forward(None, Gone(sends=True, reads=True))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    handled = next(f for f in metrics.registry.collect() if f.name == "grpc_server_handled")
    counted = {s.labels["grpc_code"] for s in handled.samples if s.labels["grpc_method"] == "StreamForward" and s.value}
    assert counted == {"CANCELLED"}
