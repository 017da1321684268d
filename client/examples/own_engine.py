"""An engine of one's own: a router and a shared expert written by hand, routed experts behind a server.

    python client/examples/own_engine.py 127.0.0.1:50051 [--compile]

The shared expert is computed while the routed ones are under way.  All layers of a step have one version of the
weights.  With --compile the model is one graph of torch.compile, in which each call is one node.
"""

import sys

import torch
from torch import Tensor, nn

from expertd_client import ExpertClient, RemoteExperts, StepVersion


class SparseBlock(nn.Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self, experts: RemoteExperts, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.shared = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))
        self.experts = experts
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        started = self.experts.start(x, ids, weights)  # on its way
        shared = self.shared(x)  # meanwhile
        return self.experts.wait(started, shared) + shared


def main(address: str, compiled: bool) -> int:
    with ExpertClient(address, timeout_s=30.0) as client, torch.inference_mode():
        described = client.describe()
        hidden, step = described.model.hidden_size, StepVersion()  # one for each batch in flight
        torch.manual_seed(0)
        model = nn.Sequential()
        for layer in described.layers:
            limit = described.limits.max_tokens
            experts = RemoteExperts(client, layer.layer, max_tokens=limit, weights_version=step)
            model.append(SparseBlock(experts, hidden, layer.num_experts, layer.top_k))
        model.eval()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = torch.randn(2, 3, hidden)
        step.begin()  # before each step, outside of what is compiled
        y = run(x)
        alone = torch.cat([model(x[:1]), model(x[1:])])  # what a token gets does not depend on its batch
    error = float((y - alone).norm() / y.norm())
    print(f"{len(model)} layers, version {step.number}: {list(y.shape)}, together against one by one: {error:.1e}")
    return 0 if error < 1e-2 else 1


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], "--compile" in sys.argv))
