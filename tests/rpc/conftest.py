"""A server as a process of its own, for tests that need one to call and nothing special of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commanded_server import KINDS, FakeServicer, connect, serving

BOOT_TIMEOUT_S = 240.0


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `expertd serve --synthetic tiny:int4_g128`: 2 layers, 8 experts, top-2, H 256, on one thread."""
    log = tmp_path_factory.mktemp("tiny_server") / "log"
    command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--synthetic", "tiny:int4_g128"]
    command += ["--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        yield _address(process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end_s = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        if found := re.search(r"serving on (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    pytest.fail(f"the server did not come up (exit code {process.poll()}):\n{log.read_text()}")


@pytest.fixture
def servicer() -> FakeServicer:
    """What the fixture `address` serves; a test tells it what to do."""
    return FakeServicer()


@pytest.fixture
def address(servicer: FakeServicer) -> Iterator[str]:
    with serving(servicer) as where:
        yield where


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One of commanded_server.KINDS."""
    return str(request.param)


@pytest.fixture
def client(kind: str, address: str) -> Iterator[Any]:
    with connect(kind, address) as it:
        yield it
