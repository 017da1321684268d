"""Who may call AdminService and WeightsService: each method by each kind of caller, over a real socket."""

from __future__ import annotations

import grpc
import pytest

from expertd.errors import (
    ExpertdError,
    PermissionDeniedError,
    UnauthenticatedError,
    from_rpc_error,
)
from expertd.v1 import admin_service_pb2, weights_service_pb2
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address
from expertd_server.host.host import Host

pytestmark = pytest.mark.timeout(90)

HERE = Address("127.0.0.1", 0)
TOKENS = {"calls": "calls-calls-calls", "describes": "describes-describes", "administers": "administers-administers"}
RIGHTS = {"calls": ["call"], "describes": ["describe"], "administers": ["admin"]}
SERVICES = {"AdminService": admin_service_pb2, "WeightsService": weights_service_pb2}
METHODS = [
    (service, method.name)
    for service, module in SERVICES.items()
    for method in module.DESCRIPTOR.services_by_name[service].methods
]


@pytest.fixture(scope="module")
def channel(tmp_path_factory):
    callers = tmp_path_factory.mktemp("callers") / "callers.toml"
    callers.write_text(
        "".join(f'[callers.{n}]\ntokens = ["{TOKENS[n]}"]\nrights = {RIGHTS[n]!r}\n' for n in TOKENS).replace("'", '"')
    )
    host = Host(
        ServeConfig(
            synthetic="tiny:int4_g128", device="cpu", backend="reference", threads=1, listen=HERE, admin_listen=HERE,
            callers=callers,
        )
    )  # fmt: skip
    try:
        host.start()
        host.ready(60)
        with grpc.insecure_channel(host.service.describe(False).admin_address) as channel:
            yield channel
    finally:
        host.close()


def asked(channel, service, method, token) -> ExpertdError | None:
    """What an empty request is refused with; None: it is answered."""
    module = SERVICES[service]
    found = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
    call = (channel.unary_stream if found.server_streaming else channel.unary_unary)(
        f"/expertd.v1.{service}/{method}", lambda request: request.SerializeToString(), bytes
    )
    request = getattr(module, found.input_type.name)()
    try:
        answer = call(request, timeout=30, metadata=[("authorization", f"Bearer {token}")] if token else [])
        if found.server_streaming:
            list(answer)
    except grpc.RpcError as e:
        return from_rpc_error(e)
    return None


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_each_method_is_for_those_who_administer_and_for_nobody_else(channel, service, method):
    for token in ("", "unknown-unknown-unknown"):
        assert isinstance(asked(channel, service, method, token), UnauthenticatedError)
    for name in ("calls", "describes"):
        error = asked(channel, service, method, TOKENS[name])
        assert isinstance(error, PermissionDeniedError)
        assert f"caller {name}: got rights" in error.message
    error = asked(channel, service, method, TOKENS["administers"])
    assert not isinstance(error, UnauthenticatedError | PermissionDeniedError)


def test_all_methods_are_tried():
    assert len(METHODS) == 4 + 7
