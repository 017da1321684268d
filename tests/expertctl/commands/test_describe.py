"""expertctl describe: what it says for people."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from expertctl.commands.describe import show
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.session import Session


@pytest.mark.parametrize(("told", "said"), [("0.0.0.0:50052", "node-3:50052"), ("10.0.0.5:50052", "10.0.0.5:50052")])
def test_the_admin_address_is_one_that_can_be_called_from_here(told, said):
    out = Console(file=StringIO(), width=100)
    show(out, "node-3:50051", pb.DescribeResponse(admin_address=told), Session())
    assert f"experts and weights can be changed at {said}\n" in "".join(
        line.rstrip() + "\n" for line in out.file.getvalue().splitlines()
    )
