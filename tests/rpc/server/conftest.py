"""A server for each test, called in process and over localhost with one body."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from server_kit import CONFIG, IN_FLIGHT, MAX_BYTES, MAX_TOKENS, Gated, H, InProcess, Localhost, Served

from expertd_kernels.oracle.probe import detect_device
from expertd_server.boot.assignment import assign_layers, open_source
from expertd_server.boot.layers import boot_layers
from expertd_server.boot.memory import plan_memory
from expertd_server.boot.prepare import Workshop
from expertd_server.config.values import Address
from expertd_server.engine.admission import Limits, QueueLimits
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.service.service import Service
from expertd_server.transports.grpc.server import ExpertServer
from expertd_server.views.describe import Describer
from expertd_server.views.metrics import Metrics


@pytest.fixture(scope="module")
def booted():
    source = open_source(CONFIG)
    plans = assign_layers(CONFIG, source, detect_device("cpu"), {})
    layers = boot_layers(plans, Workshop(source, torch.device("cpu")))
    return source, layers


@pytest.fixture
def refuse_late():
    """Whether what would be late is refused; a test may set it otherwise."""
    return True


@pytest.fixture(params=[InProcess, Localhost])
async def served(request, booted, refuse_late):
    source, layers = booted
    gate, entered, kernels = threading.Event(), threading.Event(), []
    gate.set()
    limits = Limits(MAX_TOKENS, MAX_BYTES, IN_FLIGHT)
    metrics = Metrics()
    queue = QueueLimits(requests=32, refuse_late=refuse_late)
    engine = Engine(torch.device("cpu"), policy=Policy(MAX_TOKENS), limits=queue, observe=metrics.batch)
    metrics.watch_load(engine.load)
    server = ExpertServer(Service(engine, metrics, limits))
    address = await server.start(Address("127.0.0.1", 0))
    ready = []
    for b in layers:
        ready.append(replace(b.served, experts=Gated(b.served.experts, gate, entered, kernels)))
    engine.hold(ready)
    engine.start()
    described = Describer(
        server.service.load_message,
        instance_id="test",
        version="0",
        family=source.family,
        fingerprint=source.fingerprint,
        hidden_size=H,
        limits=limits,
    )
    described.update(layers, plan_memory(CONFIG, [b.assignment for b in layers]), None)
    server.service.open(described)
    await server.open()
    call = request.param(server.servicer, address)
    served = Served(call, server, engine, metrics, gate, entered, kernels)
    yield served
    gate.set()
    await call.close()
    await served.drain(5)


@pytest.fixture(scope="module")
def weights():
    """LayerWeights weights of the experts 1..6 by layer."""
    source = open_source(CONFIG)
    return {n: source.load(n, range(1, 7)) for n in source.layers}
