"""Servers and clients as processes of their own, and what can happen to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from expertctl.bench.faults.netns import Namespace
from expertd.errors import UnavailableError
from expertd_client.clients.client import ExpertClient

__all__ = ["BOOT_S", "ServerProcess", "Stampede"]

BOOT_S = 120.0
_END_S = 60.0
_LAST_LINES = 400


class ServerProcess:
    """`expertd serve` on this host.  options: of its command line, without --listen; inside: the network that it is in,
    None = this one.  command, module: what is served instead, by a module whose first argument is the command;
    "" = it has none.

    address   "127.0.0.1:port", the same after each start; "" before the first
    """

    def __init__(
        self,
        options: Sequence[str],
        inside: Namespace | None = None,
        command: str = "serve",
        module: str = "expertd_server.commands.cli",
    ) -> None:
        self.address = ""
        self._options = list(options)
        self._inside = inside
        self._command, self._module = command, module
        self._process: subprocess.Popen[str] | None = None
        self._serving: Future[str] = Future()
        self._lines: list[str] = []
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def start(self, *more: str) -> None:
        """Starts it, and does not wait; more: options besides."""
        there = ("127.0.0.1", ()) if self._inside is None else (self._inside.address, self._inside.command)
        listen = self.address or f"{there[0]}:0"
        serve = ["-m", self._module, *self._command.split(), "--listen", listen, *self._options, *more]
        command = [*there[1], sys.executable, *serve]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self._process, self._serving, self._lines = process, Future(), []
        self._last.clear()
        log = (process, self._serving, self._lines, self._last)
        threading.Thread(target=_read, args=log, name="expertd-log", daemon=True).start()

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return 0 if self._process is None else self._process.pid

    def ready(self) -> str:
        """Waits until it serves; its address.  Raises UnavailableError with its log where it ended, or took longer than
        BOOT_S."""
        try:
            self.address = self._serving.result(BOOT_S)
        except FutureTimeoutError:
            said = "".join(self._lines[-3:]).strip() or "nothing"
            raise UnavailableError(
                f"server of the benchmark: got no 'serving on' within {BOOT_S:g} s, want one; its log: {said}"
            ) from None
        return self.address

    def restart(self, *more: str) -> None:
        """start() and ready()."""
        self.start(*more)
        self.ready()

    def kill(self) -> None:
        """kill -9; restart() brings it back."""
        self._send(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        """SIGSTOP: it is there and does nothing."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def said(self, pattern: str) -> str:
        """The first group of a pattern in what it logged before it served.  Raises UnavailableError."""
        found = re.search(pattern, "".join(self._lines))
        if found is None:
            raise UnavailableError.about(f"{self.address}: log", got="no such line", want=pattern)
        return found[1]

    def complaint(self) -> str:
        """The last line of a server that ended instead of serving; "" = it serves."""
        return self._lines[-1].strip() if self._serving.exception(BOOT_S) is not None and self._lines else ""

    def end(self) -> int:
        """SIGTERM, and waits: the exit code.  Raises UnavailableError with its stacks where it does not end."""
        self._send(signal.SIGTERM)
        return self._wait()

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self) -> int:
        if self._process is None:
            return 0
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)  # it prints what its threads do
            time.sleep(1)
            raise UnavailableError(
                f"server of the benchmark: runs {_END_S:g} s after it was to end; its log: {''.join(self._last)}"
            ) from None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(60)


class Stampede:
    """A client in a process of its own that keeps 64 large requests under way at one server."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None

    def wait(self) -> None:
        """Until the server has a queue."""
        end_s = time.monotonic() + BOOT_S
        with ExpertClient(self._address) as client:
            while not client.describe().load.queued_requests and time.monotonic() < end_s:
                time.sleep(0.01)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)

    def __enter__(self) -> Stampede:
        load = ["load", self._address, "--m", "256", "--concurrency", "64", "--requests", "100000000"]
        command = [sys.executable, "-m", "expertctl.cli", *load]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _read(process: subprocess.Popen[str], serving: Future[str], lines: list[str], last: deque[str]) -> None:
    """Its log, which must be read so that it can be written; lines: until it serves; last: of all its
    life."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            last.append(line)
            if serving.done():
                continue
            lines.append(line)
            if found := re.search(r"serving on (\S+)", line):
                serving.set_result(found[1])
    if not serving.done():
        serving.set_exception(UnavailableError(f"the server ended: {''.join(lines[-20:])}"))
