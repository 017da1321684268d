"""The one error of this package."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read as it is.  The text names the tensor or file, what it has and what is wanted."""
