"""Which engine serves: the core in C++ where it is built and can drive the device, else the one in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from expertd_server.engine.core import CoreMissingError
from expertd_server.engine.engine import Engine
from expertd_server.engine.native import NativeEngine
from expertd_server.engine.report import RequestReport

__all__ = ["AnyEngine", "make_engine"]

AnyEngine = Engine | NativeEngine


def make_engine(
    device: torch.device,
    *,
    answered: Callable[[str, int], None] | None = None,
    traced: Callable[[RequestReport], None] | None = None,
    **options: Any,
) -> tuple[AnyEngine, str]:
    """(engine, why it is not the native one, "" = it is).

    options   those of Engine
    answered  told of requests that no transport saw answered: the reason ("" = computed) and their number
    traced    told of those of them that their callers trace
    """
    why = _why_not(device)
    if not why:
        try:
            return NativeEngine(device, answered=answered, traced=traced, **options), ""
        except CoreMissingError as e:
            why = str(e)
    return Engine(device, **options), why


def _why_not(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    try:
        from expertd_server.engine.device import supported
    except ImportError as e:  # no triton
        return f"the core needs Triton to launch batches on {device}: {e}"
    return supported(device)
