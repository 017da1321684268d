"""A server of a benchmark as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from expertd.errors import UnavailableError

__all__ = ["child_server"]

_END_S = 10.0


@contextlib.contextmanager
def child_server(name: str, module: str, *words: str, pass_fds: Sequence[int] = ()) -> Iterator[str]:
    """The first line that `python -m MODULE WORDS` prints, while it runs.  It ends when its standard input is closed,
    and is killed where it does not.  Raises UnavailableError where it prints nothing."""
    command = [sys.executable, "-m", module, *words]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise UnavailableError(f"{name}: ended with code {child.wait()} before it listened")
        yield line
    finally:
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
