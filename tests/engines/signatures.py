"""Records what our adapters use of an engine: names, parameters and fields, as one version's source has them.

    python tests/engines/signatures.py vllm 0.33.0              prints them, as JSON
    python tests/engines/signatures.py vllm 0.33.0 --write      writes them to the adapter's folder `versions`; those of
                                                                kt_kernel, which our class stands for, to this folder

The source is that of build/engines (fetch_engines.py).  expertd_client.engines.signatures says what the names mean.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fetch_engines import pinned

from expertd_client.engines.signatures import Sources
from expertd_client.engines.versions import Adapter

MOE = "vllm.model_executor.layers.fused_moe"
SGL = "sglang.srt.layers.moe"
KT_STATIC = ("set_capture_batch_sizes", "get_capture_batch_sizes", "clear_buffer_cache")
KT_METHODS = ("load_weights", "load_weights_from_tensors", "submit_forward", "sync_forward", "forward")
USED = {
    "vllm": [
        "vllm.config:get_current_vllm_config",
        "vllm.config:VllmConfig[additional_config,compilation_config,lora_config,model_config,parallel_config]",
        "vllm.config:CompilationConfig[cudagraph_mode,mode,splitting_ops]",
        "vllm.config:ParallelConfig[pipeline_parallel_size,prefill_context_parallel_size,tensor_parallel_size]",
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
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner{is_padding}",
        "vllm.v1.worker.gpu.input_batch:InputBuffers{is_padding}",
        "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
        f"{MOE}.routed_experts:RoutedExperts{{apply_router_weight_on_input,expert_map_manager,layer_name,quant_method}}",
        f"{MOE}.expert_map_manager:ExpertMapManager{{num_fused_shared_experts}}",
        f"{MOE}.runner.moe_runner:MoERunner{{moe_config,routed_experts}}",
        f"{MOE}.runner.moe_runner:op moe_forward",
        f"{MOE}.runner.moe_runner:op moe_forward_shared",
    ],
    "sglang": [
        f"{SGL}.fused_moe_triton.layer:FusedMoE",
        f"{SGL}.fused_moe_triton.layer:FusedMoE.forward_impl",
        f"{SGL}.fused_moe_triton.layer:FusedMoE.run_moe_core",
        f"{SGL}.fused_moe_triton.layer:FusedMoE{{hidden_size_unpadded,layer_id,layer_name,moe_ep_size,moe_runner_config,"
        "moe_tp_rank,moe_tp_size,num_experts,num_fused_shared_experts,quant_method}",
        "sglang.srt.arg_groups.fields.exec_:ExecGraph[cuda_graph_config]",
        "sglang.srt.arg_groups.fields.exec_:ExecMoe[enable_eplb,ep_num_redundant_experts]",
        "sglang.srt.arg_groups.fields.lora:Lora[enable_lora]",
        f"{SGL}.moe_runner.base:DispatchMoeRunnerCore",
        f"{SGL}.moe_runner.base:DispatchMoeRunnerCore.run_from_dispatch",
        f"{SGL}.moe_runner.base:DispatchMoeRunnerCore.runner_backend",
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
    "kt_kernel": [
        *(f"kt_kernel.experts:KTMoEWrapper.{name}" for name in ("__new__", *KT_STATIC)),
        *(f"kt_kernel.experts_base:BaseMoEWrapper.{name}" for name in KT_METHODS),
    ],
    "transformers": [
        "transformers:AutoConfig.from_pretrained",
        "transformers:PreTrainedModel.from_pretrained",
        "transformers:PreTrainedModel{_keys_to_ignore_on_load_unexpected}",
        "transformers.integrations.moe:use_experts_implementation",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts.forward",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts{down_proj}",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock{experts}",
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts.forward",
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts{down_proj}",
        "transformers.utils.quantization_config:FineGrainedFP8Config",
        "transformers.utils.quantization_config:Mxfp4Config",
    ],
}


_FLAGS = ["sglang.srt.runtime_context:get_flags", "sglang.srt.runtime_context:MoeFlags[in_speculative_scope]"]
ONLY: dict[tuple[str, str], list[str]] = {
    ("vllm", "0.33.0"): [f"{MOE}.expert_substitution:SubstitutedRoutedExperts"],
    ("sglang", "0.5.23"): [f"{SGL}.fused_moe_triton.layer:FusedMoE{{is_draft}}"],
    ("sglang", "0.5.22"): _FLAGS,
    ("sglang", "0.5.21"): _FLAGS,
}
"""Names that one version's module uses besides."""


def adapter(package: str) -> Adapter:
    """Of an engine."""
    from importlib import import_module

    home = "expertd_client.transformers" if package == "transformers" else f"expertd_client.engines.{package}"
    found: Adapter = import_module(f"{home}.versions").ADAPTER
    return found


def names(package: str, version: str) -> list[str]:
    """What is recorded."""
    return [*USED[package], *ONLY.get((package, version), [])]


def place(package: str, version: str) -> Path:
    """The file of a record.  That of kt-kernel, which our class stands for, is compared by tests alone."""
    if package == "kt_kernel":
        return Path(__file__).with_name("kt_kernel.json")
    return adapter(package).folder / f"v{version.replace('.', '_')}.json"


def record(package: str, version: str, site: Path) -> dict[str, Any]:
    """From the source in a folder.  Raises MissingNameError."""
    sources = Sources(site)
    return {name: sources.signature(name) for name in names(package, version)}


def main() -> int:
    package, version, *more = sys.argv[1:]
    text = json.dumps(record(package, version, pinned()[package, version]), indent=1) + "\n"
    if "--write" in more:
        place(package, version).write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
