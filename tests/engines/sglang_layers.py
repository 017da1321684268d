"""SGLang's real classes of one layer, without an engine: prints one line of JSON with what each case found."""

# ruff: noqa: E402 - the stand-ins come before the package that imports what they stand for
from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import Any

import sglang_cpu_ops

sglang_cpu_ops.stand_ins()
os.environ["EXPERTD_ADDRESS"] = "here:1"

import kit
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_exec, get_parallel

import expertd_client.engines.sglang
from expertd.errors import UnsupportedCombinationError
from expertd_client.engines import settings
from expertd_client.engines.sglang import plugin

NAME = "model.layers.3.mlp.experts"
CONNECTION = kit.Connected()
settings._CONNECTIONS[os.getpid(), settings.Settings(("here:1",))] = CONNECTION  # type: ignore[assignment]


def layer(**options: Any) -> FusedMoE:
    sizes = {"num_experts": kit.E, "top_k": kit.TOP_K, "hidden_size": kit.H, "intermediate_size": 32}
    return FusedMoE(**{**sizes, "layer_id": 3, "prefix": NAME, **options})


def step(moe: FusedMoE, tokens: int, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the layer said, what it shall say), rows from `real` on being padding."""
    topk = TopK(top_k=kit.TOP_K, renormalize=True, layer_id=3)
    topk.bind_runner_backend(moe.runner_backend, routing_method_type=moe.routing_method_type)
    x, logits = torch.rand(tokens, kit.H) + 0.5, torch.randn(tokens, kit.E)
    chosen = topk(x, logits)
    chosen.topk_ids[real:] = -1
    with torch.inference_mode():
        weights, ids = torch.softmax(logits, -1).topk(kit.TOP_K)
        wanted = kit.expert_sum(x, ids, weights / weights.sum(-1, keepdim=True)).float()
        wanted[real:] = 0
        return moe(x, chosen), wanted


def parallel(ranks: int, rank: int, ep: int = 1) -> Any:
    width = {"tp_size": ranks * ep, "attn_tp_size": ranks * ep, "moe_tp_size": ranks, "moe_ep_size": ep}
    return get_parallel().override(**width, moe_ep_rank=0, moe_tp_rank=rank, tp_rank=rank, tp_group=None)


def one() -> Any:
    """A layer of one rank: parameters, right, rows sent."""
    with parallel(1, 0):
        moe = layer()
        found, wanted = step(moe, 6, 4)
    sent = [len(request.topk_ids) for request in CONNECTION.forwarder.seen]
    return [len(list(moe.parameters())), torch.allclose(found, wanted), sent, vars(CONNECTION.found[-1])]


def two() -> Any:
    """Two ranks with the same tokens: their outputs' sum is right; rows sent by each."""
    total, sent = 0, []
    for rank in range(2):
        with parallel(2, rank):
            torch.manual_seed(0)
            CONNECTION.forwarder.seen.clear()
            found, wanted = step(layer(), 7, 7)
            total = total + found
            sent.append([len(request.topk_ids) for request in CONNECTION.forwarder.seen])
    return [torch.allclose(total, wanted), sent]


def scaled() -> Any:
    """A routed scaling factor: the runner's on CUDA, the models' elsewhere."""
    found = []
    for cuda in (True, False):
        plugin.is_cuda = lambda cuda=cuda: cuda  # type: ignore[assignment]
        with parallel(1, 0):
            said, wanted = step(layer(routed_scaling_factor=2.5), 5, 5)
        found.append(torch.allclose(said, wanted * (2.5 if cuda else 1)))
    return found


def refusals() -> Any:
    """What is said of layers and configurations that cannot work."""
    said = []
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"num_fused_shared_experts": 1, "num_experts": kit.E + 1}, parallel(1, 0)),
        ({"apply_router_weight_on_input": True}, parallel(1, 0)),
        ({}, parallel(1, 0, ep=2)),
        ({"quant_method": object()}, parallel(1, 0)),
    ]
    for options, context in cases:
        try:
            with context:
                layer(**options)
            said.append("nothing")
        except UnsupportedCombinationError as error:
            said.append(str(error))
    graphs = CudaGraphConfig(decode=PhaseConfig(backend="full"), prefill=PhaseConfig())
    try:
        with parallel(1, 0), get_exec().graph.override(cuda_graph_config=graphs):
            layer()
        said.append("nothing")
    except UnsupportedCombinationError as error:
        said.append(str(error))
    return said


def main() -> None:
    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(device="cpu"))
        with parallel(1, 0):
            before = [list(p.shape) for p in layer(hidden_size=64, intermediate_size=64).parameters()]
        expertd_client.engines.sglang.register()
        expertd_client.engines.sglang.register()
        HookRegistry.apply_hooks()
        found = {"before": before, "one": one(), "two": two(), "scaled": scaled(), "refusals": refusals()}
    print("\n@" + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
