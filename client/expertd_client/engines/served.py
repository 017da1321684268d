"""Who computes a model's experts, and whether they fit it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from expertd.errors import DeadlineExceededError, ExpertdError, PlacementError, UnavailableError
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
_WHY_S = 1.0
"""How long a server that did not come up is asked once more, for the reason."""


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
    """Most tokens of a request to servers that fit the model; a cluster cuts by its servers' limits.  Waits until every
    expert of the layers has a server, for up to `timeout_s`.

    Raises PlacementError where a server's layers, experts or sizes are not the model's, UnavailableError with the
    servers that do not answer, and why.  Another kind of forwarder is believed."""
    found = list(found)
    if isinstance(forwarder, ExpertCluster):
        _wait_for_cluster(found, forwarder, timeout_s)
    if not isinstance(forwarder, ExpertClient):
        return DEFAULT_MAX_TOKENS
    described = _described(forwarder, timeout_s)
    misfits(found, described, forwarder.target)
    return described.limits.max_tokens or DEFAULT_MAX_TOKENS


def _described(client: ExpertClient, timeout_s: float) -> pb.DescribeResponse:
    try:
        return client.describe(wait_for_ready=True, timeout_s=timeout_s)
    except DeadlineExceededError:
        pass
    try:
        return client.describe(timeout_s=_WHY_S)  # now without waiting: it says why
    except ExpertdError as error:
        why = error.message.removeprefix(f"{client.target}: ")
        raise UnavailableError(f"{client.target}: no answer within {timeout_s:g} s: {why}") from error


def _wait_for_cluster(found: Sequence[Found], cluster: ExpertCluster, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    _compare_all(found, cluster, timeout_s)  # those that have answered, before others are waited for
    cluster.wait_for_layers([one.layer for one in found], timeout_s=max(0.0, end_s - time.monotonic()))
    _compare_all(found, cluster, 0.0)


def _compare_all(found: Sequence[Found], cluster: ExpertCluster, timeout_s: float) -> None:
    """But those that the cluster does not ask: their sums are never added."""
    described, refused = cluster.describe(timeout_s=timeout_s), cluster.servers
    for address, answer in described.items():
        if not refused.get(address, "it left"):
            misfits(found, answer, address, whole=False)


def misfits(found: Iterable[Found], described: pb.DescribeResponse, target: str, whole: bool = True) -> None:
    """Raises PlacementError where a server cannot be the experts of this model: what it says against what they are.
    whole: it must hold all of them; else it may hold some, of some layers."""
    served: Mapping[int, pb.Layer] = {layer.layer: layer for layer in described.layers}
    for one in found:
        layer = served.get(one.layer)
        if layer is None and not whole:
            continue
        if layer is None:
            got = f"a server of layers {', '.join(map(str, served)) or 'none'}"
            raise PlacementError.about(f"{target}: layer {one.layer}", got=got, want=f"the experts of {one.name}")
        held = sum(span.count for span in layer.held)
        theirs = (layer.num_experts, described.model.hidden_size, layer.intermediate_size)
        ours = (one.experts, one.hidden_size, one.intermediate_size)
        if theirs != ours or (whole and held != one.experts):
            raise PlacementError.about(
                f"{target}: layer {one.layer}",
                got="{} experts ({} held), hidden size {}, intermediate size {}".format(theirs[0], held, *theirs[1:]),
                want="{} experts{}, hidden size {}, intermediate size {} as in {}".format(
                    ours[0], ", all held" if whole else "", *ours[1:], one.name
                ),
                remedy="name the servers of this model, together all of its experts" if theirs == ours else "",
            )
