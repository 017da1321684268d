"""A server whose pools are on a GPU that is played, and a lane to it."""

import pytest
from connection_kit import Sums, summing_engine
from software_gpu import HostPool, Session, SoftwareGpu, enter

from expertd.shm.cuda import Cuda
from expertd_client.device import cuda_ipc, session
from expertd_server.transports.shm import ShmListener


@pytest.fixture
def sums():
    return Sums()


@pytest.fixture
def gpu(monkeypatch):
    gpu = SoftwareGpu()
    monkeypatch.setattr(session, "cuda", lambda: Cuda(gpu))
    monkeypatch.setattr(cuda_ipc, "Pool", HostPool)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: b"another GPU")
    monkeypatch.setattr(cuda_ipc, "DeviceSession", Session)
    return gpu


@pytest.fixture
def server(sums, gpu):
    engine = summing_engine(sums, layers=2)
    engine.shm_connections.pool, engine.shm_connections.pool_refusal = HostPool.create, lambda: ""
    engine.start()
    engine.open()
    listener = ShmListener(engine, most_pools=2)
    listener.start()
    listener.engine = engine
    yield listener
    sums.gate.set()
    listener.close()
    engine.stop(10)


@pytest.fixture
def lane(server):
    with enter(server) as lane:
        yield lane
