"""What SGLang is configured to do that cannot be done with experts that live elsewhere.  No import of SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from expertd.errors import UnsupportedCombinationError

__all__ = ["Configured", "refuse"]


@dataclass(frozen=True)
class Configured:
    """What a layer is made with.  a2a: the backend of all-to-all; cuda_graphs: phases that are captured; method: one
    that stands around ours or was wanted in its place, "" = none."""

    ep_size: int = 1
    a2a: str = "none"
    cuda_graphs: tuple[str, ...] = ()
    eplb: bool = False
    redundant_experts: int = 0
    fused_shared_experts: int = 0
    weights_on_input: bool = False
    no_combine: bool = False
    draft: bool = False
    lora: bool = False
    method: str = ""


def refuse(name: str, found: Configured) -> None:
    """Raises UnsupportedCombinationError for what a server would compute otherwise, or cannot be asked for."""
    graphs = "" if not found.cuda_graphs else f"CUDA graphs for {' and '.join(found.cuda_graphs)}"
    disabled = " ".join(f"--cuda-graph-backend-{phase} disabled" for phase in found.cuda_graphs)
    parallel = "" if found.ep_size == 1 else f"expert parallelism over {found.ep_size} ranks"
    redundant = f"{found.redundant_experts} redundant experts" if found.redundant_experts else ""
    fused = f"{found.fused_shared_experts} fused shared experts" if found.fused_shared_experts else ""
    for got, want, remedy in (
        (graphs, "none: the experts are host code", disabled),
        (parallel, "experts under the model's ids", "--ep-size 1"),
        ("" if found.a2a == "none" else f"all-to-all by {found.a2a}", "none", "--moe-a2a-backend none"),
        (
            "expert load balancing (EPLB)" if found.eplb else "",
            "experts under the ids of the model",
            "no --enable-eplb",
        ),
        (redundant, "none", "replicas are servers: name several"),
        (fused, "shared experts beside the routed ones", "--disable-shared-experts-fusion"),
        ("router weights on the experts' inputs" if found.weights_on_input else "", "on their outputs", ""),
        ("outputs of single experts" if found.no_combine else "", "a token's sum", ""),
        ("a draft model with experts" if found.draft else "", "experts of one model", "another way of speculation"),
        ("LoRA" if found.lora else "", "a model without adapters", "merge them"),
        (f"{found.method} for its experts" if found.method else "", "the method that asks servers", ""),
    ):
        if got:
            raise UnsupportedCombinationError.about(f"{name}: remote experts", got=got, want=want, remedy=remedy)
