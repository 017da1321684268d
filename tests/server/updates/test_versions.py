"""Every answer says which version of the weights computed it, and a request may ask for one that is held."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import numpy as np
import pytest
import torch
import trained
from trained import E, H, K
from updating import Server

from expertd.errors import WeightsVersionNotHeldError
from expertd.v1 import expert_service_pb2 as expert_pb
from expertd.v1 import expert_service_pb2_grpc as expert_stubs
from expertd_client import ExpertClient
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.shm.connection import ShmTransport
from expertd_client.transports.tcp.connection import TcpTransport
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.config.values import Address

pytestmark = pytest.mark.timeout(120)

X, IDS, W = random_inputs(16, H, E, K, seed=3)
TRANSPORTS = {"inline": (), "unary": (), "shm": (ShmTransport,), "tcp": (TcpTransport,)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with ExitStack() as stack:
        config = trained.config(trained.saved(folder / "1", trained.step(1)), tcp_listen=Address("127.0.0.1", 0))
        yield Server(stack, config)


@pytest.fixture
def clients(server):
    """By transport."""
    with ExitStack() as stack:
        out = {}
        for name, made in TRANSPORTS.items():
            offers = [one(server.host.address) if one is TcpTransport else one() for one in made]
            transport = GrpcTransport(server.host.address, offers=offers, unary=name == "unary")
            out[name] = stack.enter_context(ExpertClient(transport, timeout_s=20))
            if made:
                assert out[name].session().transport == name
        yield out


def answer(client, **options):
    """(version, bytes)."""
    found = client.forward(0, X, IDS, W, **options)
    return found.weights_version, found.output.view(torch.uint8).numpy().tobytes()


def test_answers_say_their_version_and_requests_may_pin_one(server, clients):
    def all_say(**options):
        found = {name: answer(client, **options) for name, client in clients.items()}
        assert len(set(found.values())) == 1, {name: version for name, (version, _) in found.items()}
        return found["inline"]

    version, first = all_say()
    assert version == 1
    assert all_say(weights_version=1) == (1, first)
    server.update(trained.step(2), version=5)
    assert all_say()[0] == 5
    second = all_say(weights_version=5)[1]
    assert second == all_say()[1] != first
    assert all_say(weights_version=1) == (1, first), "the version before is held still"
    for client in clients.values():
        with pytest.raises(WeightsVersionNotHeldError, match="got 4, want one") as error:
            answer(client, weights_version=4)
        assert error.value.retryable
    server.call("RollbackVersion")
    assert all_say() == (1, first)
    assert all_say(weights_version=5) == (5, second)
    server.call("BeginUpdate", update="next")
    assert all_say() == (1, first)
    assert all_say(weights_version=5) == (5, second), "it stays until the next commit"
    server.call("AbortUpdate", update="next")
    server.call("BeginUpdate", update="last", version=9)
    server.put_and_prepare("last", trained.parts(trained.step(3)))
    with pytest.raises(WeightsVersionNotHeldError):  # it is ready, and not served
        answer(clients["shm"], weights_version=9)
    server.call("CommitUpdate", update="last")
    assert all_say()[0] == 9
    for client in clients.values():
        with pytest.raises(WeightsVersionNotHeldError):
            answer(client, weights_version=5)


def test_the_slow_path_of_messages_carries_versions_too(server, clients):
    """Digests, rows grouped by expert and batches without a token are taken by Python."""
    now = server.client.describe().versions[0].number
    client = clients["inline"]
    assert client.forward(0, X, IDS, W, digest=True, weights_version=now).weights_version == now
    assert client.forward(0, X[:0], IDS[:0], W[:0]).weights_version == now
    with pytest.raises(WeightsVersionNotHeldError):
        client.forward(0, X, IDS, W, digest=True, weights_version=now + 1)
    with pytest.raises(WeightsVersionNotHeldError):
        client.forward(0, X[:0], IDS[:0], W[:0], weights_version=now + 1)


def test_a_client_that_knows_no_versions_notices_nothing(server):
    """It sends the bytes that it always sent, and reads an answer with an unknown field."""
    x, ids, w = X.float().numpy(), IDS.numpy().astype(np.int32), W.float().numpy()
    tensors = [
        expert_pb.Tensor(dtype=dtype, shape=t.shape, raw=t.tobytes())
        for t, dtype in ((x, expert_pb.DATA_TYPE_F32), (ids, expert_pb.DATA_TYPE_I32), (w, expert_pb.DATA_TYPE_F32))
    ]
    names = ("hidden_states", "topk_ids", "topk_weights")
    request = expert_pb.ForwardRequest(layer=0, **dict(zip(names, tensors, strict=True)))
    with grpc.insecure_channel(server.host.address) as channel:
        found = expert_stubs.ExpertServiceStub(channel).Forward(request, timeout=20)
    assert found.weights_version == server.client.describe().versions[0].number
    found.ClearField("weights_version")
    assert found.routes_computed == 16 * K
    assert len(found.output.raw) == 16 * H * 4
