"""The server: all of `expertd serve` but the kernels, so what an answer takes here is what the service takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

import expertd
from expertd.common.dtypes import DTYPE_NUMBER, HIDDEN_DTYPES
from expertd.common.identity import synthetic_identity
from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels.common.protocol import Direct
from expertd_server.config.values import Address
from expertd_server.engine.admission import Limits, QueueLimits
from expertd_server.engine.convert import output_dtypes
from expertd_server.engine.core import copying
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.service.service import Service
from expertd_server.transports.grpc.server import GrpcTransport
from expertd_server.transports.listening import listening
from expertd_server.transports.security import Security
from expertd_server.transports.shm import ShmListener
from expertd_server.transports.tcp import TcpListener
from expertd_server.views.metrics import Metrics

__all__ = ["Echo", "serving"]

_NUM_EXPERTS, _TOP_K = 8, 8
_GRACE_S = 1.0
_IN_FLIGHT = 2
"""Requests of the largest size, with their answers, that a session in shared memory has room for."""
_WIDEST = 4
"""Bytes of the widest dtype that hidden states travel in."""


@contextlib.contextmanager
def serving(
    listen: Address,
    hidden_size: int,
    max_tokens: int,
    pace_us: tuple[int, int] = (0, 0),
    refuse_late: bool = True,
    nonfinite: str = "pass",
    security: Security | None = None,
    num_experts: int = _NUM_EXPERTS,
    held: range = range(_NUM_EXPERTS),
) -> Iterator[str]:
    """Its address while it serves: one layer, 0, of experts that do nothing, of which those `held` are here.  pace_us:
    that a batch and each of its rows take.  security: of gRPC."""
    metrics = Metrics()
    engine: Any = Engine(
        torch.device("cpu"),
        policy=Policy(max_tokens),
        limits=QueueLimits(refuse_late=refuse_late),
        nonfinite=nonfinite,
        observe=metrics.batch,
    )
    experts = Echo(*pace_us)
    measured = tuple((m, _TOP_K, 1000 * (pace_us[0] + m * pace_us[1])) for m in (1, 32) if any(pace_us))
    shape = (0, num_experts, held, _TOP_K, hidden_size, hidden_size)
    layer = ServedLayer(*shape, experts, "echo", measured=measured)
    engine.hold([layer])
    limits = Limits(max_tokens, max_tokens * (_WIDEST * hidden_size + 12 * _TOP_K) + (64 << 10), 1024)
    service = Service(engine, metrics, limits)
    listener = ShmListener(engine, arena_bytes=_IN_FLIGHT * limits.max_message_bytes)
    service.offered["shm"] = "the server does not listen on loopback"
    if listen.loopback:
        try:
            listener.start()
            service.offered["shm"] = listener
        except OSError as e:
            service.offered["shm"] = str(e)
    tcp = TcpListener(engine, Address(listen.host or "127.0.0.1", 0), TcpBounds(limits.max_message_bytes))
    tcp.start()
    service.offered["tcp"] = tcp
    transport = GrpcTransport(service, listen, *([] if security is None else [security]))
    with listening("--listen", listen):
        address = transport.start()
    try:
        engine.start()
        service.open(lambda decisions: _described(hidden_size, limits, num_experts, held))
        transport.open()
        yield address
    finally:
        service.drain()
        transport.drain(time.monotonic() + _GRACE_S)
        transport.close()
        listener.close()
        tcp.close()
        engine.stop(1.0)
        service.close()


def _described(hidden_size: int, limits: Limits, num_experts: int, held: range) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        version=expertd.__version__,
        model=pb.Model(family="echo", hidden_size=hidden_size),
        versions=[pb.WeightVersion(number=1, identity=synthetic_identity("echo"), serving=True, source="start")],
        layers=[
            pb.Layer(
                layer=0,
                num_experts=num_experts,
                held=[pb.ExpertRange(first=held.start, count=len(held))],
                top_k=_TOP_K,
                intermediate_size=hidden_size,
                backend="echo",
            )
        ],
        limits=pb.Limits(
            max_tokens=limits.max_tokens,
            max_message_bytes=limits.max_message_bytes,
            max_requests_in_flight=limits.max_in_flight,
        ),
        input_dtypes=[DTYPE_NUMBER[d] for d in HIDDEN_DTYPES],
        output_dtypes=[DTYPE_NUMBER[d] for d in output_dtypes()],
    )


class Echo:
    """Experts that answer with what they get."""

    backend = "echo"

    def __init__(self, batch_us: int, row_us: int) -> None:
        self._pace_us = batch_us, row_us

    def direct(self) -> Direct:
        return copying(*self._pace_us)

    def __call__(
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any,
        *,
        router_weight_on_input: bool = False,
        out: Any = None,
    ) -> Any:
        return hidden_states if out is None else out.copy_(hidden_states)
