"""Servers in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address
from expertd_server.host.host import Host

HERE = Address("127.0.0.1", 0)


@contextmanager
def hosts(**defaults: Any) -> Iterator[Callable[..., Host]]:
    """serve(listen, **options): a Host that is SERVING, by default on a free port of this host.  All are closed in the
    end."""
    with ExitStack() as stack:

        def serve(listen: Address = HERE, **options: Any) -> Host:
            host = Host(ServeConfig(**({"device": "cpu", "threads": 1, "listen": listen} | defaults | options)))
            stack.callback(host.close)
            host.start()
            host.ready(60)
            return host

        yield serve
