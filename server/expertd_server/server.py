"""`expertd serve`: the server's life from the first line it prints to its exit code.

plan -> listen (health NOT_SERVING) -> load, check, warm up on a thread -> SERVING -> SIGTERM -> drain -> exit 0
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rich.console import Console

from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels.probe import installed_packages
from expertd_kernels.source import ExpertSource
from expertd_kernels.table import BACKENDS
from expertd_server.boot import (
    Booted,
    BootError,
    LayerPlan,
    Stopped,
    boot_layers,
    open_source,
    plan_layers,
    resolve_device,
)
from expertd_server.config import Address, ServeConfig
from expertd_server.describe import describe_layer, describe_server
from expertd_server.engine import Engine
from expertd_server.intake import Intake
from expertd_server.metrics import SERVICE, BackendFacts, Metrics, MetricsHttp
from expertd_server.progress import Progress
from expertd_server.render import print_decisions
from expertd_server.scheduler import Policy
from expertd_server.service import Limits, Service, State
from expertd_server.servicer import Servicer

__all__ = ["ExpertServer", "message_bytes", "serve"]

log = logging.getLogger(__name__)

_POLL_S = 0.005
"""How often a draining server looks whether it is done."""
_QUIET_S, _QUIET_LIMIT_S = 0.15, 2.0
"""gRPC resets a call that comes in the moment in which the server closes: its caller sees CANCELLED and can't know that
nothing was computed.  So a drained server closes when no call came for _QUIET_S, at the latest after _QUIET_LIMIT_S."""
_SLACK = 2
"""gRPC's own limit is this many times ours: up to it one large request fails alone, with its reason."""


def message_bytes(max_tokens: int, plans: Sequence[LayerPlan]) -> int:
    """What a request of max_tokens tokens needs with everything in its widest dtype, headers included."""
    widest = max(4 * p.info.hidden_size + 12 * p.info.top_k for p in plans)
    return max_tokens * widest + (64 << 10)


class ExpertServer:
    """The gRPC side: a listening server in front of a Service.  Used by `serve` and by tests.

    address: where it listens, known after start()
    """

    def __init__(self, metrics: Metrics, limits: Limits) -> None:
        self.service = Service(metrics, limits, asyncio.get_running_loop())
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _SLACK * limits.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent share of its calls
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        self._server.add_generic_rpc_handlers((Servicer(self.service).handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: Address) -> Address:
        """Listen; health is NOT_SERVING.  Raises BootError where the address cannot be had."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        _try_bind("--listen", listen)
        try:
            port = self._server.add_insecure_port(str(listen))
        except RuntimeError as e:
            raise BootError(f"--listen {listen}: cannot listen there: {e}") from e
        await self._server.start()
        self.address = Address(listen.host, port)
        return self.address

    async def ready(self, engine: Engine, intake: Intake, describe: Callable[[bool], pb.DescribeResponse]) -> None:
        """Take requests; health is SERVING."""
        self.service.ready(engine, intake, describe)
        if self.service.state is State.SERVING:
            await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests, finish those taken, close.  False: grace_s was over before everything was answered."""
        until = time.monotonic() + grace_s
        self.service.drain()
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        engine = self.service.engine
        while time.monotonic() < until and not self._idle():
            await asyncio.sleep(_POLL_S)
        if done := self._idle():
            await self._quiet(min(until, time.monotonic() + _QUIET_LIMIT_S))
        await self._server.stop(0 if not done else max(0.1, until - time.monotonic()))
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(
                None, engine.stop, max(0.1, until - time.monotonic()) if done else 0.1
            )
        self.service.close()
        return done

    def _idle(self) -> bool:
        engine = self.service.engine
        return self.service.open_calls == 0 and (engine is None or engine.idle())

    async def _quiet(self, until: float) -> None:
        """Return when no call has come for _QUIET_S, or at the monotonic time `until`."""
        begun, since = self.service.calls_begun, time.monotonic()
        while (now := time.monotonic()) < until and now - since < _QUIET_S:
            await asyncio.sleep(_POLL_S)
            if self.service.calls_begun != begun:
                begun, since = self.service.calls_begun, time.monotonic()

    async def close(self) -> None:
        """Close at once, whatever is under way."""
        await self._server.stop(0)
        self.service.close()

    async def _report(self, status: Any) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(name, status)


def _try_bind(option: str, a: Address) -> None:
    """Raises BootError when the address is taken or not ours: gRPC would tell only its own log why."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(a.host, a.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(where)
    except OSError as e:
        raise BootError(f"{option} {a}: cannot listen there: {e.strerror or e}") from e


async def serve(config: ServeConfig, console: Console) -> int:
    """Serve until SIGTERM or SIGINT.  Returns the exit code; raises BootError."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    source = open_source(config)
    device, torch_device = resolve_device(config.device)
    plans = plan_layers(config, source, device, installed_packages(BACKENDS, probe_imports=device.kind != "cpu"))
    print_decisions(console, plans)
    refused = next((p for p in plans if p.decision.chosen is None), None)
    if refused is not None:
        what = "no backend serves" if not refused.decision.pinned else f"--backend {config.backend} does not serve"
        raise BootError(
            f"{what} layer {refused.info.layer}, {refused.decision.problem.scheme_name} on {device}: the table says why"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    limits = Limits(
        config.max_tokens,
        config.max_message_bytes or message_bytes(config.max_tokens, plans),
        config.max_in_flight,
    )
    metrics = Metrics()
    http = _metrics_http(metrics, config.metrics_listen, console)
    server = ExpertServer(metrics, limits)
    try:
        address = await server.start(config.listen)
        _say(console, f"listening on {address}")
        booted = await _load(plans, source, torch_device, console, stop)
        if booted is None:
            _say(console, "stopped while loading")
            return 0
        fault = asyncio.Event()
        engine = _engine(config, booted, torch_device, metrics, lambda: _tell(loop, fault, stop))
        intake = Intake(engine.layers, config.max_tokens)
        await server.ready(engine, intake, _describer(server.service, source, booted, limits))
        _quiet_memory()
        _say(console, f"serving on {address}")
        await stop.wait()
        _say(console, f"draining: {engine.load().queued_requests} requests under way")
        done = await server.drain(config.grace_s)
        _say(
            console,
            f"stopped: all {engine.admitted} requests that were taken are answered" if done else _overdue(config),
        )
        return 0 if done and not fault.is_set() else 1
    finally:
        await server.close()
        if http is not None:
            http.close()


def _tell(loop: asyncio.AbstractEventLoop, *events: asyncio.Event) -> None:
    """Set the events, from any thread."""
    for e in events:
        loop.call_soon_threadsafe(e.set)


def _overdue(config: ServeConfig) -> str:
    return f"stopped: the grace time of {config.grace_s:g} s was over before every request was answered (--grace-s)"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


def _metrics_http(metrics: Metrics, where: Address | None, console: Console) -> MetricsHttp | None:
    if where is None:
        return None
    try:
        http = MetricsHttp(metrics, where.host, where.port)
    except OSError as e:
        raise BootError(f"--metrics-listen {where}: cannot listen there: {e.strerror or e}") from e
    _say(console, f"metrics on http://{Address(where.host, http.port)}/metrics")
    return http


async def _load(
    plans: Sequence[LayerPlan], source: ExpertSource, device: torch.device, console: Console, stop: asyncio.Event
) -> list[Booted] | None:
    """Boot the layers on a thread, so that health checks are answered meanwhile.  None: `stop` came first."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[Booted]] = loop.create_future()

    def finish(value: list[Booted] | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value or [])

    def run() -> None:
        value, error = None, None
        try:
            with Progress(console, len(plans)) as progress:
                value = boot_layers(plans, source, device, done=progress.done, stopped=stop.is_set)
        except BaseException as e:
            error = e
        loop.call_soon_threadsafe(finish, value, error)

    # A daemon: a second signal or a failed listener must not wait for a layer that loads for minutes.
    threading.Thread(target=run, name="expertd-load", daemon=True).start()
    try:
        return await result
    except Stopped:
        return None


def _engine(
    config: ServeConfig,
    booted: Sequence[Booted],
    device: torch.device,
    metrics: Metrics,
    on_fault: Callable[[], None],
) -> Engine:
    for b in booted:
        p = b.plan.decision.problem
        metrics.backend(
            BackendFacts(b.served.layer, b.served.backend, p.scheme_name, p.activation_quant.value, str(p.device))
        )
    engine = Engine(
        {b.served.layer: b.served for b in booted},
        device,
        compute_dtype=config.compute,
        policy=Policy(config.max_tokens, config.max_wait_us * 1000, config.patience),
        max_queue_tokens=config.max_queue_tokens,
        max_queue_requests=config.max_queue_requests,
        observe=metrics.batch,
        on_fault=on_fault,
    )
    metrics.watch_load(engine.load)
    engine.start()
    return engine


def _describer(
    service: Service, source: ExpertSource, booted: Sequence[Booted], limits: Limits
) -> Callable[[bool], pb.DescribeResponse]:
    answers = describe_server(
        instance_id=uuid.uuid4().hex,
        version=importlib.metadata.version("expertd"),
        family=source.family,
        fingerprint=source.fingerprint,
        hidden_size=booted[0].served.hidden_size,
        layers=[describe_layer(b.served, b.plan.info, b.plan.decision, b.error) for b in booted],
        limits=limits,
    )

    def describe(decisions: bool) -> pb.DescribeResponse:
        out = pb.DescribeResponse()
        out.CopyFrom(answers[decisions])
        out.load.CopyFrom(service.load_message())
        return out

    return describe


def _quiet_memory() -> None:
    """What the boot made stays for the process's life: keep the garbage collector from walking it again and again."""
    gc.collect()
    gc.freeze()
