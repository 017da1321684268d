"""One layer over many servers: ExpertCluster, AsyncExpertCluster.

    table, split, join, policy    values in, values out: who holds what, a batch cut by holder, sums, which replica
    member, members, sources      the servers: what they hold, whether they may be asked, who says which there are
    flight, place, call           one call: its parts under way, where they go, the caller's tensors and back to them
    surroundings, timers          what all calls share
    cluster, async_cluster        threads around it, or the tasks of an event loop

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
