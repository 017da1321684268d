"""Tensors that lie in a trainer's memory of a GPU, with host memory in place of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import trained
from updating import Server

from expertd.errors import ChangeRefusedError, UnavailableError, UpdateFailedError
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights import Updater, updater
from expertd_client.weights import memory as client_memory
from expertd_server.updates import updates


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda config: Server(stack, config)


class OfHost:
    """As TrainerMemory, of tensors of this process by their number."""

    tensors: dict[bytes, torch.Tensor] = {}  # noqa: RUF012 - of all
    closed = 0

    def __init__(self, device):
        pass

    def tensor(self, name, handle, offset, nbytes):
        raw = self.tensors[handle].reshape(-1).view(torch.uint8)
        return raw[offset : offset + nbytes]

    def close(self):
        OfHost.closed += 1


@pytest.fixture
def of_host(monkeypatch):
    OfHost.tensors, OfHost.closed = {}, 0
    monkeypatch.setattr(updates, "TrainerMemory", OfHost)
    monkeypatch.setattr(updates, "memory_refusal", lambda device: "")
    monkeypatch.setattr(updater, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(client_memory.TrainerSession, "settle", lambda session: None)

    def part(session, name, tensor):
        handle = len(OfHost.tensors).to_bytes(64, "big")
        OfHost.tensors[handle] = tensor
        memory = pb.DeviceMemory(handle=handle, offset=0)
        return pb.WeightPart(name=name, dtype="BF16", shape=list(tensor.shape), memory=memory), tensor.nbytes

    monkeypatch.setattr(client_memory.TrainerSession, "part", part)


def config(tmp_path, **more):
    return trained.config(trained.saved(tmp_path / "1", trained.step(1)), quantize="int4_g128", **more)


@pytest.mark.parametrize("kept", [False, True])
def test_an_update_from_memory_is_that_from_bytes(serve, tmp_path, of_host, kept):
    more = {"held": tmp_path / "held.json"} if kept else {}
    server = serve(config(tmp_path, **more))
    server.update(trained.step(2))
    want = server.answers()
    server.update(trained.step(3), name="v")
    assert server.answers() != want
    with Updater([server.host.address], cuda_ipc=True) as trainer, trainer.version() as update:
        update.put_all(trained.step(2))
        assert update.sent_bytes == 0
    assert server.answers() == want
    assert OfHost.closed


def test_memory_is_refused_of_who_did_not_show_who_it_is(serve, tmp_path, of_host):
    server = serve(config(tmp_path))
    first = server.answers()
    server.call("BeginUpdate", update="u")
    part = pb.WeightPart(name="model.layers.0.mlp.experts.0.up_proj.weight", dtype="BF16", shape=[128, 256])
    part.memory.handle = bytes(64)
    with pytest.raises(ChangeRefusedError, match="a process of this server's user"):
        server.call("PutWeights", update="u", parts=[part])
    server.call("AbortUpdate", update="u")
    assert server.answers() == first


def test_memory_with_bytes_or_a_hash_is_refused(serve, tmp_path, of_host):
    server = serve(config(tmp_path))
    with Updater([server.host.address], cuda_ipc=True) as trainer:
        update = trainer.begin()
        name, tensor = next(iter(trained.step(2).items()))
        part, _ = update.memory.part(name, tensor)
        part.sha256 = bytes(32)
        with pytest.raises(ChangeRefusedError, match="no hash"):
            server.call("PutWeights", update=update.name, parts=[part])
        update.abort()


def test_a_nan_in_memory_is_named_and_the_old_version_goes_on(serve, tmp_path, of_host):
    server = serve(config(tmp_path))
    first, tensors = server.answers(), trained.step(2)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][3, 4] = float("nan")
    with (
        Updater([server.host.address], cuda_ipc=True) as trainer,
        pytest.raises(UpdateFailedError, match=r"layers\.1\.mlp\.experts\.2\.down_proj"),
        trainer.version() as update,
    ):
        update.put_all(tensors)
    assert server.answers() == first


def test_a_server_without_a_gpu_says_so(serve, tmp_path):
    server = serve(config(tmp_path))
    with Updater([server.host.address], cuda_ipc=True) as trainer:
        with pytest.raises(UnavailableError, match="computes on no NVIDIA GPU"):
            trainer.begin()
        assert server.call("GetUpdate").update == ""
