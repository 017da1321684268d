"""The short form of session_fuzz.py."""

import importlib.util
import sys
from pathlib import Path

import pytest
from test_shm import MISSING

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("session_fuzz", Path(__file__).with_name("session_fuzz.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("machine", ["HostileClients", "HostileServer"])
def test_whatever_a_party_does_the_other_one_keeps_its_own(program, machine, seed):
    done = program.fuzz(getattr(program, machine), 3000, seed)
    assert not done.violations
    assert sum(done.steps.values()) == 3000
    assert len(done.took_s) > 50
