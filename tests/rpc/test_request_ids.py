"""Refused requests in the log, over real sockets: by the caller's own id, and without any secret."""

from __future__ import annotations

import logging

import grpc
import numpy as np
import pytest
from in_process import hosts

from expertd.errors import LayerNotHeldError, PermissionDeniedError
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1.expert_service_pb2_grpc import ExpertServiceStub
from expertd_client import Credentials, ExpertClient

pytestmark = pytest.mark.timeout(90)

TOKEN, WRONG = "s3cret-s3cret-s3cret", "wr0ng-wr0ng-wr0ng-wr0ng"
WRONG_LAYER = pb.ForwardRequest(request_id=5, layer=77)


@pytest.fixture
def serve(caplog):
    caplog.set_level(logging.INFO, "expertd_server")
    with hosts(synthetic="tiny:int4_g128", backend="reference") as start:
        yield start


def refusals(caplog) -> list[dict]:
    return [r.fields for r in caplog.records if r.name == "expertd_server.service.refusals" and hasattr(r, "fields")]


def fail(address: str, *metadata: tuple[str, str]) -> dict[str, str]:
    """Trailing metadata of a unary call that is refused."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as e:
        ExpertServiceStub(channel).Forward(WRONG_LAYER, metadata=metadata, timeout=20)
    return dict(e.value.trailing_metadata())


def test_a_unary_call_is_told_of_by_its_own_id(serve, caplog):
    trailing = fail(serve().address, ("x-request-id", "job-1"))
    assert (trailing["x-request-id"], trailing["expertd-reason"]) == ("job-1", "LAYER_NOT_HELD")
    (told,) = refusals(caplog)
    assert (told["request"], told["reason"]) == ("job-1", "LAYER_NOT_HELD")
    assert told["caller"].startswith("ipv4:127.0.0.1:")


def test_who_gives_none_can_quote_the_one_that_was_made(serve, caplog):
    trailing = fail(serve().address)
    assert [told["request"] for told in refusals(caplog)] == [trailing["x-request-id"]]
    assert len(trailing["x-request-id"]) == 16


def test_a_request_of_a_stream_is_told_of_by_both_ids(serve, caplog):
    with grpc.insecure_channel(serve().address) as channel:
        messages = iter([pb.StreamForwardRequest(forward=WRONG_LAYER)])
        call = ExpertServiceStub(channel).StreamForward(messages, metadata=(("x-request-id", "s"),), timeout=20)
        assert [m.error.reason for m in call] == ["LAYER_NOT_HELD"]
    assert [told["request"] for told in refusals(caplog)] == ["s/5"]


def test_requests_of_sessions_are_told_of_too(serve, caplog):
    host = serve(shm="on")
    batch = np.ones((1, 256), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
    with ExpertClient(host.address, timeout_s=20) as client, pytest.raises(LayerNotHeldError):
        client.forward(77, *batch)
    assert "LAYER_NOT_HELD" in {told["reason"] for told in refusals(caplog)}


def test_no_line_holds_a_token(serve, caplog, tmp_path):
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[callers.pool]\ntokens = ["{TOKEN}"]\nrights = ["call"]\n')
    host = serve(callers=callers)
    fail(host.address, ("authorization", f"Bearer {WRONG}"), ("x-request-id", "a"))
    fail(host.address, ("authorization", f"Bearer {TOKEN}"), ("x-request-id", "b"))
    (tmp_path / "token").write_text(TOKEN)
    client = ExpertClient(host.address, credentials=Credentials(token_file=tmp_path / "token"), timeout_s=20)
    with client, pytest.raises(PermissionDeniedError):
        client.describe()
    told = refusals(caplog)
    assert [(t["request"], t["reason"], t["caller"]) for t in told[:2]] == [
        ("a", "UNAUTHENTICATED", told[0]["caller"]),
        ("b", "LAYER_NOT_HELD", "pool"),
    ]
    assert told[2]["reason"] == "PERMISSION_DENIED"
    assert TOKEN not in caplog.text
    assert WRONG not in caplog.text
