"""Numbers that plans follow, measured on one GPU: data in files beside the tuned plans, for GPUs of any size.  Pure:
imports no torch and no triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["numbers"]


def numbers(file: Path, multiprocessors: int | None) -> dict[str, Any]:
    """By name, with `multiprocessors` itself.

    The file names the GPU that its numbers were measured on.  `counts` of what runs side by side (CTAs, tiles, warps)
    are turned into those of a GPU with `multiprocessors` of them (None: the one of the file), `limits` are the same
    everywhere.
    """
    found = json.loads(file.read_text())
    here: int = multiprocessors or found["multiprocessors"]
    counts = {name: n * here / found["multiprocessors"] for name, n in found["counts"].items()}
    return {**counts, **found["limits"], "multiprocessors": here}
