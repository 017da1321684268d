"""TCP connections to a server that go through this process, so that they can be slowed, or cut without being broken."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

__all__ = ["Relay"]


class Relay:
    """target: "host:port".

    address   where it listens, on 127.0.0.1
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="expertd-relay", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.mend()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def slow(self, delay_s: float) -> None:
        """What the server says comes that much later from now on."""
        self._delay_s = delay_s

    def cut(self) -> None:
        """Nothing gets through, in either direction, and nobody is told."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """What was held up gets through."""
        self._loop.call_soon_threadsafe(self._open.set)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._open.wait()
            await self._carry(reader, writer)
        writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side ends."""
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        ways = [
            self._loop.create_task(self._up(reader, there_writer)),
            self._loop.create_task(self._down(there_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            there_writer.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _read(reader):
            await self._open.wait()
            writer.write(data)
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _read(reader):
            await self._open.wait()
            if self._delay_s:  # each piece waits by itself, so what comes meanwhile is late by the same time
                self._loop.call_later(self._delay_s, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next piece; b"" where the connection ended."""
    try:
        return await reader.read(1 << 16)
    except OSError:
        return b""
