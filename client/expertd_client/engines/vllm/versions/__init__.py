"""The versions of vLLM that the adapter was tried with; a module for each, with what differs between them:

substituted(layer)   whether some experts of a RoutedExperts stand for others
"""

from __future__ import annotations

from expertd_client.engines.versions import Adapter

__all__ = ["ADAPTER"]

_MOE = "vllm.model_executor.layers.fused_moe"
ADAPTER = Adapter(
    package="vllm",
    home="expertd_client.engines.vllm",
    tried=("0.33.0", "0.32.0", "0.31.0"),
    overridden=(
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.apply",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.create_weights",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.is_monolithic",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.mk_can_overlap_shared_experts",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.supports_internal_mk",
        f"{_MOE}.routed_experts:RoutedExperts._get_quant_method",
        f"{_MOE}.routed_experts:RoutedExperts._replace_quant_method",
        f"{_MOE}.routed_experts:RoutedExperts.forward_monolithic",
        f"{_MOE}.routed_experts:RoutedExperts.load_weights",
        f"{_MOE}.runner.moe_runner:MoERunner._forward_impl",
    ),
)
