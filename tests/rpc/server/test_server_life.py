"""Deadlines, cancelling, sessions, draining, metrics."""

from __future__ import annotations

import asyncio
import time

import pytest
from server_kit import FailedError, H, batch, check, values, wait_for

from expertd.v1 import expert_service_pb2 as pb


@pytest.mark.parametrize("refuse_late", [False])
async def test_a_request_whose_time_is_over_is_not_computed(served, refuse_late):
    """Not even where nothing is refused for what the forecast says, which on a busy machine it does."""
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=batch(5, request_id=1, timeout_us=400_000))
            await s.send(forward=batch(6, request_id=2, timeout_us=600_000_000))
            with pytest.raises(FailedError) as e:
                await served.call.forward(batch(7), timeout=0.2)
            assert e.value.code == "DEADLINE_EXCEEDED"
            # 2 came after 1, which may be refused by now where this machine is busy.
            await wait_for(lambda: served.engine.load().queued_requests >= 2, 50)
            await asyncio.sleep(0.45)  # the time that the 5 tokens have
            served.gate.set()
            error, answer = sorted(
                [await s.receive(), await s.receive()], key=lambda m: m.WhichOneof("kind") == "forward"
            )
    await first
    assert (error.error.request_id, error.error.reason) == (1, "DEADLINE_EXCEEDED")
    assert answer.forward.request_id == 2
    assert served.kernels == [1, 6], "neither the 5 tokens nor the 7 were computed"


async def test_a_cancelled_request_is_answered_as_such_and_not_computed(served):
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=batch(5, request_id=1))
            await s.send(forward=batch(6, request_id=2))
            await s.send(cancel=pb.CancelRequest(request_id=1))
            await s.send(cancel=pb.CancelRequest(request_id=44))
            error = (await s.receive()).error
            assert (error.request_id, error.reason) == (1, "CANCELLED")
            unary = asyncio.create_task(served.call.forward(batch(7)))
            await wait_for(lambda: served.engine.load().queued_requests == 4)
            unary.cancel()
            await asyncio.gather(unary, return_exceptions=True)
            await wait_for(lambda: served.server.servicer.open_calls == 2)
            served.gate.set()
            assert (await s.receive()).forward.request_id == 2
    await first
    assert served.kernels == [1, 6]


async def test_a_stream_that_goes_away_takes_its_requests_along(served):
    with served.busy():
        first = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            for n in range(3):
                await s.send(forward=batch(5, request_id=n + 1))
            await wait_for(lambda: served.engine.load().queued_requests == 4)
        await wait_for(lambda: served.server.servicer.open_calls == 1)
    await first
    await wait_for(served.engine.idle)
    assert served.kernels == [1]


async def test_a_session_offer_gets_a_verdict_for_each_transport(served):
    async with served.call.stream() as s:
        await s.send(session=pb.SessionOffer(transports=["shm", "smoke"], host_id="here"))
        answer = (await s.receive()).session
        assert [(v.transport, v.accepted, v.reason) for v in answer.verdicts] == [
            ("shm", False, "this server does not know it"),
            ("smoke", False, "this server does not know it"),
        ]
        await s.send(forward=batch(1, request_id=1))
        assert (await s.receive()).forward.request_id == 1


async def test_draining_finishes_what_was_taken_and_refuses_the_rest(served, weights):
    mine = batch(3, request_id=1)
    with served.busy():
        unary = asyncio.create_task(served.call.forward(batch(1)))
        await asyncio.to_thread(served.entered.wait, 20)
        async with served.call.stream() as s:
            await s.send(forward=mine)
            await wait_for(lambda: served.engine.load().queued_requests == 2)
            end = asyncio.create_task(served.drain(20))
            told = await s.receive()
            assert told.load.draining
            await s.send(forward=batch(1, request_id=2))
            error = (await s.receive()).error
            assert (error.request_id, error.reason, error.code, error.retryable) == (2, "DRAINING", 14, True)
            with pytest.raises(FailedError) as e:
                await served.call.forward(batch(1))
            assert (e.value.code, e.value.reason, e.value.retryable) == ("UNAVAILABLE", "DRAINING", True)
            served.gate.set()
            check(weights, mine, (await s.receive()).forward)
            with pytest.raises(FailedError) as e:
                await s.receive()
            assert (e.value.code, e.value.reason) == ("UNAVAILABLE", "DRAINING")
    await unary
    assert await end


async def test_metrics_tell_what_happened(served):
    await served.call.forward(batch(4, seed=1))
    with pytest.raises(FailedError):
        await served.call.forward(batch(4, layer=9))
    async with served.call.stream() as s:
        await s.send(forward=batch(2, request_id=1, layer=1))
        await s.receive()
        await s.half_close()
        assert await s.receive() is None
    get = served.metrics.registry.get_sample_value
    # A batch is counted after its answers are given away; the last series of it stands for all.
    await wait_for(lambda: get("expertd_copy_seconds_count", {"direction": "out"}) == 2)
    await wait_for(lambda: get("expertd_expert_tokens_total", {"layer": "1", "expert": "1"}) is not None)
    rpc = {"grpc_service": "expertd.v1.ExpertService", "grpc_method": "Forward", "grpc_type": "unary"}
    stream = {"grpc_service": "expertd.v1.ExpertService", "grpc_method": "StreamForward", "grpc_type": "bidi_stream"}
    assert get("grpc_server_started_total", rpc) == 2
    assert get("grpc_server_handled_total", rpc | {"grpc_code": "OK"}) == 1
    assert get("grpc_server_handled_total", rpc | {"grpc_code": "NOT_FOUND"}) == 1
    assert get("grpc_server_handling_seconds_count", rpc) == 2
    assert get("grpc_server_msg_received_total", stream) == 1
    assert get("grpc_server_msg_sent_total", stream) == 1
    assert get("expertd_requests_total", {"code": "OK", "reason": ""}) == 2
    assert get("expertd_requests_total", {"code": "NOT_FOUND", "reason": "LAYER_NOT_HELD"}) == 1
    assert get("expertd_tokens_total", {"layer": "0"}) == 4
    assert get("expertd_batch_tokens_sum") == 6
    assert get("expertd_queue_seconds_count") == 2
    assert get("expertd_kernel_seconds_count", {"backend": "reference"}) == 2
    assert get("expertd_bytes_total", {"direction": "in"}) > 4 * H * 2
    assert get("expertd_bytes_total", {"direction": "out"}) > 4 * H * 2
    ids = values(batch(4, seed=1).topk_ids)
    for expert in range(1, 7):
        got = get("expertd_expert_tokens_total", {"layer": "0", "expert": str(expert)})
        assert got == int((ids == expert).sum())
    assert get("expertd_queued_tokens") == 0
    assert get("expertd_serving") == 1


@pytest.mark.timeout(30)
async def test_a_drained_server_closes_when_no_call_has_come_for_a_while(served):
    """A call that comes in the moment of closing would be reset by gRPC without a reason."""
    begin = time.monotonic()
    await served.server._quiet(begin + 1000)
    assert 0.14 < time.monotonic() - begin < 1000

    latest_s = 0.0

    async def calls(count: int) -> None:
        nonlocal latest_s
        for _ in range(count):
            served.server.servicer.calls_begun += 1
            latest_s = time.monotonic()
            await asyncio.sleep(0.03)

    coming = asyncio.create_task(calls(16))
    await served.server._quiet(time.monotonic() + 20)
    assert time.monotonic() - latest_s >= 0.14, "it waited while calls came"
    await coming
    coming = asyncio.create_task(calls(600))
    await served.server._quiet(time.monotonic() + 0.2)
    assert not coming.done(), "and no longer than it may"
    coming.cancel()
    begin = time.monotonic()
    assert await served.drain(60)
    assert time.monotonic() - begin > 0.14, "a drain does wait for it"
