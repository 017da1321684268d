"""Variables EXPERTD_* of the environment: those of options, those that other parts read, and mistakes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from expertd_server.config.options import OPTIONS
from expertd_server.config.serve import ConfigError

__all__ = ["KNOWN", "check_variables", "unread"]

PREFIX = "EXPERTD_"

KNOWN = frozenset(
    {
        "EXPERTD_CONFIG",  # as --config
        # of this process, read where they are used: kernels, compilers, installs
        "EXPERTD_COMMIT",
        "EXPERTD_COMPILE_PROCESSES",
        "EXPERTD_CPU_ISA",
        "EXPERTD_CPU_LIBRARY",
        "EXPERTD_CPU_NODES",
        "EXPERTD_CPU_SUBNORMALS",
        "EXPERTD_CPU_THREADS",
        "EXPERTD_WHEEL",
        # of clients, which may run in the same environment
        "EXPERTD_ADDRESS",
        "EXPERTD_BENCH_SCALE",
        "EXPERTD_CLIENT",
        "EXPERTD_KT",
        "EXPERTD_TCP_HOSTS",
        # of the tests
        "EXPERTD_FUZZ_FRAMES",
        "EXPERTD_SIMDE",
        "EXPERTD_TEST_LOG",
        "EXPERTD_TEST_TRITON",
        "EXPERTD_TEST_WHEELS",
    }
)
"""Read by other parts of the project than the options."""

_KUBERNETES = re.compile(
    r"EXPERTD_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes puts into every container for a Service whose name begins with expertd."""

_CLOSE, _NEAR = 0.8, 0.6
"""Likeness of two names, from 0 to 1: of a slip of the pen, and of what may have been meant."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that nothing reads and whose name is close to that of an option: a limit that
    is misspelled would be no limit."""
    for name in _unknown(environ):
        if near := _nearest(name, _CLOSE):
            raise ConfigError(f"{name}: got a variable that nothing reads, want {near}, which is the nearest")


def unread(environ: Mapping[str, str]) -> list[str]:
    """A warning for each other variable that nothing reads."""
    found = []
    for name in _unknown(environ):
        near = _nearest(name, _NEAR)
        found.append(f"{name}: nothing reads this variable" + (f"; the nearest is {near}" if near else ""))
    return found


def _unknown(environ: Mapping[str, str]) -> list[str]:
    known = KNOWN | {o.variable for o in OPTIONS}
    mine = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [name for name in mine if not _KUBERNETES.fullmatch(name)]


def _nearest(name: str, likeness: float) -> str:
    """Of the options' variables; "" = none is so near."""
    names = [o.variable.removeprefix(PREFIX) for o in OPTIONS]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=likeness)
    return PREFIX + near[0] if near else ""
