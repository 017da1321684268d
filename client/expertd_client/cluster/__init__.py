"""One layer over many servers: ExpertCluster, AsyncExpertCluster.

    table, assignment, split, join, policy    values in, values out: who holds what, who is asked for it, a batch cut
                                              by replica, sums, which replica
    member, members, sources                  the servers: what they hold, whether they may be asked, who says which
                                              there are
    fast_call, server_call, call_memory       one call, as a rule: gathered, sent, waited for and added up in C++
    flight, sub_request, routing, unserved    one call with failures, late parts, or several transports: driven by
                                              events
    call                                      the caller's tensors, and back to them
    shared, timers                            what all calls share
    cluster, async_cluster                    threads around it, or the tasks of an event loop

docs/cluster.md says how it behaves.
"""

from expertd_client.cluster.async_cluster import AsyncExpertCluster
from expertd_client.cluster.cluster import ClusterFuture, ExpertCluster
from expertd_client.cluster.kubernetes import EndpointSlices
from expertd_client.cluster.policy import OnMissing, Policy
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.sources import Dns, Fixed, PlacementFile, Source

__all__ = [
    "Answered",
    "AsyncExpertCluster",
    "ClusterFuture",
    "ClusterResult",
    "Dns",
    "EndpointSlices",
    "ExpertCluster",
    "Fixed",
    "OnMissing",
    "PlacementFile",
    "Policy",
    "Source",
]
