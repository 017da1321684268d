"""The adapter of an engine that is not listed: MyEngine's MoE layers ask servers, in 60 lines with the check.

    EXPERTD_ADDRESS=127.0.0.1:50051 python client/examples/own_adapter.py CHECKPOINT

MyEngine stands for an engine in torch whose MoE block calls `self.experts(x, topk_ids, topk_weights)`.
"""

import os
import sys

import torch
from torch import Tensor, nn

from expertd_client import RankExperts
from expertd_kernels import reference
from expertd_kernels.checkpoint import open_checkpoint


class MyExperts(nn.Module):
    """The engine's own experts of a layer, with their weights.  [M, H], [M, top_k] twice -> [M, H]."""

    def __init__(self, weights: object, layer: int) -> None:
        super().__init__()
        self.weights, self.layer_index, self.num_experts = weights, layer, weights.num_experts
        self.hidden_size, self.intermediate_size = weights.hidden_size, weights.intermediate_size

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return reference(self.weights, x, topk_ids, topk_weights)


# ---- the adapter --------------------------------------------------------------------------------------------------
class ServedExperts(nn.Module):
    """In place of MyExperts; no weights.  rank, ranks: of a tensor-parallel group, which adds its outputs up."""

    def __init__(self, name: str, own: MyExperts, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.ask = RankExperts.from_environment(  # EXPERTD_ADDRESS, EXPERTD_CLIENT; compares sizes with the server's
            name, own.layer_index, experts=own.num_experts,
            hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, rank=rank, ranks=ranks,
        )  # fmt: skip

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.ask(x, topk_ids, topk_weights, padding=padding)


def serve_experts(model: nn.Module) -> None:
    """Before weights are loaded, so that those of experts need no memory."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MyExperts):
            model.set_submodule(name, ServedExperts(name, module))


# ---- end of the adapter -------------------------------------------------------------------------------------------
def main(checkpoint: str) -> int:
    source = open_checkpoint(checkpoint)
    model = nn.ModuleDict(
        {f"layer{n}": nn.ModuleDict({"experts": MyExperts(source.load(n), n)}) for n in source.layers}
    )
    x = torch.randn(7, source.load(0).hidden_size)
    weights, ids = torch.rand(7, 8).topk(2)
    wanted = [layer["experts"](x, ids, weights) for layer in model.values()]
    serve_experts(model.eval())
    with torch.inference_mode():
        served = [layer["experts"](x, ids, weights) for layer in model.values()]
    errors = [float((y - w).norm() / w.norm()) for y, w in zip(served, wanted, strict=True)]
    print(f"{len(errors)} layers at {os.environ['EXPERTD_ADDRESS']}, relative errors up to {max(errors):.1e}")
    return 0 if max(errors) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
