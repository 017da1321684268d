"""Fuzzer of the session protocol: a state machine (hypothesis) in which a hostile party may at any step do any of stop,
block, fill, truncate, rewrite, close, lie about lengths.  The other one keeps its deadline, its memory and its other
sessions.

    python tests/load/session_fuzz.py --steps 1000000 --seed 1 [--seconds 1200]

prints the steps by rule and how long honest requests took.  What does not hold ends it with the steps that led there.

    HostileClients      before a real engine and its listeners: sessions in shared memory and over TCP, entered and not
    HostileShmServer    before a real client in shared memory
    HostileTcpServer    before a real client over TCP

Each example of hypothesis is a new server with its sessions, or a new client; between hostile steps honest ones go on.
A rule that hypothesis draws is a burst: its step, then up to 15 of a few rules that its number chooses.  So a step
costs little, and a failure shrinks to numbers without further steps.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).with_name("parties")))

from fuzzed import Fuzzed
from hostile_clients import HostileClients
from hostile_servers import HostileShmServer, HostileTcpServer

__all__ = ["PARTIES", "Figures", "fuzz"]

PARTIES: tuple[type[Fuzzed], ...] = (HostileClients, HostileShmServer, HostileTcpServer)
RULES = 100
"""That hypothesis draws for an example."""
BURST = 16
"""Most steps of one of them."""
_EXAMPLES = 20
"""Of a run of hypothesis, which remembers what it did."""
_STUCK_S = 900
"""Without an example's end: every thread is shown, and the process ends."""


class Figures:
    """Of all examples of a party."""

    def __init__(self, party: type[Fuzzed]) -> None:
        self.party, self.examples = party, 0
        self._begun_s = time.process_time()
        self.steps: Counter[str] = Counter()
        self.took_s: list[float] = []

    def add(self, done: Fuzzed) -> None:
        self.examples += 1
        self.steps += done.steps
        self.took_s += done.took_s

    def __iter__(self) -> Iterator[str]:
        times = sorted(self.took_s)
        p50, p99 = times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3
        cpu_s = time.process_time() - self._begun_s
        yield f"{self.party.__name__}: {self.steps.total()} steps in {self.examples} examples, {cpu_s:.0f} s of a core"
        yield f"  {len(times)} honest requests: p50 {p50:.2f} ms, p99 {p99:.2f}, slowest {times[-1] * 1e3:.1f}"
        yield "  " + ", ".join(f"{name} {n}" for name, n in sorted(self.steps.items()))


def burst(party: type[Fuzzed], name: str, number: int) -> Iterator[tuple[str, int]]:
    """(rule, number) of the steps that a drawn rule stands for."""
    yield name, number
    rng = random.Random(number)
    few = rng.sample(party.rules(), 3)
    for _ in range(number % BURST):
        yield rng.choice(few), rng.randrange(2**32)


def machine_of(party: type[Fuzzed], figures: Figures) -> type[RuleBasedStateMachine]:
    """Its rules are the party's, and `check`: what always holds."""

    class Session(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            faulthandler.dump_traceback_later(_STUCK_S, exit=True)
            self.fuzzed = party()

        def teardown(self) -> None:
            self.fuzzed.close()
            faulthandler.cancel_dump_traceback_later()
            figures.add(self.fuzzed)

        @rule()
        def check(self) -> None:
            self.fuzzed.steps["check"] += 1
            self.fuzzed.check()

    def step_of(name: str):
        def step(self, number: int) -> None:
            for each, its_number in burst(party, name, number):
                note(f"{each} {its_number}")
                self.fuzzed.step(each, its_number)

        step.__name__ = name.removeprefix("rule_")
        return rule(number=st.integers(0, 2**32 - 1))(step)

    for name in party.rules():
        setattr(Session, name, step_of(name))
    return Session


def fuzz(party: type[Fuzzed], steps: int, number: int, seconds: float = float("inf")) -> Figures:
    """So many steps at least, or as many as fit into so many seconds.  number: a seed.  Raises AssertionError for what
    does not hold."""
    until_s = time.monotonic() + seconds
    figures = Figures(party)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    while figures.steps.total() < steps and time.monotonic() < until_s:
        examples = min(_EXAMPLES, 1 + (steps - figures.steps.total()) // (RULES * BURST // 2))
        how = settings(
            max_examples=examples,
            stateful_step_count=RULES,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        number += 1
        run_state_machine_as_test(seed(number)(machine_of(party, figures)), settings=how)
    gc.collect()
    end_s = time.monotonic() + 20  # what the last machine started may end a moment after it
    while (left := len(os.listdir("/proc/self/fd")) - before) > 0 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert left <= 0, f"{left} descriptors are left"
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all parties together")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more steps begin")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each wrong token
    for party in PARTIES:
        figures = fuzz(party, -(-args.steps // len(PARTIES)), args.seed, args.seconds / len(PARTIES))
        print("\n".join(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
