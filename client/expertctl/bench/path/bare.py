"""Bare bytes there and back, as fast as Python moves them by each kind of channel: what a transport is held against.

    stream     a grpc.aio bidirectional stream: bytes in, the same bytes out
    socket     a TCP connection: eight bytes of length, then the bytes
    eventfd    a piece of memory and two eventfds: the bytes are copied in, across and out

The other side of all three is a process of its own, `python -m expertctl.bench.path.bare`, which ends when its standard
input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from expertctl.common.child import child_server
from expertd.common.hostmem import tune_allocator

__all__ = ["Bare", "EventfdEcho", "SocketEcho", "StreamEcho", "bare_server"]

_METHOD = "/bare.Echo/Echo"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_HEAD = struct.Struct("<Q")
_PAGE = mmap.PAGESIZE
_EOF: Any = vars(grpc.aio)["EOF"]  # grpc's type stubs do not know it


class Memory:
    """What one caller shares with the echo server: a page with the length, the way there, the way back, two bells."""

    def __init__(self, fd: int, there: int, back: int, most: int) -> None:
        self.fd, self.there, self.back, self.most = fd, there, back, most
        self.map = mmap.mmap(fd, _PAGE + 2 * most)
        view = memoryview(self.map)
        self.request, self.answer = view[_PAGE : _PAGE + most], view[_PAGE + most :]

    @classmethod
    def make(cls, most: int) -> Memory:
        fd = os.memfd_create("expertd-bare", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE + 2 * most)
        return cls(fd, os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC), most)

    def fds(self) -> tuple[int, int, int]:
        return self.fd, self.there, self.back

    def close(self) -> None:
        self.request.release()
        self.answer.release()
        self.map.close()
        for fd in self.fds():
            os.close(fd)


class Bare:
    """The echo server as it is reached.  stream, socket: its ports; memories: one for each caller."""

    def __init__(self, stream: int, socket: int, memories: list[Memory]) -> None:
        self.stream, self.socket, self.memories = stream, socket, memories


@contextlib.contextmanager
def bare_server(callers: int, most_bytes: int) -> Iterator[Bare]:
    """The server process, for as many callers and bytes at most.  Raises UnavailableError where it does not start."""
    memories = [Memory.make(most_bytes) for _ in range(callers)]
    fds = [m.fds() for m in memories]
    given = json.dumps({"fds": fds, "most": most_bytes})
    pass_fds = [fd for three in fds for fd in three]
    try:
        with child_server("bare echo server", "expertctl.bench.path.bare", given, pass_fds=pass_fds) as line:
            yield Bare(**json.loads(line), memories=memories)
    finally:
        for memory in memories:
            memory.close()


# ---- callers ---------------------------------------------------------------------------------------------------------


class StreamEcho:
    """One stream over a connection of its own.  address, method: of who answers."""

    def __init__(self, address: str, method: str = _METHOD) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._call: Any = self._channel.stream_stream(method)()

    async def echo(self, payload: bytes) -> None:
        _check(len(await self.ask(payload)), len(payload))

    async def ask(self, message: bytes) -> bytes:
        await self._call.write(message)
        answer: bytes = await self._call.read()
        return answer

    async def close(self) -> None:
        await self._call.done_writing()
        await self._channel.close()


class SocketEcho:
    """One TCP connection."""

    def __init__(self, bare: Bare, most: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", bare.socket))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = memoryview(bytearray(_HEAD.size + most))

    def echo(self, payload: bytes) -> None:
        _send(self._socket, [_HEAD.pack(len(payload)), payload])
        got = _receive(self._socket, self._answer)
        _check(got, len(payload))

    def close(self) -> None:
        self._socket.close()


class EventfdEcho:
    """One piece of memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._answer = memoryview(
            bytearray(memory.most)
        )  # a bytearray's slice would be assigned by way of another copy

    def echo(self, payload: bytes) -> None:
        m, n = self._memory, len(payload)
        m.request[:n] = payload
        _HEAD.pack_into(m.map, 0, n)
        os.eventfd_write(m.there, 1)
        os.eventfd_read(m.back)
        self._answer[:n] = m.answer[:n]

    def close(self) -> None:
        """The memory is its maker's."""


def _check(got: int, want: int) -> None:
    if got != want:
        raise RuntimeError(f"bare echo: got {got} bytes, want {want}")


def _send(to: socket.socket, parts: list[Any]) -> None:
    left = [memoryview(p) for p in parts]
    while left:
        n = to.sendmsg(left)
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if left:
            left[0] = left[0][n:]


def _receive(of: socket.socket, room: memoryview) -> int:
    """A message into `room`; its length, or -1 at the end."""
    have = 0
    while have < _HEAD.size or have < _HEAD.size + _HEAD.unpack_from(room)[0]:
        n = of.recv_into(room[have:])
        if n == 0:
            return -1
        have += n
    return have - _HEAD.size


# ---- the server ------------------------------------------------------------------------------------------------------


async def _serve(fds: list[list[int]], most: int) -> None:
    for fd, there, back in fds:
        threading.Thread(target=_answer_memory, args=(Memory(fd, there, back, most),), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, most), daemon=True).start()
    server = grpc.aio.server(options=_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(_answer_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"stream": port, "socket": listener.getsockname()[1]}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0.2)


async def _answer_stream(_: AsyncIterator[bytes], context: Any) -> None:
    while (data := await context.read()) is not _EOF:
        await context.write(data)


def _accept(listener: socket.socket, most: int) -> None:
    while True:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer_socket, args=(accepted, most), daemon=True).start()


def _answer_socket(of: socket.socket, most: int) -> None:
    room = memoryview(bytearray(_HEAD.size + most))
    with of, contextlib.suppress(OSError):
        while (n := _receive(of, room)) >= 0:
            _send(of, [room[: _HEAD.size + n]])


def _answer_memory(m: Memory) -> None:
    while True:
        os.eventfd_read(m.there)
        (n,) = _HEAD.unpack_from(m.map, 0)
        m.answer[:n] = m.request[:n]
        os.eventfd_write(m.back, 1)


if __name__ == "__main__":
    tune_allocator()
    asyncio.run(_serve(**json.loads(sys.argv[1])))
