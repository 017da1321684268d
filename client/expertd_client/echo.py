"""The echo server as a process of its own: all of a server but the kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from expertd.errors import UnavailableError

__all__ = ["echo_server", "no_echo"]


def no_echo() -> str:
    """Why there can be no echo server."""
    for module in ("expertd_server", "torch"):
        if importlib.util.find_spec(module) is None:
            return f"the echo server needs {module}, which is not installed: pip install 'expertd[server]'"
    return ""


@contextlib.contextmanager
def echo_server(hidden_size: int, max_tokens: int) -> Iterator[str]:
    """The address of `expertd echo` as a process of its own.  Raises UnavailableError where it does not start."""
    command = [sys.executable, "-m", "expertd_server.cli", "echo", "--with-stdin"]
    command += ["--hidden-size", str(hidden_size), "--max-tokens", str(max_tokens)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line.startswith("serving on "):
            raise UnavailableError(f"echo server: got {line!r} (exit code {child.poll()}), want 'serving on ADDRESS'")
        yield line.split()[-1]
    finally:
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
