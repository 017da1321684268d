"""A Ray cluster of several nodes on this host, each with a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

HEAD, NODES = "127.0.0.2", ("127.0.0.3", "127.0.0.4")
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is missed after two seconds instead of fifteen."""


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The cluster, and address -> node; HEAD and NODES have so many CPUs each.  This process has joined it."""
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",  # nothing of a test is sent anywhere
        RAY_memory_monitor_refresh_ms="0",  # nobody is killed because the machine's other processes need memory
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_enable_metrics_collection="0",
    )
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets' names must be short
    head = {"num_cpus": cpus, "node_ip_address": HEAD, "temp_dir": folder, "_system_config": QUICK, **SMALL}
    cluster = Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=head)
    try:
        nodes = {ip: cluster.add_node(num_cpus=cpus, node_ip_address=ip, **SMALL) for ip in NODES}
        ray.init(cluster.address, _node_ip_address=HEAD, log_to_driver=False, configure_logging=False)
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
