"""How a run stands, on a terminal, while it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from expertctl.load.generator import LoadRun, Now
from expertd.common.tables import duration

__all__ = ["line", "stoppable", "watched"]

_EVERY_S = 0.25


@contextlib.asynccontextmanager
async def watched(run: LoadRun, what: str, screen: Console | None = None) -> AsyncIterator[None]:
    """Shows the run on standard error while the body waits for it, where that is a terminal; nothing stays of it."""
    out = screen or Console(stderr=True, highlight=False)
    if not out.is_terminal:
        yield
        return
    with Live(console=out, auto_refresh=False, transient=True) as live:
        task = asyncio.create_task(_show(run, what, live))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _show(run: LoadRun, what: str, live: Live) -> None:
    before = Now()
    while True:
        now = run.now
        live.update(Text(line(what, before, now, run.plan.duration_s), overflow="ellipsis", no_wrap=True), refresh=True)
        before = now
        await asyncio.sleep(_EVERY_S)


def line(what: str, before: Now, now: Now, duration_s: float | None) -> str:
    """At most 80 characters for a `what` of 20."""
    took = now.elapsed_s - before.elapsed_s
    rate = (now.answered - before.answered) / took if took > 0 else 0.0
    whole = f"/{duration_s:.3g}" if duration_s else ""
    parts = [what, f"{now.elapsed_s:.0f}{whole} s", f"{now.answered:,} ok", f"{rate:,.0f}/s"]
    if now.since_last.count:
        parts.append(f"p50 {duration(now.since_last.p50_s)} p99 {duration(now.since_last.p99_s)}")
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    return "  ".join([*parts, f"{now.in_flight} open"])


@contextlib.contextmanager
def stoppable(stop: Callable[[], object], again: Callable[[], object] | None = None) -> Iterator[None]:
    """While the body runs, in an event loop, Ctrl-C calls stop() the first time.  Each time after that it is itself, or
    calls again() where there is one; then SIGTERM does as Ctrl-C."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT,) if again is None else (signal.SIGINT, signal.SIGTERM)

    def first() -> None:
        for number in signals:
            if again is None:
                loop.remove_signal_handler(number)
            else:
                loop.add_signal_handler(number, again)
        print("\nstopping; again to leave at once", file=sys.stderr)
        stop()

    try:
        for number in signals:
            loop.add_signal_handler(number, first)
    except (ValueError, NotImplementedError):  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
