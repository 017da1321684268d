"""An engine, and a listener for sessions over TCP in front of it."""

import pytest
import torch
from listener_kit import BOUNDS, Doubles, E, H, K, M

from expertd_server.config.values import Address
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.transports.tcp import TcpListener


@pytest.fixture
def doubles():
    return Doubles()


@pytest.fixture
def engine(doubles):
    e = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=M))
    e.hold([ServedLayer(0, E, tuple(range(E)), K, H, 8, doubles, "doubles")])
    e.start()
    e.open()
    yield e
    doubles.gate.set()
    e.stop(10)


@pytest.fixture
def listener(engine):
    d = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS, most_sessions=12)
    d.start()
    yield d
    d.close()
