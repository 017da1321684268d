"""An engine of each kind, on each device that is here."""

from __future__ import annotations

import pytest
from core_library import needs_core
from setup_kit import DEVICES, Setup


@pytest.fixture(params=["python", pytest.param("native", marks=needs_core)])
def kind(request):
    """Of the engine: in Python, or around the core in C++."""
    return request.param


@pytest.fixture(params=DEVICES)
def make(request, kind):
    made: list[Setup] = []

    def make(**engine) -> Setup:
        made.append(Setup(kind, request.param, **engine))
        return made[-1]

    yield make
    for s in made:
        s.fake.gate.set()
        s.engine.stop(10)
        assert not s.engine._thread.is_alive()
