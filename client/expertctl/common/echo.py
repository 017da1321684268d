"""The echo server as a process of its own: all of a server but the kernels."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from expertctl.common.child import child_server
from expertd.errors import UnavailableError

__all__ = ["echo_server", "no_echo"]


def no_echo() -> str:
    """Why there can be no echo server."""
    for module in ("expertd_echo", "torch"):
        if importlib.util.find_spec(module) is None:
            return f"the echo server needs {module}, which is not installed: pip install 'expertd[server]'"
    return ""


@contextlib.contextmanager
def echo_server(hidden_size: int, max_tokens: int, *options: str) -> Iterator[str]:
    """The address of `expertd-echo` as a process of its own.  Raises UnavailableError where it does not start."""
    words = ("--with-stdin", "--hidden-size", str(hidden_size), "--max-tokens", str(max_tokens))
    with child_server("echo server", "expertd_echo", *words, *options) as line:
        if not line.startswith("serving on "):
            raise UnavailableError(f"echo server: got {line!r}, want 'serving on ADDRESS'")
        yield line.split()[-1]
