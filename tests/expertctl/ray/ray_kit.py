"""A Ray cluster of several nodes on this host, each with a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HEAD, NODES = "127.0.0.2", ("127.0.0.3", "127.0.0.4")
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False}
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 5,
}
"""A node that is gone refuses connections, and is missed after two seconds instead of fifteen; one that only answers
slowly, because the machine is busy, is not."""
LIMIT_S = 120
"""Of a node's start."""


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The cluster, and address -> node; HEAD and NODES have so many CPUs each.  This process has joined it."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets' names must be short
    environment = {
        "RAY_TMPDIR": folder,  # else Ray notes the cluster's address in /tmp/ray, which must exist and is everybody's
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing of a test is sent anywhere
        "RAY_memory_monitor_refresh_ms": "0",  # nobody is killed because the machine's other processes need memory
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_gcs_server_port_wait_time_s": str(LIMIT_S),
        "RAY_NUM_REDIS_GET_RETRIES": str(LIMIT_S),
    }
    with mock.patch.dict(os.environ, environment):
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=False, shutdown_at_exit=False)
        try:
            os.mkdir(f"{folder}/ray")  # where Ray looks under RAY_TMPDIR
            head = {"num_cpus": cpus, "node_ip_address": HEAD, "_system_config": QUICK, **SMALL}
            cluster.add_node(wait=False, **head)
            nodes = {ip: cluster.add_node(wait=False, num_cpus=cpus, node_ip_address=ip, **SMALL) for ip in NODES}
            cluster.wait_for_nodes(LIMIT_S)
            ray.init(cluster.address, _node_ip_address=HEAD, log_to_driver=False, configure_logging=False)
            yield cluster, nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            _end_what_is_left(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _end_what_is_left(folder: str) -> None:
    """Processes of a node whose start failed half-way: the cluster knows nothing of them, and they hold its ports."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
