"""Our classes in place of vLLM's: a RoutedExperts without weights whose method asks servers, and the runner around it.

vLLM makes each of them by the name of its class and takes ours instead, once they are registered.  Where nobody names
servers, an object becomes vLLM's own class before it is initialized.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context, in_piecewise_cudagraph
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.layer import RankExperts
from expertd_client.engines.served import Found
from expertd_client.engines.settings import Settings, connection_to, settings_of
from expertd_client.engines.vllm import runs
from expertd_client.engines.vllm.refused import refuse_engine, refuse_layer
from expertd_client.engines.vllm.versions import ADAPTER

# Why it is so: decision 122 in DECISIONS.md.
__all__ = ["RemoteGptOssRoutedExperts", "RemoteMethod", "RemoteMoERunner", "RemoteRoutedExperts", "install"]

_VERSION = ADAPTER.installed()
SPLITTING_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")


def install() -> None:
    """Registers the classes, once in a process."""
    for name, ours in _REPLACED.items():
        owner = op_registry_oot.get(name)
        if owner is ours:
            continue
        if owner is not None:
            raise UnsupportedCombinationError.about(
                f"vLLM: {name}",
                got=f"{owner.__module__}.{owner.__name__} in its place already",
                want="one plugin that replaces it",
                remedy="VLLM_PLUGINS names the plugins to load",
            )
        PluggableLayer.register_oot(ours, name=name)


def _settings() -> Settings | None:
    """What --additional-config '{"expertd": ...}' says, and else the environment."""
    additional = get_current_vllm_config().additional_config
    given = additional.get("expertd") if isinstance(additional, dict) else None
    return settings_of(given, os.environ)


class RemoteMethod(FusedMoEMethodBase):
    """A method without weights: what it computes comes from servers.

    graphs   CUDA graphs contain the calls: dummy runs make them, too, before the capture and in it
    """

    def __init__(self, moe: Any, experts: RankExperts, graphs: bool = False) -> None:
        super().__init__(moe)
        self.experts, self.graphs = experts, graphs

    @property
    def supports_internal_mk(self) -> bool:
        """So that tokens of other data-parallel ranks are not gathered here."""
        return True

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """So that apply() calls the shared experts."""
        return True

    @property
    def is_monolithic(self) -> bool:
        """So that vLLM's router chooses."""
        return False

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """None."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None."""

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if in_piecewise_cudagraph() and not layer.kept:
            raise _not_replaced(layer, "runner")
        meanwhile = None
        if shared_experts is not None:
            order = SharedExpertsOrder.MK_INTERNAL_OVERLAPPED
            meanwhile = functools.partial(shared_experts, shared_experts_input, order)
        if runs.in_dummy_run() and not self.graphs:
            if meanwhile is not None:
                meanwhile()
            return torch.zeros_like(x)
        padding = _padding(len(x), self.moe.is_sequence_parallel)
        return self.experts(x, topk_ids, topk_weights, padding=padding, meanwhile=meanwhile)


def _padding(tokens: int, sequence_parallel: bool) -> Tensor | None:
    """[tokens] bool: which rows of this step are none of a request's; all of them in a dummy batch of data parallelism.
    With sequence parallelism a rank has its part of the rows."""
    padding: Tensor | None = get_forward_context().is_padding
    if padding is None or not sequence_parallel or len(padding) == tokens:
        return padding if padding is None or len(padding) == tokens else None
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    padding = torch.nn.functional.pad(padding, (0, tokens * ranks - len(padding)), value=True)
    return padding[rank * tokens : (rank + 1) * tokens]


class _Remote:
    """What becomes of vLLM's RoutedExperts, whichever class.  kept: the runner keeps outputs for CUDA graphs."""

    kept = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own: Any = type(self).__mro__[2]  # vLLM's
        if _settings() is None:
            self.__class__ = own
        own.__init__(self, *args, **kwargs)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> RemoteMethod:
        del quant_config  # of the weights that are not here
        config, settings = get_current_vllm_config(), _settings()
        assert settings is not None
        graphs = settings.graphs and config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        refuse_engine(
            config,
            cpu=current_platform.is_cpu(),
            breakable=is_breakable_cudagraph_enabled(),
            graphs=settings.graphs,
        )
        refuse_layer(
            prefix,
            moe_config,
            fused_shared_experts=self.expert_map_manager.num_fused_shared_experts,  # type: ignore[attr-defined]
            weights_on_input=self.apply_router_weight_on_input,  # type: ignore[attr-defined]
            substituted=_VERSION.substituted(self),
        )
        _split_at_experts(config.compilation_config)
        runs.watch()
        found = Found(
            prefix,
            extract_layer_index(prefix),
            moe_config.num_experts,
            moe_config.hidden_dim,
            moe_config.intermediate_size,
        )
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        if moe_config.is_sequence_parallel:
            rank, ranks = 0, 1
        experts = RankExperts(connection_to(settings), found, rank, ranks)
        if graphs:
            remote = experts.remote
            runs.check_steps(remote.forwarder, functools.partial(remote.check, torch.cuda.current_device()))
        return RemoteMethod(moe_config, experts, graphs)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """Experts of a whole checkpoint are passed over."""
        for _ in weights:
            pass
        return ()

    def forward_monolithic(self, *_: Any, **__: Any) -> Tensor:
        raise UnsupportedCombinationError.about(
            f"{self.layer_name}: remote experts",  # type: ignore[attr-defined]
            got="a monolithic kernel, which chooses experts itself",
            want="a router's choice",
        )

    def _replace_quant_method(self, quant_method: Any) -> None:
        raise UnsupportedCombinationError.about(
            f"{self.layer_name}: remote experts",  # type: ignore[attr-defined]
            got=f"{type(quant_method).__name__} in place of their method (LoRA, elastic expert parallelism)",
            want="the method that asks servers",
        )


class RemoteRoutedExperts(_Remote, RoutedExperts):
    pass


class RemoteGptOssRoutedExperts(_Remote, GptOssRoutedExperts):
    pass


class RemoteMoERunner(MoERunner):
    """Keeps a layer's outputs where a captured graph looks for them.

    A graph that was captured after the experts reads their outputs at the addresses of its capture, and what host code
    returns lies elsewhere each time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _settings() is None:
            self.__class__ = MoERunner
            MoERunner.__init__(self, *args, **kwargs)
            return
        super().__init__(*args, **kwargs)
        if not isinstance(self.routed_experts, _Remote):
            raise _not_replaced(self.routed_experts, "experts")
        self.routed_experts.kept = True
        self._outputs: list[Tensor] = []

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._forward_impl(*args, **kwargs)
        if not in_piecewise_cudagraph():
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        kept = tuple(self._keep(n, output) for n, output in enumerate(outputs))
        return kept if isinstance(result, tuple) else kept[0]

    def _keep(self, n: int, output: Tensor) -> Tensor:
        """A copy at the one address of this layer's output n."""
        if n == len(self._outputs):
            rows = max(self.moe_config.max_capture_size, len(output))
            self._outputs.append(output.new_empty(rows, *output.shape[1:]))
        return self._outputs[n][: len(output)].copy_(output)


_REPLACED = {
    "RoutedExperts": RemoteRoutedExperts,
    "GptOssRoutedExperts": RemoteGptOssRoutedExperts,
    "MoERunner": RemoteMoERunner,
}
"""By the name of the class that each takes the place of."""


def _not_replaced(layer: Any, what: str) -> UnsupportedCombinationError:
    return UnsupportedCombinationError.about(
        f"{getattr(layer, 'layer_name', 'vLLM')}: remote experts",
        got=f"a model with {what} of its own ({type(layer).__name__})",
        want=f"vLLM's own ({', '.join(_REPLACED)})",
        remedy="serve this model whole, without EXPERTD_ADDRESS" if what == "experts" else "--enforce-eager",
    )


def _split_at_experts(compilation: Any) -> None:
    """The graph is split at the experts, as it is at attention."""
    if compilation.splitting_ops:
        compilation.splitting_ops += [op for op in SPLITTING_OPS if op not in compilation.splitting_ops]
