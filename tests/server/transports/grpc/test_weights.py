"""What WeightsService refuses at once, over a real socket.  What an update does: tests/server/updates."""

from __future__ import annotations

import grpc
import pytest

from expertd.errors import ChangeRefusedError, ChangeUnknownError, ExpertdError, MalformedMessageError, from_rpc_error
from expertd.v1 import weights_service_pb2 as pb
from expertd.v1 import weights_service_pb2_grpc as stubs
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address
from expertd_server.host.host import Host

pytestmark = pytest.mark.timeout(90)

HERE = Address("127.0.0.1", 0)


@pytest.fixture(scope="module")
def stub():
    host = Host(
        ServeConfig(
            synthetic="tiny:int4_g128", device="cpu", backend="reference", threads=1, listen=HERE, admin_listen=HERE
        )
    )
    try:
        host.start()
        host.ready(60)
        with grpc.insecure_channel(host.service.describe(False).admin_address) as channel:
            yield stubs.WeightsServiceStub(channel)
    finally:
        host.close()


def refused(stub, method: str, **fields) -> ExpertdError:
    with pytest.raises(grpc.RpcError) as e:
        getattr(stub, method)(getattr(pb, f"{method}Request")(**fields), timeout=30)
    return from_rpc_error(e.value)


NAMED = ("BeginUpdate", "PutWeights", "PrepareUpdate", "CommitUpdate", "AbortUpdate")


@pytest.mark.parametrize("method", NAMED)
@pytest.mark.parametrize("size", [0, 257, 1 << 20])
def test_a_name_is_short_and_is_not_repeated(stub, method, size):
    error = refused(stub, method, update="u" * size)
    assert isinstance(error, MalformedMessageError)
    assert f"{method}Request.update: got {size} characters, want 1 to 256" in error.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"label": "l" * 257}, "label: got 257 characters"),
        ({"lease_s": 3601}, "lease_s: got 3601"),
        ({"version": 2**64 - 1}, "version: got 18446744073709551615, want at most 9223372036854775807"),
        ({"checkpoint": "/tmp/a\0b"}, "checkpoint: got 8 characters, want a path of at most 4096 without control"),
        ({"checkpoint": "a\nb"}, "checkpoint: got 3 characters"),
        ({"checkpoint": "/" * 5000}, "checkpoint: got 5000 characters"),
    ],
)
def test_fields_are_bounded(stub, fields, text):
    error = refused(stub, "BeginUpdate", update="u", **fields)
    assert isinstance(error, MalformedMessageError)
    assert text in error.message


@pytest.mark.parametrize("folder", ["/dev/zero", "/proc/self/fd", "/nowhere", "../..", "/dev"])
def test_a_folder_that_is_no_checkpoint_is_refused_by_name(stub, folder):
    error = refused(stub, "BeginUpdate", update="u", checkpoint=folder)
    assert isinstance(error, ChangeRefusedError)
    assert "checkpoint: " in error.message
    assert stub.GetUpdate(pb.GetUpdateRequest(), timeout=30).update == ""


def test_nothing_is_put_into_an_update_that_was_not_begun(stub):
    part = pb.WeightPart(name="model.layers.0.mlp.experts.0.up_proj.weight", dtype="BF16", shape=[1], data=b"\0\0")
    assert isinstance(refused(stub, "PutWeights", update="u", parts=[part]), ChangeUnknownError)


def test_a_message_of_any_size_is_refused(stub):
    with pytest.raises(grpc.RpcError) as e:
        stub.PutWeights(pb.PutWeightsRequest(parts=[pb.WeightPart(data=bytes(65 << 20))]), timeout=60)
    assert e.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_flood_of_begins_leaves_one_update_or_none(stub):
    """A model that is synthetic takes no tensors: each is refused, and leaves no claim."""
    for n in range(50):
        assert isinstance(refused(stub, "BeginUpdate", update=f"u{n}"), ChangeRefusedError)
    assert stub.GetUpdate(pb.GetUpdateRequest(), timeout=30).update == ""
