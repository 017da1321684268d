"""Clusters of servers in the test's own process."""

from contextlib import ExitStack

import pytest
from direct_kit import Server, Transport
from waiting import until

from expertd_client import ExpertCluster


@pytest.fixture
def start():
    """start(*holdings, kinds, **options): an ExpertCluster of servers s0, s1, ..., as .found."""
    with ExitStack() as stack:

        def make(*holdings, kinds=("shm",), **options):
            found = [Server(f"s{n}", h, kinds[n % len(kinds)]) for n, h in enumerate(holdings)]
            for server in found:
                stack.callback(server.close)
            by_name = {s.name: s for s in found}
            cluster = ExpertCluster(list(by_name), transport=lambda name: Transport(by_name[name]), **options)
            stack.callback(cluster.close)
            cluster.found = found
            until(lambda: not any(cluster.servers.values()))
            return cluster

        yield make
