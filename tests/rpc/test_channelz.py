"""gRPC's own view of its connections: on this host by default, to those who may describe, and nowhere else unasked."""

from __future__ import annotations

import grpc
import pytest
from in_process import hosts

from expertd_server.boot.assignment import BootError
from expertd_server.config.values import Address
from expertd_server.transports.grpc import channelz

pytest.importorskip("grpc_channelz", reason="the extra `channelz` has it: pip install grpcio-channelz")

from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

pytestmark = pytest.mark.timeout(120)
TINY = {"synthetic": "tiny:int4_g128", "device": "cpu", "backend": "reference", "threads": 1}
TOKEN, OTHER = "s3cret-s3cret-s3cret", "an0ther-an0ther-an0ther"


@pytest.fixture
def serve():
    with hosts(**TINY) as start:
        yield start


def ask(address: str, token: str = ""):
    """Sockets of the servers of this process."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        servers = stub.GetServers(channelz_pb2.GetServersRequest(), metadata=metadata, timeout=20).server
        return [
            s
            for server in servers
            for s in stub.GetServerSockets(
                channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id), metadata=metadata, timeout=20
            ).socket_ref
        ]


def code(*args) -> str:
    with pytest.raises(grpc.RpcError) as e:
        ask(*args)
    return e.value.code().name


def test_it_shows_who_is_connected_on_this_host(serve):
    assert ask(serve().address), "at least who asks"


def test_it_is_closed_on_request_and_beyond_this_host(serve):
    assert code(serve(channelz="off").address) == "UNIMPLEMENTED"
    beyond = serve(Address("0.0.0.0", 0), insecure=True)
    assert code(beyond.address.replace("0.0.0.0", "127.0.0.1")) == "UNIMPLEMENTED"
    asked_for = serve(Address("0.0.0.0", 0), insecure=True, channelz="on")
    assert ask(asked_for.address.replace("0.0.0.0", "127.0.0.1"))


def test_it_needs_the_right_to_describe(serve, tmp_path):
    callers = tmp_path / "callers.toml"
    callers.write_text(
        f'[callers.pool]\ntokens = ["{TOKEN}"]\nrights = ["call"]\n'
        f'[callers.eyes]\ntokens = ["{OTHER}"]\nrights = ["describe"]\n'
    )
    address = serve(callers=callers).address
    assert code(address) == "UNAUTHENTICATED"
    assert code(address, TOKEN) == "PERMISSION_DENIED"
    assert ask(address, OTHER)


def test_without_the_package_it_is_off_or_says_what_to_install(serve, monkeypatch):
    monkeypatch.setattr(channelz.importlib.util, "find_spec", lambda name: None)
    assert code(serve().address) == "UNIMPLEMENTED"
    with pytest.raises(BootError, match="--channelz on: grpcio-channelz is not installed: pip install"):
        serve(channelz="on")
