"""Regular expressions that stand in a checkpoint: matched, but not for ever.

Python's engine goes back and tries again: `(a+)+b` takes 2^n steps for n letters, and k times `.*` about n over k.
Tools write a few `.*` between names of modules.  So a repetition inside a repeated group is refused, and what could
take more than MOST_STEPS on a name; what is slow all the same has half a second for all names together.
"""

from __future__ import annotations

import math
import re
import threading
import time
from functools import lru_cache
from typing import NamedTuple

from expertd_kernels.checkpoint.errors import CheckpointError

# Why it is so: decision 98 in DECISIONS.md.
__all__ = ["matches"]

MOST_STEPS = 60_000_000
"""A third of a second: five times `.*` on a name of 90 letters."""
_MOST_LETTERS = 2000
_SLOW_S, _BUDGET_S = 0.001, 0.5
"""A match that takes longer than the first counts against the second; a usual one takes some microseconds."""

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?P=\w+\)|\(\?[aiLmsux-]*[:)]|\(\?<?[=!]|\(\?#[^)]*\)"
    r"|\{\d*,?\d*\}|.",
    re.DOTALL,
)


class _Pattern(NamedTuple):
    """repetitions: `*`, `+` and `{...}`; options: `?`."""

    compiled: re.Pattern[str]
    repetitions: int
    options: int


def matches(pattern: str, name: str, subject: str) -> bool:
    """Whether `pattern` matches from the start of a module's name.  Raises CheckpointError, which says `subject` and
    the pattern, where it is none or may cost too much."""
    p = _read(pattern, subject)
    steps = math.comb(len(name) + p.repetitions, p.repetitions) << p.options
    if steps > MOST_STEPS:
        raise CheckpointError(
            f"{subject} {pattern!r:.120}: may take {steps:.1e} steps on a name of {len(name)} letters, want at most"
            f" {MOST_STEPS:.0e}; it has {p.repetitions} repetitions and {p.options} options"
        )
    begin = time.thread_time()
    found = p.compiled.match(name) is not None
    spent = time.thread_time() - begin
    if spent > _SLOW_S:
        _pay(pattern, subject, spent)
    return found


@lru_cache(maxsize=4096)
def _read(pattern: str, subject: str) -> _Pattern:
    if len(pattern) > _MOST_LETTERS:
        raise CheckpointError(
            f"{subject} {pattern!r:.120}: is a pattern of {len(pattern)} letters, want at most {_MOST_LETTERS}"
        )
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise CheckpointError(f"{subject} {pattern!r:.120} is no regular expression: {e}") from None
    repetitions = options = 0
    inside: list[bool] = []  # of each group that is open: whether something in it is repeated, or has alternatives
    nested = quantified = False  # of the group that was closed just before; the token before was a repetition
    for token in _TOKEN.findall(pattern):
        repeats = token in ("*", "+") or (token[0] == "{" and len(token) > 2)
        if repeats and nested:
            raise CheckpointError(
                f"{subject} {pattern!r:.120}: repeats a group in which something is repeated or has alternatives, which"
                " may take for ever; want a pattern without that"
            )
        if token == "?" and not quantified:
            options += 1
        repetitions += repeats
        if inside and (repeats or token in ("|", "?")):
            inside[-1] = True
        if token[0] == "(" and token[-1] != ")":
            inside.append(False)
        nested = token == ")" and bool(inside) and inside.pop()
        if nested and inside:
            inside[-1] = True
        quantified = repeats or token == "?"
    return _Pattern(compiled, repetitions, options)


_paid: dict[str, float] = {}
_lock = threading.Lock()


def _pay(pattern: str, subject: str, spent: float) -> None:
    with _lock:
        if len(_paid) > 1000:
            _paid.clear()
        _paid[pattern] = _paid.get(pattern, 0.0) + spent
        over = _paid[pattern] > _BUDGET_S
    if over:
        raise CheckpointError(f"{subject} {pattern!r:.120}: takes too long to match; want fewer repetitions in it")
