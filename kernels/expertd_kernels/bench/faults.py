"""What a benchmark's own process reports."""

from __future__ import annotations

__all__ = ["WorkerError"]


class WorkerError(RuntimeError):
    """What a process could not do, or that it ended; the text names it."""
