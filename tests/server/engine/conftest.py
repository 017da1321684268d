"""An engine with each executor, on each device that is here."""

from __future__ import annotations

import pytest
from setup_kit import DEVICES, Setup


@pytest.fixture(params=DEVICES)
def make(request):
    made: list[Setup] = []

    def make(**engine) -> Setup:
        made.append(Setup(request.param, **engine))
        return made[-1]

    yield make
    for s in made:
        s.fake.gate.set()
        s.engine.stop(10)
        assert not s.engine._thread.is_alive()
