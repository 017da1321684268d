"""Which of NIXL's packages there is: nixl-cu12 and nixl-cu13 hold the same, built for two versions of CUDA."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__ = ["NixlMissingError", "load", "missing"]

_NAMES = ("nixl_cu13", "nixl_cu12")


class NixlMissingError(ImportError):
    """NIXL is not installed, or does not load."""


def missing() -> str:
    """Why there is no NIXL; "" where there is.  Imports nothing."""
    if any(importlib.util.find_spec(name) for name in _NAMES):
        return ""
    return "nixl is not installed: pip install 'expertd[nixl]'"


def load() -> Any:
    """The module with nixl_agent.  Raises NixlMissingError."""
    why = missing()
    for name in _NAMES:
        if importlib.util.find_spec(name):
            try:
                return importlib.import_module(name)
            except (ImportError, OSError) as e:
                why = f"{name} does not load: {e}"
    raise NixlMissingError(why)
