"""A network namespace of its own for a server, joined to this one by a virtual cable (needs root, and iproute2).

Pulled out at the server's side, it drops packets in both directions and tells nobody: a partition.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence

from expertd.errors import UnimplementedError

__all__ = ["Namespace"]

_NUMBERS = itertools.count()


class Namespace:
    """address: of its end, on 198.18.0.0/15 (RFC 2544: for tests of networks); command: what runs a program there."""

    def __init__(self) -> None:
        """Raises UnimplementedError where this machine gives none."""
        if shutil.which("ip") is None or os.geteuid() != 0:
            raise UnimplementedError("network namespaces: got no `ip` or no root's rights, want both")
        number, process = next(_NUMBERS), os.getpid()
        net = f"198.18.{process % 256}"
        self.address, here = f"{net}.{4 * number % 256 + 2}", f"{net}.{4 * number % 256 + 1}"
        self._name, self._cable = f"expertd-{process}-{number}", f"ex{process % 10**7}h{number}"
        self.command: Sequence[str] = ("ip", "netns", "exec", self._name)
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "wire", "netns", self._name)
            _ip("address", "add", f"{here}/30", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            self._inside("address", "add", f"{self.address}/30", "dev", "wire")
            self._inside("link", "set", "lo", "up")
            self.mend()
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """No packet gets in or out."""
        self._inside("link", "set", "wire", "down")

    def mend(self) -> None:
        self._inside("link", "set", "wire", "up")

    def close(self) -> None:
        """Its end of the cable goes with it, and so does the other one."""
        _ip("netns", "delete", self._name)

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _inside(self, *words: str) -> None:
        _ip("-netns", self._name, *words)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise UnimplementedError(f"network namespaces: `ip {' '.join(words)}`: {done.stderr.strip()}")
