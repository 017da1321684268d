"""The short form of tests/load/fuzz.py: some thousand messages that nobody sends, and controls between them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from expertd_server.config import Address, ServeConfig
from expertd_server.host import Host


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz_server", Path(__file__).parent / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module.fuzz


@pytest.mark.timeout(120)
def test_messages_that_nobody_sends_leave_the_server_as_it_was(fuzz):
    host = Host(ServeConfig(synthetic="tiny:int4_g128", device="cpu", threads=1, listen=Address("127.0.0.1", 0)))
    host.start()
    try:
        host.ready(60)
        said, controls = fuzz(host.address, stream=3000, unary=300, seed=7)
        assert controls.wrong == 0, said
        assert controls.count == 12
        assert {"forward", "MALFORMED_MESSAGE", "BAD_SHAPE", "unary OK", "unary MALFORMED_MESSAGE"} <= said.keys()
        assert host.drain(10), "nothing of it is left in flight"
    finally:
        host.close()
