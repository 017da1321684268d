"""What all clients and clusters have in common: a call becomes a Request, which is checked before it is sent."""

from __future__ import annotations

import inspect

import pytest
import torch
from cluster_kit import E, Fake, H, Looped, transports

import expertd_client
from expertd.errors import UnsupportedCombinationError
from expertd_client import FunctionTransport


def client_of(kind, server):
    """A client, or a cluster, of the class with that name, of a server that is a function."""
    made = transports({"a": server}, Looped if kind.startswith("Async") else FunctionTransport)
    if kind.endswith("Cluster"):
        return getattr(expertd_client, kind)(["a"], transport=made, timeout_s=10.0)
    return getattr(expertd_client, kind)(made("a"), timeout_s=10.0)


async def done(value):
    return await value if inspect.isawaitable(value) else value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["ExpertClient", "AsyncExpertClient", "ExpertCluster", "AsyncExpertCluster"])
async def test_inputs_that_require_gradients_are_refused(kind):
    server = Fake({0: range(E)})
    x, ids, weights = torch.ones(3, H).requires_grad_(), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    client = client_of(kind, server)
    try:
        for name in ("forward", "submit"):
            if hasattr(client, name):
                with pytest.raises(UnsupportedCombinationError, match=r"layer 0: .*require gradients.*inference_mode"):
                    await done(getattr(client, name)(0, x, ids, weights))
        assert not server.asked
        with torch.no_grad():
            assert not (await done(client.forward(0, x, ids, weights))).output.requires_grad
        assert len(server.asked) == 1
    finally:
        await done(client.close())
