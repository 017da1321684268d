"""Starts a session's relay (expertd.nixl.relay) and hears whether it came up."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from expertd.nixl.relay import READY
from expertd.shm.region import Region

__all__ = ["RelayError", "RelayProcess"]

_END_S = 3.0
_MOST_LINE = 1000
_OURS = ("UCX_", "NIXL_", "PYTHON", "LD_", "MELLANOX_", "RDMAV_", "IBV_", "MLX5_")
_NAMES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


class RelayError(Exception):
    """A relay did not come up; the text says why."""


class RelayProcess:
    """One relay.  role: relay.NEAR or FAR.  wire: to the other one; it is the relay's from now on.  local: the other
    one is on this host, so UCX need not listen beyond it.  bell: the relay's end of the region's (Region.ring_here),
    the relay's from now on.

    owner   readable when the relay has ended; closing it ends the relay"""

    def __init__(self, role: str, region: Region, bell: socket.socket, wire: socket.socket, *, local: bool) -> None:
        self.owner, theirs = socket.socketpair()
        fds = [theirs.fileno(), wire.fileno(), bell.fileno()]
        command = [sys.executable, "-m", "expertd.nixl.relay", role, *map(str, fds)]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                env=_environment(os.environ, local),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            region.send(self.owner)
        except OSError as e:
            self.owner.close()
            raise RelayError(f"its relay cannot be started: {e.strerror or e}") from e
        finally:
            theirs.close()
            wire.close()
            bell.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self, timeout_s: float) -> None:
        """Raises RelayError."""
        line = self.last_word(timeout_s)
        if line != READY:
            raise RelayError(line or "its relay ended before it was ready")

    def last_word(self, timeout_s: float | None = None) -> str:
        """The next line that it says; "": it ended without one, or the time was over."""
        said, until_s = b"", None if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and len(said) < _MOST_LINE:
                self.owner.settimeout(None if until_s is None else max(until_s - time.monotonic(), 1e-3))
                more = self.owner.recv(_MOST_LINE)
                if not more:
                    break
                said += more
        return said.decode(errors="replace").strip()

    def end(self) -> None:
        """Begins to end it, from any thread."""
        with contextlib.suppress(OSError):
            self.owner.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        """Waits until it has ended by itself."""
        self._process.wait()

    def close(self) -> None:
        """Ends it, and waits."""
        self.end()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.owner.close()


def _environment(ours: Mapping[str, str], local: bool) -> dict[str, str]:
    """What a relay needs of it, and no more: it is exposed to its peer."""
    out = {k: v for k, v in ours.items() if k in _NAMES or k.startswith(_OURS)}
    out.setdefault("NIXL_LOG_LEVEL", "FATAL")
    out.setdefault("UCX_LOG_LEVEL", "fatal")
    if local:
        out.setdefault("UCX_NET_DEVICES", "lo")
    return out
