"""Who computes a model's experts, and whether they fit it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from expertd.errors import PlacementError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.clients.forwarder import Forwarder
from expertd_client.cluster import ExpertCluster, Source

__all__ = ["DEFAULT_MAX_TOKENS", "Found", "Servers", "forwarder_to", "max_tokens_of", "misfits"]

Servers: TypeAlias = "str | Sequence[str] | Placement | Source | Forwarder"
"""What computes a model's experts: the address of one server that holds them all, addresses or a placement of several,
or a forwarder, which stays the caller's."""
DEFAULT_MAX_TOKENS = 4096
"""Of a request, where nobody is asked: a server's own default."""


@dataclass(frozen=True)
class Found:
    """A layer's routed experts in a model.  name: of the module; layer: its index; experts and sizes: its own."""

    name: str
    layer: int
    experts: int
    hidden_size: int
    intermediate_size: int


def forwarder_to(servers: Servers) -> Forwarder:
    """Whatever forwards to them; `servers` itself where it does."""
    if isinstance(servers, Forwarder):
        return servers
    return ExpertClient(servers) if isinstance(servers, str) else ExpertCluster(servers)


def max_tokens_of(found: Iterable[Found], forwarder: Forwarder, timeout_s: float = 10.0) -> int:
    """Most tokens of a request.  A single server is asked what it holds, for up to `timeout_s`, and must fit; a cluster
    knows who holds what, cuts by its servers' limits, and refuses calls for experts that nobody holds."""
    if not isinstance(forwarder, ExpertClient):
        return DEFAULT_MAX_TOKENS
    described = forwarder.describe(wait_for_ready=True, timeout_s=timeout_s)
    misfits(found, described, forwarder.target)
    return described.limits.max_tokens or DEFAULT_MAX_TOKENS


def misfits(found: Iterable[Found], described: pb.DescribeResponse, target: str) -> None:
    """Raises PlacementError where a server cannot be the experts of this model: what it says against what they are."""
    served: Mapping[int, pb.Layer] = {layer.layer: layer for layer in described.layers}
    for one in found:
        layer = served.get(one.layer)
        if layer is None:
            got = f"a server of layers {', '.join(map(str, served)) or 'none'}"
            raise PlacementError.about(f"{target}: layer {one.layer}", got=got, want=f"the experts of {one.name}")
        held = sum(span.count for span in layer.held)
        theirs = (layer.num_experts, described.model.hidden_size, layer.intermediate_size)
        ours = (one.experts, one.hidden_size, one.intermediate_size)
        if theirs != ours or held != one.experts:
            raise PlacementError.about(
                f"{target}: layer {one.layer}",
                got="{} experts ({} held), hidden size {}, intermediate size {}".format(theirs[0], held, *theirs[1:]),
                want="{} experts, all held, hidden size {}, intermediate size {} as in {}".format(*ours, one.name),
                remedy="name the servers of this model, together all of its experts" if theirs == ours else "",
            )
