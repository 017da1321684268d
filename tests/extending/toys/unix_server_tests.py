"""The toy transport's listener."""

import socket

import pytest

from expertd_server.transports.unix import UnixListener


@pytest.fixture
def listener():
    listener = UnixListener(None)
    listener.start()
    yield listener
    listener.close()


def test_a_client_without_a_token_is_let_in_nowhere(listener):
    token, endpoint, why_not = listener.offer("client", "host")
    assert (len(token), why_not) == (64, "")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(f"\0{endpoint}")
        sock.sendall(b"0" * 64)
        assert sock.recv(1) == b""
