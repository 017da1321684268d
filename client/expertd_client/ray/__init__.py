"""Servers as actors of Ray (extra `ray`): started by `expertctl ray up`, followed by clusters with RayServers.

    spec      what is wanted: parts, replicas, resources; nothing of Ray
    watched   what is known of one server, and what becomes of it
    keeper    the actor that starts servers, starts them again, and says which there are
    server    the actor around one server
    source    the keeper's word as a cluster's list of servers
    deploy    up, status, down

docs/ray.md is for operators.
"""

from expertd_client.ray.source import RayServers

__all__ = ["RayServers"]
