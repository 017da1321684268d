"""Two ways to call one server with the generated classes, and batches with their reference answers.

The backend is the float32 reference on a small synthetic model, held in part: experts 1..6 of 8.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass

import grpc
import numpy as np
import torch

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges
from expertd_server.engine.engine import Engine
from expertd_server.transports.grpc.server import ExpertServer
from expertd_server.transports.grpc.service import Servicer
from expertd_server.views.metrics import Metrics

BF16, F16, F32, I32, I64 = (
    pb.DATA_TYPE_BF16,
    pb.DATA_TYPE_F16,
    pb.DATA_TYPE_F32,
    pb.DATA_TYPE_I32,
    pb.DATA_TYPE_I64,
)
TORCH = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32, I32: torch.int32, I64: torch.int64}
H, K, NUM_EXPERTS, MAX_TOKENS, MAX_BYTES, IN_FLIGHT = 256, 2, 8, 64, 1 << 17, 8
CONFIG = ServeConfig(synthetic="tiny:int4_g128", experts=Ranges.parse("1-6"), backend="reference", device="cpu")


class FailedError(Exception):
    """A call or a request that failed, however the transport says it."""

    def __init__(self, code: str, reason: str, text: str, retryable: bool) -> None:
        super().__init__(f"{code} {reason}: {text}")
        self.code, self.reason, self.text, self.retryable = code, reason, text, retryable

    @classmethod
    def of_status(cls, code: grpc.StatusCode, text: str, metadata) -> FailedError:
        found = dict(metadata)
        return cls(code.name, found.get("expertd-reason", ""), text, found.get("expertd-retryable") == "true")


class AbortedError(Exception):
    pass


class Context:
    """What grpc.aio gives a handler, as far as it is used."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.to_server: asyncio.Queue = asyncio.Queue()
        self.to_caller: asyncio.Queue = asyncio.Queue()
        self.status = None

    def time_remaining(self):
        return self.timeout

    def peer(self):
        return "ipv4:192.0.2.1:5000"

    def invocation_metadata(self):
        return ()

    async def abort(self, code, details="", trailing_metadata=()):
        self.status = (code, details, trailing_metadata)
        raise AbortedError

    async def read(self):
        return await self.to_server.get()

    async def write(self, data):
        await self.to_caller.put(data)


class InProcess:
    """The servicer's methods themselves."""

    def __init__(self, servicer: Servicer, address: Address) -> None:
        self._servicer = servicer

    async def forward(self, request: pb.ForwardRequest, timeout: float | None = None) -> pb.ForwardResponse:
        context = Context(timeout)
        call = self._servicer.forward(request.SerializeToString(), context)
        try:
            return pb.ForwardResponse.FromString(await asyncio.wait_for(call, timeout))
        except asyncio.TimeoutError:
            raise FailedError("DEADLINE_EXCEEDED", "", "the caller's own clock", False) from None
        except AbortedError:
            raise FailedError.of_status(*context.status) from None

    async def describe(self, **fields) -> pb.DescribeResponse:
        data = await self._servicer.describe(pb.DescribeRequest(**fields).SerializeToString(), Context())
        return pb.DescribeResponse.FromString(data)

    @contextlib.asynccontextmanager
    async def stream(self):
        context = Context()
        call = asyncio.create_task(self._servicer.stream_forward(None, context))

        class Stream:
            async def send(self, **fields):
                await context.to_server.put(pb.StreamForwardRequest(**fields).SerializeToString())

            async def send_bytes(self, data):
                await context.to_server.put(data)

            async def half_close(self):
                await context.to_server.put(grpc.aio.EOF)

            async def receive(self):
                get = asyncio.create_task(context.to_caller.get())
                await asyncio.wait({get, call}, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return pb.StreamForwardResponse.FromString(get.result())
                get.cancel()
                if context.status is not None:
                    raise FailedError.of_status(*context.status)
                return None

        try:
            yield Stream()
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def close(self) -> None:
        pass


class Localhost:
    """A plain grpcio client with the generated stub."""

    def __init__(self, servicer: Servicer, address: Address) -> None:
        self._channel = grpc.aio.insecure_channel(str(address), options=[("grpc.max_send_message_length", -1)])
        self._stub = ExpertServiceStub(self._channel)

    async def forward(self, request: pb.ForwardRequest, timeout: float | None = None) -> pb.ForwardResponse:
        try:
            return await self._stub.Forward(request, timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise FailedError.of_status(e.code(), e.details(), e.trailing_metadata()) from None

    async def describe(self, **fields) -> pb.DescribeResponse:
        return await self._stub.Describe(pb.DescribeRequest(**fields))

    @contextlib.asynccontextmanager
    async def stream(self):
        raw = self._channel.stream_stream("/expertd.v1.ExpertService/StreamForward")
        call = raw()

        class Stream:
            async def send(self, **fields):
                await call.write(pb.StreamForwardRequest(**fields).SerializeToString())

            async def send_bytes(self, data):
                await call.write(data)

            async def half_close(self):
                await call.done_writing()

            async def receive(self):
                try:
                    data = await call.read()
                except grpc.aio.AioRpcError as e:
                    raise FailedError.of_status(e.code(), e.details(), e.trailing_metadata()) from None
                if data is grpc.aio.EOF:
                    code = await call.code()
                    if code is not grpc.StatusCode.OK:
                        raise FailedError.of_status(code, await call.details(), await call.trailing_metadata())
                    return None
                return pb.StreamForwardResponse.FromString(data)

        try:
            yield Stream()
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


@dataclass
class Served:
    """A server, a caller of it, and what a test needs to make it slow."""

    call: InProcess | Localhost
    server: ExpertServer
    engine: Engine
    metrics: Metrics
    gate: threading.Event
    entered: threading.Event
    kernels: list[int]

    async def drain(self, grace_s: float) -> bool:
        """As the server's life ends."""
        until_s = time.monotonic() + grace_s
        self.server.service.drain()
        done = await self.server.drain(until_s)
        await asyncio.to_thread(self.engine.stop, 5)
        self.server.service.close()
        return done

    @contextlib.contextmanager
    def busy(self):
        """While inside, the engine waits in its kernel."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


class Gated:
    """Experts that wait for a gate and count the tokens they computed."""

    def __init__(self, inner, gate, entered, kernels) -> None:
        self.inner, self.gate, self.entered, self.kernels = inner, gate, entered, kernels
        self.backend = inner.backend

    def __call__(self, hidden_states, *args, **kwargs):
        self.entered.set()
        assert self.gate.wait(20)
        self.kernels.append(len(hidden_states))
        return self.inner(hidden_states, *args, **kwargs)


def tensor(t: torch.Tensor, dtype: int) -> pb.Tensor:
    t = t.to(TORCH[dtype]).contiguous()
    raw = (t.view(torch.int16) if dtype == BF16 else t).numpy().tobytes()
    return pb.Tensor(dtype=dtype, shape=list(t.shape), raw=raw)


def values(t: pb.Tensor) -> torch.Tensor:
    raw = torch.from_numpy(np.frombuffer(t.raw, np.uint8).copy())
    return raw.view(TORCH[t.dtype]).view(list(t.shape))


def batch(tokens=4, seed=0, layer=0, dtypes=(BF16, I32, F32), **fields) -> pb.ForwardRequest:
    x, ids, w = random_inputs(tokens, H, NUM_EXPERTS, K, seed=seed)
    return pb.ForwardRequest(
        layer=layer,
        hidden_states=tensor(x, dtypes[0]),
        topk_ids=tensor(ids, dtypes[1]),
        topk_weights=tensor(w, dtypes[2]),
        **fields,
    )


def drawn(shape, dtype, seed=7, **more):
    return pb.Tensor(dtype=dtype, shape=shape, synthetic=pb.SyntheticValues(seed=seed, **more))


def expected(weights, r: pb.ForwardRequest, ids=None, w=None) -> torch.Tensor:
    """The reference's answer to `r`, whose ids are global."""
    ids = values(r.topk_ids) if ids is None else ids
    slots = torch.where((ids >= 1) & (ids <= 6), ids - 1, -1).int()
    w = values(r.topk_weights) if w is None else w
    return reference(
        weights[r.layer],
        values(r.hidden_states),
        slots,
        w,
        router_weight_on_input=r.router_weight_on_input,
    )


def held_routes(ids: torch.Tensor) -> int:
    return int(((ids >= 1) & (ids <= 6)).sum())


def check(weights, r: pb.ForwardRequest, a: pb.ForwardResponse) -> None:
    assert relative_error(values(a.output).float(), expected(weights, r)) <= tolerance("bf16")
    assert a.routes_computed == held_routes(values(r.topk_ids))


async def wait_for(condition, seconds=20.0):
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")
