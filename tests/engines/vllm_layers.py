"""vLLM's real classes of one layer, without an engine: `python vllm_layers.py CASE` prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}

import kit
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.forward_context import in_piecewise_cudagraph, set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

import expertd_client.engines.vllm
from expertd.errors import UnsupportedCombinationError
from expertd_client.engines import settings

INTERMEDIATE = 32


class Shared(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 100


def connected() -> kit.Connected:
    """Experts in this process, for everybody who names the server "here:1"."""
    os.environ["EXPERTD_ADDRESS"] = "here:1"
    connection = kit.Connected()
    settings._CONNECTIONS[os.getpid(), settings.Settings(("here:1",))] = connection  # type: ignore[assignment]
    return connection


@contextmanager
def group() -> Iterator[None]:
    """A world of one rank."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield


def eager() -> Any:
    """A configuration as --enforce-eager makes it."""
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))


def layer(config: Any, **options: Any) -> MoERunner:
    sizes = {"num_experts": kit.E, "top_k": kit.TOP_K, "hidden_size": kit.H, "intermediate_size": INTERMEDIATE}
    named = {"params_dtype": torch.float32, "prefix": "model.layers.3.mlp.experts"}
    with set_current_vllm_config(config):
        return FusedMoEFactory(**{**sizes, **named, **options})


def routed(runner: MoERunner, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the layer shall say."""
    weights, ids = torch.softmax(logits, -1).topk(kit.TOP_K)
    return kit.expert_sum(x, ids, weights / weights.sum(-1, keepdim=True)).float()


def inert() -> Any:
    """Classes where nobody names a server."""
    expertd_client.engines.vllm.register()
    runner = layer(eager(), hidden_size=64, intermediate_size=64)
    sizes = [list(p.shape) for p in runner.routed_experts.parameters()]
    return [type(runner).__name__, type(runner.routed_experts).__name__, sizes]


def taken() -> Any:
    """What is said where another plugin was first."""
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class Other(RoutedExperts):
        pass

    PluggableLayer.register_oot(Other, name="RoutedExperts")
    try:
        expertd_client.engines.vllm.register()
    except UnsupportedCombinationError as error:
        return str(error)


def step(runner: MoERunner, config: Any, tokens: int, **context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the layer said, what it shall say)."""
    x = torch.rand(tokens, kit.H) + 0.5
    logits = torch.randn(tokens, kit.E)
    wanted = routed(runner, x, logits)
    if runner.shared_experts is not None:
        wanted = wanted + x + 100
    with set_forward_context(None, config, num_tokens=tokens, **context), torch.inference_mode():
        return runner(x, logits), wanted


def padding() -> Any:
    """Rows that the forward context calls padding are not sent, in a layer with shared experts."""
    expertd_client.engines.vllm.register()
    connection, config = connected(), eager()
    runner = layer(config, shared_experts=Shared())
    found, wanted = step(runner, config, 6, is_padding=torch.arange(6) >= 4)
    sent = [len(request.topk_ids) for request in connection.forwarder.seen]
    again, nothing = step(runner, config, 3, is_padding=torch.ones(3, dtype=torch.bool))
    close = torch.allclose(found[:4], wanted[:4]) and bool((found[4:] != 0).all())
    return [close, sent, len(connection.forwarder.seen), again.shape == nothing.shape]


def addresses() -> Any:
    """Addresses of the two outputs of a layer in steps of several sizes, with graphs and without; and that they are
    right."""
    expertd_client.engines.vllm.register()
    connected()
    compilation = CompilationConfig(mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.PIECEWISE)
    config = VllmConfig(compilation_config=compilation)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE  # which a CPU takes back
    config.compilation_config.max_cudagraph_capture_size = 8
    runner = layer(config, shared_experts=Shared())
    impl, seen, right, held = runner._forward_impl, {True: set(), False: set()}, [], []

    def noted(*args: Any, **kwargs: Any) -> Any:
        outputs = impl(*args, **kwargs)
        held.extend(outputs)  # so that no address is free for the next
        seen[in_piecewise_cudagraph()].add(tuple(output.data_ptr() for output in outputs))
        return outputs

    runner._forward_impl = noted  # type: ignore[method-assign]
    for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        for tokens in (8, 3, 8, 1):
            found, wanted = step(runner, config, tokens, cudagraph_runtime_mode=mode)
            right.append(torch.allclose(found, wanted))
    return [len(seen[True]), len(seen[False]), all(right), list(runner._outputs[0].shape)]


def split() -> Any:
    """Pieces of a graph with one layer between two additions, by vLLM's own splitting."""
    from vllm.compilation.backends import split_graph

    expertd_client.engines.vllm.register()
    connected()
    config = eager()
    config.compilation_config.splitting_ops = ["vllm::unified_attention_with_output"]
    before = list(config.compilation_config.splitting_ops)
    layer(config)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    arguments = (first, first, None, None, "model.layers.3.mlp.experts", 0)
    middle = graph.call_function(torch.ops.vllm.moe_forward.default, arguments)
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (middle, 1)))
    pieces = []
    for ops in (before, config.compilation_config.splitting_ops):
        _, items = split_graph(torch.fx.GraphModule({}, graph), ops)
        pieces.append([item.is_splitting_graph for item in items])
    return pieces


def refusals() -> Any:
    """What is said of real configurations."""
    expertd_client.engines.vllm.register()
    connected()
    full, compiled = eager(), eager()
    full.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compiled.compilation_config.mode = CompilationMode.VLLM_COMPILE
    said = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (full, {}),
        (compiled, {}),
        (eager(), {"apply_router_weight_on_input": True}),
        (eager(), {"enable_eplb": True, "num_redundant_experts": 2}),
    ]
    for config, options in cases:
        try:
            layer(config, **options)
            said.append("nothing")
        except UnsupportedCombinationError as error:
            said.append(str(error))
    runner = layer(eager())
    for call in (runner.routed_experts.forward_monolithic, lambda x: runner._replace_quant_method(x)):
        try:
            call(torch.zeros(1))
            said.append("nothing")
        except UnsupportedCombinationError as error:
            said.append(str(error))
    return said


def stranger() -> Any:
    """A model whose experts are of a class that is not replaced."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class Own(RoutedExperts):
        pass

    expertd_client.engines.vllm.register()
    connected()
    try:
        layer(eager(), routed_experts_cls=Own, hidden_size=64, intermediate_size=64)
    except UnsupportedCombinationError as error:
        return str(error)


if __name__ == "__main__":
    with group():
        found = {name: globals()[name]() for name in sys.argv[1:]}
    print("\n@" + json.dumps(found), flush=True)
    os._exit(0)
