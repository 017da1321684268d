"""Looks for races between a kill, a hedge, a hang and the end of a connection: the real code of ExpertCluster, Flight,
Member, Exchange, Link and the session in shared memory, on virtual threads that are switched at random statements.

    python tests/faults/races --seconds 600          # on one core; each schedule has a seed
    python tests/faults/races --seed 1234            # that schedule alone, with its timeline
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import weave
from planted import PLANTED

CLUSTER = (
    *("call", "cluster", "fast_call", "flight", "member", "members", "policy", "routing"),
    *("server_call", "shared", "sub_request", "timers", "unserved"),
)
WOVEN = (
    *(f"expertd_client.cluster.{name}" for name in CLUSTER),
    *(f"expertd_client.transports.{name}" for name in ("core_connection", "core_transport")),
    *(f"expertd_client.{name}" for name in ("requests.deadline", "exchange.exchange", "exchange.link")),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--schedules", type=int, help="as many, however long they take, instead of --seconds")
    parser.add_argument("--plant", choices=PLANTED, help="a fault that is to be found")
    parser.add_argument("--rounds", type=int, default=12, help="of calls under each schedule (12)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule (0)")
    parser.add_argument("--seed", type=int, help="this schedule alone")
    parser.add_argument("--most", type=int, default=5, help="failures after which it ends (5)")
    args = parser.parse_args()
    weave.weave(WOVEN, PLANTED.get(args.plant, {}))
    import scene

    scene.prepare()
    gc.disable()
    begin_s = time.monotonic()
    schedules = calls = kills = points = switches = wrong = 0
    seeds = iter(range(args.first, 1 << 60)) if args.seed is None else iter([args.seed])
    for seed in seeds:
        found = scene.explore(seed, args.rounds)
        schedules, calls, kills = schedules + 1, calls + found.calls, kills + found.kills
        points, switches = points + found.points, switches + found.switches
        if found.wrong:
            wrong += 1
            _show(found, 400 if args.seed is not None else 25)
        if schedules % 50 == 0:
            gc.collect()
        over = time.monotonic() - begin_s > args.seconds if args.schedules is None else schedules >= args.schedules
        if over or wrong >= args.most:
            break
    took_s = time.monotonic() - begin_s
    print(
        f"{schedules:,} schedules, {kills:,} kills, {calls:,} calls, {switches:,} switches ({switches / took_s:,.0f} a"
        f" second) at {points:,} points in {took_s:.0f} s: {wrong} failed"
    )
    return 1 if wrong else 0


def _show(found: object, lines: int) -> None:
    """What went wrong, and what happened before."""
    print(f"seed {found.seed}:")  # type: ignore[attr-defined]
    for what in found.wrong[:5]:  # type: ignore[attr-defined]
        print(f"    {what}")
    for at_s, thread, what in list(found.log)[-lines:]:  # type: ignore[attr-defined]
        print(f"    {at_s * 1e3:12.4f} ms  {thread:28} {what.rpartition('expertd_client/')[2]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
