"""Progress of loading: a bar on a terminal, a line for each layer elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich import progress as rich_progress
from rich.console import Console

from expertd_server.boot.ahead import bound_text
from expertd_server.boot.layers import Booted
from expertd_server.boot.prepare import Workshop

__all__ = ["Progress"]


class Progress:
    """with Progress(console, layers, workshop, say) as p: ... p.done(booted) after each layer; workshop: its stages are
    summed up at the end; say: tells a line, with facts by name."""

    def __init__(self, console: Console, layers: int, workshop: Workshop, say: Callable[..., None]) -> None:
        self._layers, self._count, self._workshop, self._say = layers, 0, workshop, say
        self._bar: rich_progress.Progress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("loading"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("{task.description}"),
                rich_progress.TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._layers)
        return self

    def done(self, b: Booted) -> None:
        self._count += 1
        text = (
            f"layer {b.served.layer} on {b.served.backend}: self-check error {b.error:.1e}"
            f" (tolerance {b.tolerance:.0e}), {'mapped from the cache, ' if b.from_cache else ''}{b.seconds:.2f} s"
        )
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
        else:
            facts = {"layer": b.served.layer, "backend": b.served.backend, "error": b.error, "seconds": b.seconds}
            self._say(f"[{self._count}/{self._layers}] {text}", **facts)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            stages = ", ".join(f"{name.replace('_', '-')} {s:.2f}" for name, s in self._workshop.seconds.items())
            took = time.perf_counter() - self._start
            self._say(f"loaded {self._count} layers in {took:.2f} s ({stages})", layers=self._count, seconds=took)
            w = self._workshop
            if "load" in w.seconds:
                read = int(getattr(w.source, "bytes_read", 0))
                self._say(bound_text(read, w.reading["seconds"], int(w.reading["fetched"]), w.seconds))
            if self._workshop.lookups:
                found = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self._workshop.lookups.items()))
                self._say(f"cache: {found}")
