"""The hostile side of a session in shared memory, a process of its own: python shm_attacker.py ROLE HOW ...

    client HOW ENDPOINT TOKEN    enters as a client would
    server DESCRIPTOR            shares a region over a socket, as a server would

Prints "ready" when it has done its worst, and goes on until it is killed.
"""

from __future__ import annotations

import array
import ctypes as C
import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress

import numpy as np

from expertd.shm import layout
from expertd.shm.layout import Submission
from expertd.shm.region import Region

SLEEPS = (64, 128)
"""Offsets in the control page: the client's word that it sleeps, the server's."""
TAKEN = 192
"""And the count of what the server has taken."""
_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def everything_from(sock: socket.socket) -> tuple[bytes, list[int]]:
    """(bytes, descriptors) of the next message, as many as come."""
    data, more, *_ = sock.recvmsg(64, socket.CMSG_SPACE(64 * 4))
    fds = array.array("i")
    for _, kind, payload in more:
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def block_and_fill(fd: int) -> None:
    """Whatever the descriptor is: nothing more fits into it, and its open file waits for room."""
    for data in ((2**64 - 2).to_bytes(8, "little"), b"\1" * 4096):
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
        with suppress(OSError):
            for _ in range(100_000):
                os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)


def ready() -> None:
    print("ready", flush=True)


def client(how: str, endpoint: str, token: str) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + endpoint.removeprefix("unix-abstract:"))
    sock.sendall(token.encode())
    data, fds = everything_from(sock)
    size = int.from_bytes(data[8:16], "little")
    libc = C.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = C.c_void_p, (C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long)
    base = libc.mmap(None, size, 3, 1, fds[0], 0)
    ring = (Submission * layout.ENTRIES).from_address(base + layout.PAGE)
    if how == "fill":
        for fd in (*fds[1:], sock.fileno()):
            block_and_fill(fd)
    elif how == "half close":
        sock.shutdown(socket.SHUT_WR)
    elif how == "punch":
        libc.fallocate.argtypes = (C.c_int, C.c_int, C.c_long, C.c_long)
        libc.fallocate(fds[0], _PUNCH, 0, size)
    for at in SLEEPS:
        C.c_uint32.from_address(base + at).value = 1
    for n in range(8):  # each is refused at once: an answer, and a bell
        ring[n].kind, ring[n].layer = layout.FORWARD, 77
        ring[n].seq = n + 1
    if how != "fill":
        with suppress(OSError):
            sock.send(b"\1", socket.MSG_DONTWAIT)
    if how == "forever":
        ready()
        cancel_for_ever(base, ring)
    time.sleep(0.3)
    if how == "fill":  # the end is rung for, too
        sock.shutdown(socket.SHUT_RDWR)
    ready()
    time.sleep(60)


def cancel_for_ever(base: int, ring: C.Array[Submission]) -> None:
    """The ring is full again before the core has been through it."""
    for s in ring:
        s.kind = layout.CANCEL
    words = np.frombuffer((C.c_uint64 * (16 * layout.ENTRIES)).from_address(base + layout.PAGE), np.uint64)
    seqs, ahead = words[::16], np.arange(layout.ENTRIES, dtype=np.uint64)
    taken = C.c_uint64.from_address(base + TAKEN)
    while True:
        n = taken.value
        seqs[(ahead + np.uint64(n)) % np.uint64(layout.ENTRIES)] = ahead + np.uint64(n + 1)


def server(descriptor: str) -> None:
    sock, region = socket.socket(fileno=int(descriptor)), Region.create(1 << 18)
    head = struct.pack(
        "<8sIIQQ", b"expshm01", 2, region.entries, layout.arena_offset(region.entries), region.arena_bytes
    )
    C.memmove(region.address, head, len(head))
    region.send(sock)
    for fd in (*region._fds[1:], sock.fileno()):
        block_and_fill(fd)
    sleeps = C.c_uint32.from_address(region.address + SLEEPS[1])
    sleeps.value = 1
    ready()
    while True:
        sleeps.value = 1
        time.sleep(0.001)


if __name__ == "__main__":
    {"client": client, "server": server}[sys.argv[1]](*sys.argv[2:])
