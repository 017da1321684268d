"""One server's client, or several servers' cluster: what ADDRESS... of a command stands for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from expertctl.commands.options import credentials

__all__ = ["connected", "for_one_server"]

_T = TypeVar("_T")


def connected(
    args: argparse.Namespace, servers: Sequence[str], client: Callable[..., _T], cluster: Callable[..., _T], **more: Any
) -> _T:
    """client or cluster, as they are called with the options of add_common() and add_routing().  more: for either.
    Raises ValueError for --unary with several servers."""
    common = {"timeout_s": args.timeout, "credentials": credentials(args), "wire_dtype": args.wire_dtype, **more}
    if len(servers) == 1:
        return client(servers[0], unary=args.unary, **common)
    if args.unary:
        raise for_one_server("--unary", servers, "a cluster keeps a stream to each")
    return cluster(servers, **common)


def for_one_server(flag: str, servers: Sequence[str], why: str) -> ValueError:
    """The refusal of an option that one server alone can be asked with."""
    return ValueError(f"{flag}: got {len(servers)} servers with it, want one: {why}")
