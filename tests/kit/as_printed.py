"""Commands of a page run as they are printed, with their default ports, in a network namespace of their own.

Only placeholders are replaced (DIR, HOST:PORT).  A server that a page starts runs until the page starts another one at
the same address, or ends.  An address that a command calls and nothing serves is served before: the page presumes it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from documents import ROOT, Command

from expertctl.common import brief

CHECKPOINT = "tests/fixtures/gptq-w4-g128-sym-descact-false-qwen3moe1l"
PLACEHOLDERS = {"DIR": CHECKPOINT, "HOST:PORT": "127.0.0.1:50051", "ADDRESS": "127.0.0.1:50051"}
PORT = 50051
OTHERS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
"""Other hosts of the documents, as addresses of the namespace."""
SCALE = "0.05"
"""EXPERTD_BENCH_SCALE: of durations that a command does not say itself."""
READY = re.compile(r"serving on \S+|recording: call \S+")
COMMAND_S, READY_S, STOP_S = 300, 300, 60
PATH = os.pathsep.join([str(Path(sys.executable).parent), str(ROOT / "node_modules/.bin"), os.environ["PATH"]])


def no_namespace() -> str:
    """Why there can be none: needs util-linux, iproute2, and root or unprivileged user namespaces."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool}"
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return f"network namespaces: {done.stderr.strip()}" if done.returncode else ""


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--user", "--map-root-user"]


class Namespace:
    """A process that keeps a network namespace; command: what runs a program in it.  presumed: servers that no page has
    started and the next page may call, by address."""

    def __init__(self) -> None:
        self.presumed: dict[str, Server] = {}
        more = " && ".join(f"ip address add {a}/32 dev lo" for a in OTHERS)
        script = f"ip link set lo up && {more} && echo up && exec sleep infinity"
        self._keeper = subprocess.Popen([*_unshare(), "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "up\n", "the namespace has no loopback"
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.command = ["nsenter", "--target", str(self._keeper.pid), "--net", *user, "--"]

    def close(self) -> None:
        try:
            self.stop_presumed()
        finally:
            self._keeper.kill()
            self._keeper.communicate()

    def stop_presumed(self) -> None:
        while self.presumed:
            server = self.presumed.popitem()[1]
            try:
                server.stop()
            finally:
                server.end()


@dataclass
class Server:
    """presumed: no page has started it."""

    text: str
    process: subprocess.Popen[bytes]
    log: Path
    presumed: bool = False

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, what: Callable[[str], object], seconds: float) -> str:
        """What it said by then.  AssertionError: it ended, or took longer."""
        end = time.monotonic() + seconds
        while not what(said := self.said()):
            assert self.process.poll() is None, f"{self.text}: ended with {self.process.returncode}:\n{said}"
            assert time.monotonic() < end, f"{self.text}: not ready in {seconds} s:\n{said}"
            time.sleep(0.05)
        return said

    def stop(self) -> None:
        """As Ctrl-C's twin, SIGTERM, does; a server ends with 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0, self.said()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Reader:
    """Somebody who pastes the commands of one page, one after the other.

    folder: looks like the root of a checkout; what commands write stays in it.
    """

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        self._namespace, self._folder = namespace, folder
        self._servers: dict[str, Server] = {}
        self._started = 0
        for path in ROOT.iterdir():
            if path.name not in ("build", "dist"):
                (folder / path.name).symlink_to(path)
        (folder / "build").mkdir()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for address, server in list(self._servers.items()):
                if server.presumed and server.process.poll() is None:
                    self._namespace.presumed[address] = self._servers.pop(address)
                else:
                    self._stop(address)
        finally:
            for server in self._servers.values():
                server.end()

    def run(self, command: Command) -> str:
        """What it printed.  AssertionError: it failed, or printed nothing."""
        text = filled(command.text)
        self._serve(called(text))
        words = [sys.executable, "-c", text] if command.kind == "python" else ["bash", "-euo", "pipefail", "-c", text]
        process = self._popen(words, subprocess.PIPE, subprocess.STDOUT)
        try:
            said = process.communicate(timeout=COMMAND_S)[0].decode(errors="replace")
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, f"{command}: ended with {process.returncode}:\n{said}"
        return said

    def start(self, command: Command) -> str:
        """A command that goes on: returns what it said until it served.  It replaces what its page ran there."""
        text = filled(command.text)
        address = listens(text)
        if address in self._servers:
            self._stop(address)
        self._namespace.stop_presumed()  # they might have its ports
        self._serve(called(text))
        return self._start(text, address)

    def stop(self, command: Command) -> None:
        self._stop(listens(filled(command.text)))

    def _serve(self, addresses: set[str]) -> None:
        for address in sorted(addresses - self._everywhere()):
            if address in self._namespace.presumed:
                self._servers[address] = self._namespace.presumed.pop(address)
                continue
            self._namespace.stop_presumed()
            metrics = f"--metrics-listen {address.rpartition(':')[0]}:9464 --insecure"
            options = f"--threads 1 --kserve yes --expert-metrics yes --listen {address} {metrics}"
            self._start(f"expertd serve --synthetic tiny:int4_g128 {options}", address)
            self._servers[address].presumed = True

    def _everywhere(self) -> set[str]:
        """Addresses that are served; 0.0.0.0 is all of them."""
        out = {a for a, s in self._servers.items() if s.process.poll() is None}
        for address in list(out):
            host, _, port = address.rpartition(":")
            out |= {f"{h}:{port}" for h in ("127.0.0.1", *OTHERS) if host == "0.0.0.0"}
        return out

    def _start(self, text: str, address: str) -> str:
        self._started += 1
        log = self._folder / f".server-{self._started}"
        with log.open("wb") as file:
            process = self._popen(["bash", "-c", f"exec {text}"], file, subprocess.STDOUT)
        server = self._servers[address] = Server(text, process, log)
        return server.wait_for(READY.search, READY_S)

    def _stop(self, address: str) -> None:
        server = self._servers[address]
        if server.process.poll() is None:
            server.stop()
        assert server.process.returncode == 0, f"{server.text}: ended with {server.process.returncode}: {server.said()}"
        del self._servers[address]

    def _popen(self, words: list[str], out: object, err: object) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PATH": PATH, brief.SCALE: SCALE, "PYTHONUNBUFFERED": "1"}
        command = [*self._namespace.command, *words]
        return subprocess.Popen(command, cwd=self._folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)  # type: ignore[call-overload,no-any-return]


def filled(text: str) -> str:
    """With the placeholders of people who have a checkpoint and a server."""
    for name, value in PLACEHOLDERS.items():
        text = re.sub(rf"(?<![\w.:-]){name}(?![\w.:-])", value, text)
    return text


def listens(text: str) -> str:
    """Where a server is to be called."""
    m = re.search(r"--listen[ =](\S+)", text)
    return m[1] if m else f"127.0.0.1:{PORT}"


def called(text: str) -> set[str]:
    """Addresses of gRPC that a command calls: those of the documents that it does not serve itself."""
    without = re.sub(r"--[\w-]*listen[ =]\S+", "", text)
    found = re.findall(r"(?<![\w.])(127\.0\.0\.1|10\.0\.0\.\d+)(:\d+)?(?![\d.])", without)
    return {f"{host}{port or f':{PORT}'}" for host, port in found if port != ":9464"}


def goes_on(command: Command) -> bool:
    """Whether it runs until it is stopped, or until others have done something."""
    if command.kind == "python":
        return False
    words = command.words[command.words.index(command.program) :] if command.program in command.words else []
    stays = (["expertd", "serve"], ["expertd", "echo"], ["expertctl", "record"])
    return words[:2] in stays and "--print-config" not in words


def lacking(command: Command) -> str:
    """The program, or the package of a Python block, that is not installed here."""
    if command.kind == "python":
        names = re.findall(r"^\s*(?:import|from) (\w+)", command.text, re.MULTILINE)
        return next((n for n in names if importlib.util.find_spec(n) is None), "")
    return "" if shutil.which(command.program, path=PATH) else command.program


def whole(command: Command) -> bool:
    """Whether nothing is left out of it."""
    return "..." not in command.text and not re.search(r"\[\w+=", command.text)
