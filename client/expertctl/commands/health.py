"""`expertctl health`: whether a server takes requests, by gRPC's own health service.

For health checks of containers, and for scripts that wait for a server."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expertctl.commands.options import ADDRESS, add_credentials, credentials
from expertctl.common.counts import duration_s
from expertd_client.transports.address import reach
from expertd_client.transports.grpc.common import HEALTH, call_failed, channel_options

__all__ = ["add_parser", "run", "wait_for"]

SERVING = "SERVING"
_PAUSE_S = 0.2


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "health",
        help=text,
        description="Checks whether a server accepts requests.  Exit code 0: SERVING; 1: anything else.",
    )
    parser.add_argument("address", metavar="ADDRESS", help=ADDRESS)
    add_credentials(parser)
    parser.add_argument("--timeout", type=duration_s, default=5.0, metavar="TIME", help="for each query (default: 5s)")
    parser.add_argument(
        "--wait",
        type=_wait_s,
        default=0.0,
        metavar="TIME",
        help="how long to keep asking until it is SERVING, for example 60 (seconds) or 2m (default: 0)",
    )


def _wait_s(text: str) -> float:
    """As duration_s, or 0."""
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else duration_s(text)


def run(args: argparse.Namespace) -> int:
    address, shown = reach(args.address, credentials(args))
    secure, options = shown.channel(), channel_options(shown.options())
    with (
        grpc.insecure_channel(address, options) if secure is None else grpc.secure_channel(address, secure, options)
    ) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        status = wait_for(lambda: _status(check, address, args.timeout), args.wait)
    print(status)
    return 0 if status == SERVING else 1


def wait_for(
    ask: Callable[[], str],
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """The last answer of ask(): SERVING, or what it was when wait_s were over."""
    end_s = clock() + wait_s
    while (status := ask()) != SERVING and clock() < end_s:
        sleep(_PAUSE_S)
    return status


def _status(check: Callable[..., Any], target: str, timeout_s: float) -> str:
    """The name of the server's status, or why there is none."""
    try:
        answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=False)
    except grpc.RpcError as error:
        row = call_failed(error, target, HEALTH)
        return f"{row.reason}: {row.message}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
