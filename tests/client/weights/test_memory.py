"""Sockets by which servers know a trainer of their host: to whom its tokens are sent."""

import secrets
import socket

import pytest

from expertd.errors import UnavailableError
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights.memory import TrainerSession


@pytest.mark.parametrize(
    ("endpoint", "token"),
    [
        ("unix-abstract:expertd-{hex}", "x" * 64),
        ("unix-abstract:expertd-{hex}", "0" * 63 + "\n"),
        ("unix-abstract:someone-{hex}", "0" * 64),
        ("unix:/run/expertd-{hex}", "0" * 64),
    ],
)
def test_a_server_directs_no_trainer_at_other_sockets(endpoint, token):
    """Nothing is sent where the endpoint or the token has another form."""
    digits = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{'someone' if 'someone' in endpoint else 'expertd'}-{digits}")
        listener.listen(1)
        listener.setblocking(False)
        answer = pb.BeginUpdateResponse(memory_endpoint=endpoint.format(hex=digits), memory_token=token)
        with pytest.raises(UnavailableError, match=r"a:1: cuda_ipc: the server .* of another"):
            TrainerSession({"a:1": answer})
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_why_a_server_reads_no_memory_is_told():
    answer = pb.BeginUpdateResponse(memory_refusal="this server computes on no NVIDIA GPU")
    with pytest.raises(UnavailableError, match="a:1: cuda_ipc: this server computes on no NVIDIA GPU"):
        TrainerSession({"a:1": answer})
