"""Bytes carried through TLS: both ways, and where one end closes, or does not read."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import until

from expertd.tcp import tls

pytest.importorskip("cryptography", reason="makes certificates; pip install cryptography")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the server, and of the client."""
    from certificates import Authority

    authority = Authority(tmp_path_factory.mktemp("pki"))
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(*authority.sign("localhost"))
    return ours, ssl.create_default_context(cafile=str(authority.ca))


@pytest.fixture
def ends(contexts) -> Iterator[tuple[socket.socket, ssl.SSLSocket, threading.Thread]]:
    """The plain socket of this host, the TLS socket of the other one, and the thread between them."""
    near, far = socket.socketpair()
    made: list[ssl.SSLSocket] = []
    shakes = threading.Thread(target=lambda: made.append(contexts[0].wrap_socket(near, server_side=True)))
    shakes.start()
    with contexts[1].wrap_socket(far, server_hostname="localhost") as other:
        shakes.join(30)
        name = f"carries {other.fileno()}"
        with tls.carried(made[0], name) as plain:
            [thread] = [t for t in threading.enumerate() if t.name == name]
            yield plain, other, thread
    thread.join(30)
    assert not thread.is_alive()


def fill(sock: socket.socket) -> None:
    """Until no more of it is carried away."""
    sock.setblocking(False)
    while select.select([], [sock], [], 1.0)[1]:
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            sock.send(bytes(1 << 16))


def test_bytes_are_carried_both_ways_and_what_was_written_before_the_end_comes(ends):
    plain, other, thread = ends
    there, back = os.urandom(3 << 20), os.urandom(3 << 20)
    sends = threading.Thread(target=other.sendall, args=(there,))
    sends.start()
    plain.settimeout(30)
    with plain.makefile("rb") as file:
        assert file.read(len(there)) == there
    sends.join(30)

    def answers() -> None:
        plain.sendall(back)
        plain.close()

    answering = threading.Thread(target=answers)
    answering.start()
    other.settimeout(30)
    with other.makefile("rb") as file:
        assert file.read() == back
    answering.join(30)
    thread.join(30)
    assert not thread.is_alive()


def test_a_host_that_reads_nothing_keeps_no_thread_once_it_is_dropped(ends, monkeypatch):
    monkeypatch.setattr(tls, "_LAST_S", 0.2)
    plain, _, thread = ends
    fill(plain)
    plain.close()
    until(lambda: not thread.is_alive())


def test_an_end_that_closes_while_nobody_reads_costs_no_time(ends, monkeypatch):
    """poll() says of a closed socket at once that it is closed, whatever it is asked."""
    plain, other, thread = ends
    fill(other)
    clock = time.pthread_getcpuclockid(thread.ident)
    other.close()
    used_s = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - used_s < 0.05, "it looks again and again"
    got = 0
    plain.settimeout(30)
    while more := plain.recv(1 << 20):
        got += len(more)
    assert got >= 1 << 20, "what had come before is there still"
