"""expertd serve: a Host as a process: signals, exit code, and what is set for the whole process.

plan -> listen (health NOT_SERVING) -> load, check, warm up on a thread -> SERVING -> SIGTERM -> drain -> exit 0
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from expertd.common.signals import MainWait, ended_by_signals
from expertd_server.config import logs
from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError, ServeConfig
from expertd_server.config.variables import unread

if TYPE_CHECKING:
    from rich.console import Console

    from expertd_server.host.host import Host

__all__ = ["add_parser", "as_server", "quiet_memory", "run", "serve"]

log = logging.getLogger(__name__)

LOST = 3
"""Exit code: the device, or the weights, are lost to the process; another one can serve."""

_STOPPED = "stopped while loading"

_SWITCH_S = 0.0003
"""How long the event loop and the engine's thread may keep Python's lock from each other.  At Python's default of 5 ms
a round trip of one token took 855 us, at 0.3 ms 690 us (median, gRPC stream over loopback, empty kernel, 16 cores)."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="expertd serve (--checkpoint DIR | --synthetic MODEL:SCHEME) [OPTION ...]",
        help="load experts and answer calls over gRPC",
        description="Loads quantized experts once and answers calls over gRPC until SIGTERM.  Options can also be"
        " set in"
        " the environment (EXPERTD_MAX_TOKENS) or in a TOML file (--config); flags take precedence.  One of"
        " --checkpoint"
        " and --synthetic is needed.",
    )
    add_flags(parser)
    parser.add_argument("--print-config", action="store_true", help="print the configuration and end")


def run(args: argparse.Namespace) -> int:
    try:
        config = resolve(args)
    except ConfigError as e:
        print(f"expertd serve: {e}", file=sys.stderr)
        return 2
    if args.print_config:
        print(config)
        return 0
    logs.configure(config.log_level, config.log_format)
    for warning in unread(os.environ):
        log.warning("%s", warning)
    # Before the imports below: a signal that has no handler ends the process with 143, and of a container's first
    # process it is ignored.
    with ended_by_signals() as waiting:
        return _run(config, waiting)


def _run(config: ServeConfig, waiting: MainWait) -> int:
    # torch and grpc take a second to import: only now, when the options are known to be good.
    import faulthandler

    from expertd.common.hostmem import tune_allocator
    from expertd_server.boot.assignment import BootError

    tune_allocator()
    as_server()
    # kill -USR1 prints every thread's stack: what a server that hangs is doing.
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        return serve(config, _console(config), waiting)
    except BootError as e:
        if config.log_format == "json":
            log.critical("%s", e)
        else:
            print(f"expertd serve: {e}", file=sys.stderr)
        return e.exit_code


def _console(config: ServeConfig) -> Console:
    """Where people are told; a log in JSON has all of it, and nothing but it is printed."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, quiet=config.log_format == "json")


def as_server() -> None:
    """Set for the whole process how its threads share the interpreter."""
    sys.setswitchinterval(_SWITCH_S)


def serve(config: ServeConfig, console: Console, waiting: MainWait) -> int:
    """A Host until waiting.wait() returns for a signal.  The exit code.  Raises BootError."""
    from expertd_server.boot.compiling import KernelsAhead

    kernels = KernelsAhead(config.device)  # which imports torch beside this process
    from expertd_server.host.host import Host

    if waiting.rung:
        kernels.close()
        console.print(_STOPPED)
        if config.log_format == "json":
            log.info(_STOPPED)
        return 0
    host = Host(config, console, on_fault=waiting.ring, kernels=kernels)
    host.loaded.add_done_callback(waiting.ring)
    with contextlib.closing(host):
        return _serve(host, waiting)


def _serve(host: Host, waiting: MainWait) -> int:
    host.start()
    waiting.wait()
    if not host.loaded.done():
        host.say(_STOPPED)
        return 0
    quiet_memory(host)
    host.ready()
    host.say(f"serving on {host.address}")
    waiting.wait()
    host.say(f"draining: {host.engine.load().queued_requests} requests in flight; a second signal ends at once")
    done = host.drain(host.config.grace_s)
    if host.fault:
        host.say(f"stopped: {host.fault}; restart the server")
    elif done:
        host.say(f"stopped: all {host.engine.admitted} accepted requests were answered or refused")
    else:
        grace = f"within the grace time of {host.config.grace_s:g} s (--grace-s)"
        host.say(f"stopped: not all accepted requests were answered or refused {grace}")
    if host.fault:
        return LOST
    return 0 if done else 1


def quiet_memory(host: Host) -> None:
    """After a boot in a process of the server's own.  What was made stays for the process's life: keep the garbage
    collector from walking it again and again; and what the boot's kernels alone needed goes back to the device."""
    from expertd_server.boot.stacks import narrow_stacks

    gc.collect()
    gc.freeze()
    for device in host.devices:
        host.engine.without_graphs(functools.partial(narrow_stacks, device))  # graphs hold what this takes away
