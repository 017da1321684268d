"""What our adapters use of an engine: names, parameters and fields, as the pinned version has them.

    python tests/engines/signatures.py vllm            prints what the installed package has, as JSON
    python tests/engines/signatures.py vllm --write    records it in tests/engines/vllm.json

"module:name" -> its parameters (names and defaults), the fields of a class that we read,
or an op's arguments."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

MOE = "vllm.model_executor.layers.fused_moe"
SGL = "sglang.srt.layers.moe"
USED = {
    "vllm": [
        "vllm.config:get_current_vllm_config",
        "vllm.config:VllmConfig[additional_config,compilation_config,lora_config,model_config,parallel_config]",
        "vllm.config:CompilationConfig[cudagraph_mode,mode,splitting_ops]",
        "vllm.config:ParallelConfig[prefill_context_parallel_size]",
        "vllm.config:ModelConfig[runner]",
        "vllm.config.compilation:CompilationMode.NONE",
        "vllm.config.compilation:CUDAGraphMode.has_full_cudagraphs",
        "vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled",
        "vllm.distributed:get_tensor_model_parallel_rank",
        "vllm.distributed:get_tensor_model_parallel_world_size",
        "vllm.forward_context:get_forward_context",
        "vllm.forward_context:in_piecewise_cudagraph",
        "vllm.forward_context:ForwardContext[is_padding]",
        "vllm.model_executor.custom_op:op_registry_oot",
        "vllm.model_executor.custom_op:PluggableLayer.__new__",
        "vllm.model_executor.custom_op:PluggableLayer.register_oot",
        f"{MOE}.config:FusedMoEConfig[hidden_dim,intermediate_size,is_lora_enabled,max_capture_size,"
        "moe_parallel_config,num_experts,num_logical_experts]",
        f"{MOE}.config:FusedMoEConfig.is_sequence_parallel",
        f"{MOE}.config:FusedMoEParallelConfig[enable_eplb]",
        f"{MOE}.expert_map_manager:ExpertMapManager.__init__",
        f"{MOE}.expert_substitution:SubstitutedRoutedExperts",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.apply",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.create_weights",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.supports_internal_mk",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.mk_can_overlap_shared_experts",
        f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.is_monolithic",
        f"{MOE}.routed_experts:RoutedExperts",
        f"{MOE}.routed_experts:RoutedExperts._get_quant_method",
        f"{MOE}.routed_experts:RoutedExperts._replace_quant_method",
        f"{MOE}.routed_experts:RoutedExperts.forward_modular",
        f"{MOE}.routed_experts:RoutedExperts.forward_monolithic",
        f"{MOE}.routed_experts:RoutedExperts.load_weights",
        f"{MOE}.runner.moe_runner:MoERunner",
        f"{MOE}.runner.moe_runner:MoERunner._forward_impl",
        f"{MOE}.runner.moe_runner:MoERunner.do_naive_dispatch_combine",
        f"{MOE}.runner.shared_experts:SharedExperts.forward",
        f"{MOE}.runner.shared_experts:SharedExpertsOrder.MK_INTERNAL_OVERLAPPED",
        "vllm.model_executor.models.gpt_oss:GptOssRoutedExperts",
        "vllm.model_executor.models.utils:extract_layer_index",
        "vllm.platforms:current_platform.is_cpu",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
        "torch.ops.vllm:moe_forward",
        "torch.ops.vllm:moe_forward_shared",
    ],
    "sglang": [
        f"{SGL}.fused_moe_triton.layer:FusedMoE",
        f"{SGL}.fused_moe_triton.layer:FusedMoE.forward_impl",
        f"{SGL}.fused_moe_triton.layer:FusedMoE.run_moe_core",
        f"{SGL}.moe_runner.base:DispatchMoeRunnerCore",
        f"{SGL}.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch",
        f"{SGL}.moe_runner.base:MoeQuantInfo",
        f"{SGL}.moe_runner.base:MoeRunnerConfig[apply_router_weight_on_input,no_combine,routed_scaling_factor]",
        f"{SGL}.moe_runner.runner:MoeRunner",
        f"{SGL}.moe_runner.runner:MoeRunner.run",
        f"{SGL}.moe_runner.runner:register_moe_runner_core",
        f"{SGL}.token_dispatcher.standard:StandardCombineInput",
        f"{SGL}.token_dispatcher.standard:StandardDispatchOutput",
        f"{SGL}.topk:StandardTopKOutput",
        f"{SGL}.utils:get_moe_a2a_backend",
        f"{SGL}.utils:resolve_moe_runner_backend",
        "sglang.srt.layers.quantization.base_config:FusedMoEMethodBase",
        "sglang.srt.layers.quantization.base_config:FusedMoEMethodBase.apply",
        "sglang.srt.layers.quantization.base_config:FusedMoEMethodBase.create_moe_runner",
        "sglang.srt.layers.quantization.base_config:FusedMoEMethodBase.create_weights",
        "sglang.srt.model_executor.cuda_graph_config:Backend.DISABLED",
        "sglang.srt.model_executor.cuda_graph_config:Phase.ALL",
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "sglang.srt.plugins.hook_registry:HookType.AROUND",
        "sglang.srt.runtime_context:get_exec",
        "sglang.srt.runtime_context:get_lora",
        "sglang.srt.runtime_context:get_server_args",
        "sglang.srt.utils:is_cuda",
    ],
}


def record(package: str) -> dict[str, Any]:
    """What the installed package has."""
    return {"version": importlib.metadata.version(package), **{name: _found(name) for name in USED[package]}}


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    path, _, fields = path.partition("[")
    if module.startswith("torch.ops"):
        import torch

        schema = getattr(getattr(torch.ops, module.rpartition(".")[2]), path).default._schema
        return f"({', '.join(a.name for a in schema.arguments)}) -> {len(schema.returns)}"
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    if fields:
        return {field: _default(found, field) for field in fields.rstrip("]").split(",")}
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, property):
        return "property"
    return _parameters(found) if callable(found) else type(found).__name__


def _default(cls: type, field: str) -> str:
    """A dataclass's field: what it is where nobody says."""
    default = cls.__dataclass_fields__[field].default  # type: ignore[attr-defined]
    return "a field" if default.__class__.__name__ in ("_MISSING_TYPE", "FieldInfo") else repr(default)


def _parameters(found: Any) -> str:
    """Without annotations, which differ between versions of Python."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values()]
    return str(inspect.Signature(bare))


def recorded(package: str) -> dict[str, Any]:
    """What stands in the repository."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{package}.json").read_text())
    return found


if __name__ == "__main__":
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    package = sys.argv[1]
    if package == "sglang":
        import sglang_cpu_ops

        sglang_cpu_ops.stand_ins()
    text = json.dumps(record(package), indent=1)
    if "--write" in sys.argv:
        (Path(__file__).parent / f"{package}.json").write_text(text + "\n")
    print("\n@" + text, flush=True)
    os._exit(0)
