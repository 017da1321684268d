"""`expertd serve`: the server's life from the first line it prints to its exit code.

plan -> listen (health NOT_SERVING) -> load, check, warm up on a thread -> SERVING -> SIGTERM -> drain -> exit 0
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from expertd.v1 import expert_service_pb2 as pb
from expertd_kernels.native import library as native
from expertd_kernels.native.memory import available_bytes
from expertd_kernels.oracle import table
from expertd_kernels.oracle.probe import packages_for, use_device
from expertd_kernels.packed.cache import PackedCache
from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import (
    Assignment,
    BootError,
    assign_layers,
    files_state,
    open_source,
    resolve_device,
)
from expertd_server.boot.layers import Booted, Stopped, boot_layers
from expertd_server.boot.measuring import Tournaments, settled_threads
from expertd_server.boot.memory import MemoryPlan, free_bytes, memory_text, plan_memory, require_room
from expertd_server.boot.prepare import Workshop
from expertd_server.boot.progress import Progress
from expertd_server.config import Address, ServeConfig
from expertd_server.engine.admission import Limits, QueueLimits
from expertd_server.engine.engine import Engine
from expertd_server.engine.scheduler import Policy
from expertd_server.service.service import Service
from expertd_server.transports.grpc_server import ExpertServer
from expertd_server.views.describe import describe_layer, describe_server
from expertd_server.views.metrics import BackendFacts, Metrics, MetricsHttp
from expertd_server.views.render import print_decisions

__all__ = ["message_bytes", "serve"]

CPU_KERNEL = ("cpu", "cpu_w4a8")
"""Backends whose threads are our own."""


def message_bytes(max_tokens: int, assignments: Sequence[Assignment]) -> int:
    """What a request of max_tokens tokens needs with everything in its widest dtype, headers included."""
    widest = max(4 * p.info.hidden_size + 12 * p.info.top_k for p in assignments)
    return max_tokens * widest + (64 << 10)


async def serve(config: ServeConfig, console: Console) -> int:
    """Serve until SIGTERM or SIGINT.  Returns the exit code; raises BootError."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    device, torch_device = resolve_device(config.device)
    source = open_source(config, torch_device)
    if config.threads:
        torch.set_num_threads(config.threads)
    files = files_state(config) if config.cache else ""
    workshop = Workshop(source, torch_device, _cache(config), files, config.max_tokens, config.warm_routes)
    with workshop.stage("plan"):
        assignments = assign_layers(config, source, device, packages_for(device, table.BACKENDS, config.cache))
    oracle = Tournaments.of(config, torch_device, assignments)
    if oracle is not None:
        assignments = [oracle.apply(p) for p in assignments]
    print_decisions(console, assignments, pending=oracle is not None)
    refused = next((p for p in assignments if p.decision.chosen is None), None)
    if refused is not None:
        what = "no backend serves" if not refused.decision.pinned else f"--backend {config.backend} does not serve"
        raise BootError(
            f"{what} layer {refused.info.layer}, {refused.decision.problem.scheme_name} on {device}: the table says why"
        )
    workshop = replace(workshop, memory=_room(config, assignments, torch_device, console))
    limits = Limits(
        config.max_tokens,
        config.max_message_bytes or message_bytes(config.max_tokens, assignments),
        config.max_in_flight,
    )
    metrics = Metrics()
    http = _metrics_http(metrics, config.metrics_listen, console)
    faults: list[str] = []

    def on_fault(why: str) -> None:
        faults.append(why)
        loop.call_soon_threadsafe(stop.set)

    engine = _engine(config, torch_device, metrics, on_fault)
    service = Service(engine, metrics, limits)
    server = ExpertServer(service)
    try:
        try:
            address = await server.start(config.listen)
        except OSError as e:
            raise BootError(f"--listen {config.listen}: cannot listen there: {e.strerror or e}") from e
        _say(console, f"listening on {address}")
        await asyncio.to_thread(_settle_threads, config, assignments, console)
        booted = await _load(assignments, workshop, oracle, console, stop)
        if booted is None:
            _say(console, "stopped while loading")
            return 0
        changed = [
            b.assignment for b, p in zip(booted, assignments, strict=True) if b.assignment.decision != p.decision
        ]
        print_decisions(console, changed)
        metrics.booted(workshop.seconds, workshop.lookups)
        for b in booted:
            metrics.backend(_facts(b))
        engine.hold(b.served for b in booted)
        engine.start()
        service.open(_describer(service, source, booted, limits, workshop))
        await server.open()
        _quiet_memory()
        _say(console, f"serving on {address}")
        await stop.wait()
        _say(console, f"draining: {engine.load().queued_requests} requests under way")
        until_s = time.monotonic() + config.grace_s
        service.drain()
        done = await server.drain(until_s)
        await asyncio.to_thread(engine.stop, max(0.1, until_s - time.monotonic()) if done else 0.1)
        if faults:
            _say(console, f"stopped: {faults[0]}; start the server again")
            return 1
        _say(
            console,
            f"stopped: all {engine.admitted} requests that were taken are answered" if done else _overdue(config),
        )
        return 0 if done else 1
    finally:
        await server.close()
        service.close()
        if http is not None:
            http.close()


def _overdue(config: ServeConfig) -> str:
    return f"stopped: the grace time of {config.grace_s:g} s was over before every request was answered (--grace-s)"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


def _room(config: ServeConfig, assignments: Sequence[Assignment], device: torch.device, console: Console) -> MemoryPlan:
    """The plan of memory, shown.  Raises BootError where it does not fit."""
    plan, free = plan_memory(config, assignments), free_bytes(device)
    for line in memory_text(plan, free):
        _say(console, line)
    require_room(plan, config, assignments, free, available_bytes())
    return plan


def _metrics_http(metrics: Metrics, where: Address | None, console: Console) -> MetricsHttp | None:
    if where is None:
        return None
    try:
        http = MetricsHttp(metrics, where.host, where.port)
    except OSError as e:
        raise BootError(f"--metrics-listen {where}: cannot listen there: {e.strerror or e}") from e
    _say(console, f"metrics on http://{Address(where.host, http.port)}/metrics")
    return http


def _settle_threads(config: ServeConfig, assignments: Sequence[Assignment], console: Console) -> None:
    """The number of threads of the CPU kernel, before it packs: what was asked for (or $EXPERTD_CPU_THREADS), else
    measured for the first layer that it serves, now or at an earlier start.  Nothing where it serves none."""
    decisions = (p.decision for p in assignments if p.decision.chosen is not None)
    problem = next((d.problem for d in decisions if d.chosen is not None and d.chosen.name in CPU_KERNEL), None)
    if config.threads:
        native.use_threads(config.threads)
    elif problem is not None and not os.environ.get("EXPERTD_CPU_THREADS"):
        native.use_threads(settled_threads(problem, config.cache, lambda text: _say(console, f"cpu kernel: {text}")))


def _cache(config: ServeConfig) -> PackedCache | None:
    """Raises BootError where the folder cannot be made."""
    if config.cache is None:
        return None
    try:
        config.cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BootError(f"--cache {config.cache}: cannot be made: {e.strerror or e}; want a folder") from e
    return PackedCache(config.cache)


async def _load(
    assignments: Sequence[Assignment],
    workshop: Workshop,
    oracle: Tournaments | None,
    console: Console,
    stop: asyncio.Event,
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
            use_device(workshop.device)
            with Progress(console, len(assignments), workshop) as progress:
                value = boot_layers(assignments, workshop, oracle=oracle, done=progress.done, stopped=stop.is_set)
        except BaseException as e:
            error = e
        loop.call_soon_threadsafe(finish, value, error)

    # A daemon: a second signal or a failed listener must not wait for a layer that loads for minutes.
    threading.Thread(target=run, name="expertd-load", daemon=True).start()
    try:
        return await result
    except Stopped:
        return None


def _facts(b: Booted) -> BackendFacts:
    p = b.assignment.decision.problem
    return BackendFacts(
        b.served.layer,
        b.served.backend,
        p.scheme_name,
        p.activation_quant.value,
        str(p.device),
        b.assignment.chosen_by,
        b.from_cache,
    )


def _engine(config: ServeConfig, device: torch.device, metrics: Metrics, on_fault: Callable[[str], None]) -> Engine:
    engine = Engine(
        device,
        compute_dtype=config.compute,
        policy=Policy(config.max_tokens, config.max_wait_us * 1000, config.patience),
        limits=QueueLimits(config.max_queue_tokens, config.max_queue_requests),
        observe=metrics.batch,
        on_fault=on_fault,
        warm_routes=None if device.type == "cpu" else config.warm_routes,
    )
    metrics.watch_load(engine.load)
    return engine


def _describer(
    service: Service, source: ExpertSource, booted: Sequence[Booted], limits: Limits, workshop: Workshop
) -> Callable[[bool], pb.DescribeResponse]:
    answers = describe_server(
        instance_id=uuid.uuid4().hex,
        version=importlib.metadata.version("expertd"),
        family=source.family,
        fingerprint=source.fingerprint,
        hidden_size=booted[0].served.hidden_size,
        layers=[describe_layer(b) for b in booted],
        limits=limits,
        memory=workshop.memory,
    )

    def describe(decisions: bool) -> pb.DescribeResponse:
        out = pb.DescribeResponse()
        out.CopyFrom(answers[decisions])
        out.load.CopyFrom(service.load_message())
        out.memory.free_bytes = free_bytes(workshop.device)
        return out

    return describe


def _quiet_memory() -> None:
    """What the boot made stays for the process's life: keep the garbage collector from walking it again and again."""
    gc.collect()
    gc.freeze()
