"""One layer's experts as one rank of an engine calls them.

Ranks of a tensor-parallel group hold the same tokens and add their outputs up afterwards.  So each sends its share of
the tokens, every token is sent by one rank alone, and the rows of the others are zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.served import Found
from expertd_client.engines.settings import Connection, connection_to, settings_of
from expertd_client.engines.torch_experts import RemoteExperts
from expertd_client.requests.step_version import StepVersion

__all__ = ["RankExperts", "share"]


def share(topk_ids: Tensor, padding: Tensor | None = None, rank: int = 0, ranks: int = 1) -> Tensor:
    """The routes that this rank sends, [M, top_k]; those of padding and of other ranks' tokens become nobody's, -1.

    padding   [M] bool, True = no token
    rank      of `ranks` that hold the same tokens.  Token t is of rank t % ranks, so that shares are equal also where
              the last rows are padding
    """
    if ranks > 1:
        mine = torch.arange(len(topk_ids), device=topk_ids.device) % ranks == rank
        padding = ~mine if padding is None else padding | ~mine
    return topk_ids if padding is None else topk_ids.masked_fill(padding[:, None], -1)


class RankExperts:
    """The routed experts of one layer, of one rank.  No module: it has no parameters, and nothing shall move it.

    Adapters of engines make it by from_environment().  remote: what it calls, a RemoteExperts.
    """

    def __init__(
        self,
        connection: Connection,
        found: Found,
        rank: int = 0,
        ranks: int = 1,
        *,
        timeout_s: float | None = None,
        weights_version: int | StepVersion = 0,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.remote = RemoteExperts(
            connection.forwarder,
            found.layer,
            max_tokens=connection.max_tokens(found),
            timeout_s=timeout_s,
        ).eval()
        self.weights_version = weights_version

    @classmethod
    def from_environment(
        cls,
        name: str,
        layer: int,
        *,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        rank: int = 0,
        ranks: int = 1,
        given: object = None,
        timeout_s: float | None = None,
        weights_version: int | StepVersion = 0,
    ) -> RankExperts:
        """The experts of a model's layer at the servers that the user names.  All layers of a process share one
        connection.  Waits until every expert of the layer has a server that takes requests, for start_timeout_s.

        name         of the module in the model, for errors
        layer        its index; experts: how many it has in all; sizes: of each
        rank, ranks  of those that hold the same tokens and whose outputs are added up afterwards
        given        what the engine's configuration says: an address, a list of them, a mapping with "address" and
                     options; None = EXPERTD_ADDRESS and EXPERTD_CLIENT say it
        timeout_s    of each call; None = that of the options, 60 where they name none
        weights_version   as the property

        Raises UnsupportedCombinationError where nothing names a server or an option is wrong, PlacementError where the
        layer of a server is not this one, or servers that all answer lack experts of it, UnavailableError where
        start_timeout_s is over: it names the servers that do not take requests, and why."""
        settings = settings_of(given, os.environ)
        if settings is None:
            raise UnsupportedCombinationError.about(
                f"{name}: servers",
                got="none in EXPERTD_ADDRESS",
                want="HOST:PORT, several of them, or a placement.json",
            )
        found = Found(name, layer, experts, hidden_size, intermediate_size)
        connection = connection_to(settings)
        return cls(connection, found, rank, ranks, timeout_s=timeout_s, weights_version=weights_version)

    @property
    def weights_version(self) -> int | StepVersion:
        """Of the weights that calls ask for from now on; 0 = whichever is served; a StepVersion, which all layers of a
        model share = the one of the step.  May be set between calls.  Raises UnsupportedCombinationError for a
        StepVersion without `agree` of several ranks."""
        return self.remote.weights_version

    @weights_version.setter
    def weights_version(self, version: int | StepVersion) -> None:
        if self.ranks > 1 and isinstance(version, StepVersion) and version.agree is None:
            raise UnsupportedCombinationError.about(
                f"layer {self.remote.layer}: weights_version",
                got=f"a StepVersion of one rank, of {self.ranks} whose outputs are added up",
                want="StepVersion(agree=...), by which they take the same version",
            )
        self.remote.weights_version = version

    @property
    def weights_version_seen(self) -> int:
        """As RemoteExperts.weights_version_seen."""
        return self.remote.weights_version_seen

    def check(self, device: int | None = None) -> None:
        """As RemoteExperts.check: raises what replays of captured calls met.  Synchronize first."""
        self.remote.check(device)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        padding: Tensor | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """The sum over the routes of this rank's tokens, [M, H]; zeros for the others.

        meanwhile: called once while the experts are under way"""
        ids = share(topk_ids, padding, self.rank, self.ranks)
        if meanwhile is None:
            answer: Tensor = self.remote(hidden_states, ids, topk_weights)
            return answer
        started = self.remote.start(hidden_states, ids, topk_weights)
        meanwhile()
        return self.remote.wait(started)
