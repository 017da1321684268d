"""Files in Triton's cache that say what was compiled there.  Imports the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["MARK", "any_mark", "cache_folder"]

MARK = "expertd-compiled-"
"""How their names begin."""


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def any_mark() -> bool:
    """Whether any job was ever done with this cache: then this start is likely to find its own."""
    return any(cache_folder().glob(f"{MARK}*"))
