"""A Host in a process that somebody else starts, watches and ends: an actor of Ray, a worker of an engine.

    hosted = Hosted(["--checkpoint", DIR, "--shard", "0/8", "--listen", "10.0.0.1:0"])    options of expertd serve
    hosted.state()                                                                        where it stands, at once
    hosted.drain(30)

Nothing is raised where it cannot serve: state() has the sentence, and who started the process decides what becomes
of it.  A process has one.  No signal is handled.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import NoReturn, TypedDict

from expertd.common.command_line import Parser
from expertd.common.hostmem import tune_allocator
from expertd_server.boot.assignment import BootError
from expertd_server.commands.serve import as_server, quiet_memory
from expertd_server.config import logs
from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError
from expertd_server.config.variables import unread
from expertd_server.host.host import Host

__all__ = ["Hosted", "State"]

log = logging.getLogger(__name__)


class State(TypedDict):
    """phase     "loading", "serving", "drained" or "failed"
    why       the sentence, where it failed
    address   where gRPC is served; metrics: where Prometheus' series are; "" = nowhere
    pid       of its process
    """

    phase: str
    why: str
    address: str
    metrics: str
    pid: int


class Hosted:
    """argv: options of `expertd serve`.  Listens when it is made, and loads on a thread.  Thread-safe."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._host: Host | None = None
        self._why = ""
        self._drained = False
        tune_allocator()
        as_server()
        try:
            config = resolve(_parsed(argv))
            logs.configure(config.log_level, config.log_format)
            for warning in unread(os.environ):
                log.warning("%s", warning)
            host = Host(config)
            host.loaded.add_done_callback(lambda loaded: None if loaded.exception() else quiet_memory(host))
            host.start()
        except (BootError, ConfigError) as error:
            self._why = str(error)
        else:
            self._host = host

    def state(self) -> State:
        """Where it stands."""
        host = self._host
        if host is None:
            return _state("failed", self._why)
        why = host.fault
        if host.loaded.done() and (error := host.loaded.exception()) is not None:
            why = str(error)
        if why:
            return _state("failed", why)
        phase = "drained" if self._drained else "serving" if host.loaded.done() else "loading"
        return _state(phase, "", host.address, host.metrics_address)

    def drain(self, grace_s: float) -> bool:
        """Refuse what is new, answer what was taken.  False: grace_s was over before everything was answered."""
        self._drained = True
        return self._host is None or not self._host.loaded.done() or self._host.drain(grace_s)

    def close(self) -> None:
        """End it at once."""
        if self._host is not None:
            self._host.close()


def _state(phase: str, why: str, address: str = "", metrics: str = "") -> State:
    return State(phase=phase, why=why, address=address, metrics=metrics, pid=os.getpid())


class _Parser(Parser):
    """Raises where it would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="expertd serve", add_help=False)
    add_flags(parser)
    found: argparse.Namespace = parser.parse_args(list(argv))
    return found
