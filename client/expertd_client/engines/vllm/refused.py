"""What vLLM is configured to do that cannot be done with experts that live elsewhere.  No import of vLLM: its objects
are looked at by the names of their fields (versions/*.json record those)."""

from __future__ import annotations

from typing import Any

from expertd.errors import UnsupportedCombinationError

__all__ = ["refuse_engine", "refuse_layer"]

_PIECEWISE = """--compilation-config '{"cudagraph_mode": "PIECEWISE"}', or --enforce-eager; \
where one server of this host has all experts on another GPU, also "graphs": true among expertd's options"""


def refuse_engine(config: Any, *, cpu: bool, breakable: bool, graphs: bool = False) -> None:
    """Raises UnsupportedCombinationError for a VllmConfig that cannot work.

    cpu         the platform calls a layer's Python code from inside the compiled model
    breakable   CUDA graphs are captured around marked ops, of which the experts are none
    graphs      the user says that calls go from GPU to GPU, so that a graph can contain them
    """
    compilation, model = config.compilation_config, config.model_config
    mode, parallel = compilation.cudagraph_mode, config.parallel_config
    if mode.has_full_cudagraphs() and not graphs:
        raise _refused(
            f"CUDA graphs {mode.name}", "graphs that are split at the experts, which are host code", _PIECEWISE
        )
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if mode.has_full_cudagraphs() and ranks > 1:
        got = f"CUDA graphs {mode.name} with {ranks} tensor- or pipeline-parallel ranks"
        want = "one rank: a rank does not see what the graphs of another met"
        raise _refused(got, want, """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""")
    if breakable:
        remedy = "VLLM_USE_BREAKABLE_CUDAGRAPH=0 in the environment"
        raise _refused("breakable CUDA graphs", "graphs that are split at the experts", remedy)
    if cpu and compilation.mode != 0:
        raise _refused("a compiled model on a CPU", "an eager one: nothing splits the graph there", "--enforce-eager")
    if config.lora_config is not None:
        raise _refused("LoRA, which wraps a layer's own experts", "a model without adapters", "merge them")
    if parallel.prefill_context_parallel_size > 1:
        raise _refused("prefill context parallelism", "tokens that are gathered by nobody", "tensor parallelism")
    if getattr(model, "runner_type", "") == "draft":
        raise _refused("a draft model with experts", "experts of one model", "another way of speculation")


def refuse_layer(name: str, moe: Any, *, fused_shared_experts: int, weights_on_input: bool, substituted: bool) -> None:
    """Raises UnsupportedCombinationError for a layer that a server would compute otherwise.  moe: a FusedMoEConfig."""
    if moe.moe_parallel_config.enable_eplb:
        remedy = "leave --enable-eplb out: which server holds what is the placement's business"
        raise _refused("expert load balancing (EPLB)", "experts under the ids of the model", remedy, name)
    if moe.num_experts > moe.num_logical_experts:
        redundant = moe.num_experts - moe.num_logical_experts
        raise _refused(f"{redundant} redundant experts", "none", "replicas are servers: name several", name)
    if substituted or moe.num_experts < moe.num_logical_experts:
        raise _refused("substituted experts", "the model's own", "leave the substitution out", name)
    if fused_shared_experts:
        what = "shared experts beside the routed ones, which run here meanwhile"
        raise _refused(f"{fused_shared_experts} fused shared experts", what, "switch their fusion off", name)
    if weights_on_input:
        raise _refused("router weights on the experts' inputs", "on their outputs", "", name)
    if moe.is_lora_enabled:
        raise _refused("LoRA on experts", "experts without adapters", "merge them", name)


def _refused(got: str, want: str, remedy: str, name: str = "vLLM") -> UnsupportedCombinationError:
    return UnsupportedCombinationError.about(f"{name}: remote experts", got=got, want=want, remedy=remedy)
