"""Servers in another process, several in one: `hosts([...])` yields their addresses.

As a program: reads a JSON list of ServeConfig's fields from its first argument, prints one JSON list of addresses when
all are SERVING, and ends at once with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Hosts:
    """A process with servers."""

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        command = [sys.executable, __file__, json.dumps(list(configs), default=str)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the servers did not come up: exit code {self._process.wait(10)}"
        self.addresses: list[str] = json.loads(line)

    def kill(self) -> None:
        """As a lost machine."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def hosts(configs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Addresses of one server each.  Fields: checkpoint, shard ("0/2"), compute_dtype, max_tokens, ..."""
    with contextlib.closing(Hosts(configs)) as made:
        yield made.addresses


def main() -> None:
    from pathlib import Path

    from expertd_server.config.serve import ServeConfig
    from expertd_server.config.values import Address, Shard
    from expertd_server.host.host import Host

    started = []
    for fields in json.loads(sys.argv[1]):
        fields = {"device": "cpu", "threads": 1, "compute_dtype": "float32", **fields}
        fields["checkpoint"] = Path(fields["checkpoint"])
        if "shard" in fields:
            fields["shard"] = Shard.parse(fields["shard"])
        started.append(Host(ServeConfig(listen=Address("127.0.0.1", 0), **fields)))
        started[-1].start()
        started[-1].ready(60)
    print(json.dumps([host.address for host in started]), flush=True)
    sys.stdin.read()
    os._exit(0)  # with whoever started them


if __name__ == "__main__":
    main()
