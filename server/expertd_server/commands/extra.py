"""What the `server` extra installs, and which of it is not here: a sentence instead of a traceback.  Standard library
only."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping

__all__ = ["SERVER", "complaint"]

SERVER: Mapping[str, str] = {
    "torch": "torch>=2.6",
    "packaging": "packaging>=23",
    "prometheus_client": "prometheus-client>=0.20",
    "cachetools": "cachetools>=5.5",
    **({"tomli": "tomli>=2"} if sys.version_info < (3, 11) else {}),
}
"""Module -> requirement, as pyproject.toml has them."""


def complaint() -> str:
    """What `expertd` lacks here and the command that installs it; "" where nothing is missing."""
    missing = [module for module in SERVER if not _there(module)]
    if not missing:
        return ""
    wanted = " ".join(shlex.quote(SERVER[module]) for module in missing)
    return (
        f"{', '.join(missing)}: not installed, and a server needs {'them' if len(missing) > 1 else 'it'}"
        f" (the extra `server` has all that it needs): pip install {wanted}"
    )


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
