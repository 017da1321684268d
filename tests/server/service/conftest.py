"""A service over an engine, and its experts, which a test holds."""

from __future__ import annotations

import pytest
import torch
from session_kit import IN_FLIGHT, Experts, H, K

from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import Limits, QueueLimits
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.service.service import Service
from expertd_server.views.metrics import Metrics


@pytest.fixture
def experts():
    return Experts()


@pytest.fixture
def service(experts):
    metrics = Metrics()
    engine = Engine(
        torch.device("cpu"),
        compute_dtype="f32",
        policy=Policy(64),
        limits=QueueLimits(requests=8),
        observe=metrics.batch,
    )
    engine.hold([ServedLayer(0, K, range(K), K, H, 32, experts, "fake")])
    engine.start()
    service = Service(engine, metrics, Limits(64, 1 << 20, IN_FLIGHT))
    service.open(lambda decisions: pb.DescribeResponse())
    yield service
    experts.gate.set()
    service.drain()
    engine.stop(10)
    service.close()
