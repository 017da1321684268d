"""What runs next: a pure function of the waiting requests, the time and a policy.

Requests wait in lines, one for each layer as it was held when they came and for router weights on the input: those of
one line can be computed as one batch, whichever client they came from and whatever their top_k and dtypes are (narrower
rows are padded with routes of -1).
The engine cuts a batch whenever it is free, so requests wait while it is busy, and the busier it is the larger the
batches get.  One short wait is worth its price: callers that were just answered together come back one by one.  Were
the first of them computed alone, 8 callers in a closed loop would alternate between batches of 1 and of 7 for ever.  So
for a part of the last batch's time (`patience`) the engine waits for as many requests as that batch had; whenever that
was in vain the part is halved (`trust_after`), so callers that do not come back cost next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from expertd_server.engine.request import Request

__all__ = ["Cut", "LastBatch", "Line", "Policy", "Waiting", "cut", "trust_after", "wake_at"]

_LEAST_TRUST = 1 / 16
"""What is left of the patience with callers that never come back: enough to notice when they do again."""


class Line(NamedTuple):
    """Requests that fit into one batch.  generation: ServedLayer's."""

    generation: int
    router_weight_on_input: bool


@dataclass(frozen=True)
class Policy:
    """max_tokens: of a batch (one larger request makes a batch alone).  max_wait_ns: how long a request may wait for
    company while the engine is idle; 0 = not at all.  patience: part of the last batch's time that the engine waits for
    the callers it has just answered; 0 = none."""

    max_tokens: int
    max_wait_ns: int = 0
    patience: float = 0.0


class LastBatch(NamedTuple):
    """The batch that was finished last: when, how long it took, of how many requests.  trust: from 0 to 1, part of the
    patience that its callers get."""

    end_ns: int
    service_ns: int
    requests: int
    trust: float = 1.0


class Cut(NamedTuple):
    """The first `taken` requests leave `line`: `run` are computed together, `dead` (expired or cancelled) are answered
    with an error."""

    line: Line
    taken: int
    run: tuple[Request, ...]
    dead: tuple[Request, ...]


def cut(
    lines: Mapping[Line, Sequence[Request]], now_ns: int, policy: Policy, last: LastBatch | None = None
) -> Cut | None:
    """The batch to run now: from the line whose first request came first, in order of arrival, as many as fit.  None
    when nothing waits, or nothing has waited long enough.  Empty lines are not allowed.

    Fair: a request is overtaken only by requests of a line whose head came before it, so it waits for at most as many
    batches as there are older requests.
    """
    order = sorted(lines, key=lambda line: lines[line][0].arrival_ns) if len(lines) > 1 else lines
    company_ns = _company_until(lines, policy, last)
    for line in order:
        run: list[Request] = []
        dead: list[Request] = []
        taken = tokens = 0
        full = False
        for r in lines[line]:
            if r.cancelled or r.expired(now_ns):
                dead.append(r)
            elif run and tokens + r.tokens > policy.max_tokens:
                full = True
                break
            else:
                run.append(r)
                tokens += r.tokens
            taken += 1
        full = full or tokens >= policy.max_tokens
        if full or not run or now_ns >= max(run[0].arrival_ns + policy.max_wait_ns, company_ns):
            return Cut(line, taken, tuple(run), tuple(dead))
    return None


def wake_at(lines: Mapping[Line, Sequence[Request]], policy: Policy, last: LastBatch | None = None) -> int | None:
    """When `cut` will next have something although nothing else happens, in ns; None = never."""
    heads = [q[0].arrival_ns for q in lines.values()]
    if not heads:
        return None
    return max(min(heads) + policy.max_wait_ns, _company_until(lines, policy, last))


def _company_until(lines: Mapping[Line, Sequence[Request]], policy: Policy, last: LastBatch | None) -> int:
    """Until when the callers of the last batch are waited for, in ns; 0 = they are back."""
    if last is None or sum(map(len, lines.values())) >= last.requests:
        return 0
    return last.end_ns + int(policy.patience * last.trust * last.service_ns)


def trust_after(trust: float, came: int, expected: int) -> float:
    """The trust after a wait for `expected` requests of which `came`: doubled if all did, halved if not."""
    return min(1.0, 2 * trust) if came >= expected else max(_LEAST_TRUST, trust / 2)


class Waiting:
    """The lines and their totals.  Not thread-safe: the engine holds its lock around each call.

    tokens, requests: all that stand in a line, cancelled ones included until they are cut or swept.
    """

    def __init__(self) -> None:
        self.lines: dict[Line, deque[Request]] = {}
        self.tokens = 0
        self.requests = 0

    def push(self, r: Request) -> None:
        line = Line(r.layer.generation, r.router_weight_on_input)
        q = self.lines.get(line)
        if q is None:
            q = self.lines[line] = deque()
        q.append(r)
        self.tokens += r.tokens
        self.requests += 1

    def remove(self, c: Cut) -> None:
        """Take out what `cut` chose."""
        q = self.lines[c.line]
        for r in islice(q, c.taken):
            self.tokens -= r.tokens
        self.requests -= c.taken
        if c.taken == len(q):
            del self.lines[c.line]
        else:
            for _ in range(c.taken):
                q.popleft()

    def sweep(self, now_ns: int) -> list[Request]:
        """Take out every cancelled and expired request, to be answered."""
        dead: list[Request] = []
        for line, q in list(self.lines.items()):
            alive: deque[Request] = deque()
            for r in q:
                if r.cancelled or r.expired(now_ns):
                    self.tokens -= r.tokens
                    self.requests -= 1
                    dead.append(r)
                else:
                    alive.append(r)
            if alive:
                self.lines[line] = alive
            else:
                del self.lines[line]
        return dead

    def clear(self) -> list[Request]:
        """Take out everything."""
        out = [r for q in self.lines.values() for r in q]
        self.lines.clear()
        self.tokens = self.requests = 0
        return out
