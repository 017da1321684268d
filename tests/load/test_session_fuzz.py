"""The fuzz of the session protocol: ten seconds of it, and, under `make soak`, a minute or two.
`python tests/load/session_fuzz.py` takes a million steps."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
from test_shm import MISSING

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("session_fuzz", Path(__file__).with_name("session_fuzz.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.disable(logging.WARNING)
    yield module
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("party", ["HostileClients", "HostileShmServer", "HostileTcpServer"])
def test_whatever_a_party_does_the_other_one_keeps_its_own(program, party):
    figures = program.fuzz(getattr(program, party), 2500, 1)
    assert figures.steps.total() >= 2500
    assert figures.took_s
    assert set(figures.steps) == {"check", *(r.removeprefix("rule_") for r in figures.party.rules())}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("party", ["HostileClients", "HostileShmServer", "HostileTcpServer"])
def test_ten_times_as_many_steps(program, party):
    figures = program.fuzz(getattr(program, party), 25_000, 7)
    assert figures.steps.total() >= 25_000
