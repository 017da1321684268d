"""A method without weights in each of SGLang's FusedMoE layers, and the runner's core that asks servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_lora, get_server_args
from sglang.srt.utils import is_cuda

from expertd_client.engines.layer import RankExperts
from expertd_client.engines.served import Found
from expertd_client.engines.settings import connection_to, settings_of
from expertd_client.engines.sglang.refused import Configured, refuse
from expertd_client.engines.sglang.versions import ADAPTER

__all__ = ["RemoteCore", "RemoteMethod", "install"]

_VERSION = ADAPTER.installed()
NAME = "expertd"
LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
_installed = False


def install() -> None:
    """Registers the core and the hook, once in a process."""
    global _installed
    if _installed:
        return
    _installed = True
    register_moe_runner_core(NAME, RemoteCore)
    HookRegistry.register(LAYER, _with_our_method, HookType.AROUND)


def _with_our_method(make: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Around FusedMoE.__init__: the layer gets our method, which the constructor takes before its configuration's."""
    given = kwargs.get("quant_method")
    make(layer, *args, **{**kwargs, "quant_method": RemoteMethod("" if given is None else type(given).__name__)})


@dataclass
class RemoteExpertsInfo(MoeQuantInfo):
    """What apply() hands to the core."""

    experts: RankExperts


class RemoteMethod(FusedMoEMethodBase):
    """A method without weights.  instead_of: one that the model wanted for this layer; "" = whichever."""

    def __init__(self, instead_of: str = "") -> None:
        self._instead_of = instead_of

    def create_weights(self, layer: Any, *_: Any, moe_intermediate_size: int, **__: Any) -> None:
        """None; but the layer is compared with what the servers hold."""
        name = layer.layer_name or f"layer {layer.layer_id}"
        refuse(name, self._configured(layer))
        settings = settings_of(None, os.environ)
        assert settings is not None
        found = Found(name, layer.layer_id, layer.num_experts, layer.hidden_size_unpadded, moe_intermediate_size)
        self._experts = RankExperts(connection_to(settings), found, layer.moe_tp_rank, layer.moe_tp_size)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        assert self.runner is not None
        return self.runner.run(dispatch_output, RemoteExpertsInfo(self._experts))

    def _configured(self, layer: Any) -> Configured:
        config, graphs = layer.moe_runner_config, get_exec().graph.cuda_graph_config
        around = "" if layer.quant_method is self else type(layer.quant_method).__name__
        return Configured(
            ep_size=layer.moe_ep_size,
            a2a=get_moe_a2a_backend().value,
            cuda_graphs=tuple(p for p in Phase.ALL if graphs and getattr(graphs, p).backend != Backend.DISABLED),
            eplb=get_server_args().enable_eplb,
            redundant_experts=get_exec().moe.ep_num_redundant_experts,
            fused_shared_experts=layer.num_fused_shared_experts,
            weights_on_input=config.apply_router_weight_on_input,
            no_combine=config.no_combine,
            draft=_VERSION.of_a_draft(layer),
            lora=bool(get_lora().enable_lora),
            method=around or self._instead_of,
        )


class RemoteCore(DispatchMoeRunnerCore):
    """Asks servers.  Rows of padding have -1 for their experts, and are not computed."""

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        del hooks  # of LoRA, which was refused
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        output = quant_info.experts(x, topk.topk_ids, topk.topk_weights)
        factor = runner_config.routed_scaling_factor
        if factor is not None and is_cuda():  # elsewhere the models multiply themselves
            output = output * factor
        return StandardCombineInput(hidden_states=output)
