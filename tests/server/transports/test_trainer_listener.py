"""Who may have a server read memory of a GPU of its host."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest
from short import Shortage
from waiting import until

from expertd.shm.region import host_id
from expertd_server.transports import trainer_listener
from expertd_server.transports.trainer_listener import TrainerListener


@pytest.fixture
def listener():
    with closing(TrainerListener()) as made:
        yield made


def entered(endpoint: str, token: str) -> tuple[socket.socket, bytes]:
    """The socket, and what the listener answered."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
    sock.sendall(token.encode())
    return sock, sock.recv(1)


def test_a_trainer_is_admitted_to_its_update_while_its_socket_is_open(listener):
    endpoint, token, why = listener.offer("u", host_id())
    assert not why
    assert not listener.admitted("u")
    sock, answer = entered(endpoint, token)
    assert answer == b"\x01"
    assert listener.admitted("u")
    assert not listener.admitted("v")
    sock.close()
    assert not listener.admitted("u")


def test_a_token_is_taken_once(listener):
    endpoint, token, _ = listener.offer("u", host_id())
    with ExitStack() as stack:
        stack.enter_context(entered(endpoint, token)[0])
        again, answer = entered(endpoint, token)
        stack.enter_context(again)
        assert answer == b""
        assert listener.admitted("u")


@pytest.mark.parametrize("token", ["0" * 64, "no hex" + "z" * 58])
def test_another_token_is_refused(listener, token):
    endpoint, _, _ = listener.offer("u", host_id())
    sock, answer = entered(endpoint, token)
    with sock:
        assert answer == b""
    assert not listener.admitted("u")


def test_another_user_is_refused(listener, monkeypatch):
    endpoint, token, _ = listener.offer("u", host_id())
    monkeypatch.setattr(trainer_listener, "peer_uid", lambda sock: 12345)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
        assert sock.recv(1) == b""  # before it has sent its token
    assert not listener.admitted("u")
    monkeypatch.undo()
    sock, answer = entered(endpoint, token)  # which is valid still
    with sock:
        assert answer == b"\x01"


def test_one_on_another_host_gets_no_token(listener):
    assert listener.offer("u", "elsewhere") == (
        "",
        "",
        "the caller is on another host, or in another network namespace",
    )


def test_nobody_comes_in_once_it_is_closed(listener):
    endpoint, _, _ = listener.offer("u", host_id())
    listener.close()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
    assert listener.offer("v", host_id())[2] == "the server closes"


def test_a_process_without_descriptors_listens_again_when_it_has_some(listener, monkeypatch):
    shortage = Shortage(monkeypatch)
    shortage.lasts = True
    endpoint, token, _ = listener.offer("u", host_id())
    until(lambda: shortage.asked)
    shortage.lasts = False
    sock, answer = entered(endpoint, token)
    assert answer == b"\x01"
    sock.close()
