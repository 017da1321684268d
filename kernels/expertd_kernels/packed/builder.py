"""From a decision and canonical weights to experts that compute.

    experts = build(decision, weights)
    packed  = pack(backend, weights, problem)       one backend's layout, to be kept
    experts = experts_of(backend, packed, problem)  ready to compute

The rules that chose a backend saw what headers promise.  pack() asks them again about the weights that were read, so a
packer meets only what its entry of the table claims, and asserts the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from expertd_kernels.common.problem import Device, Package, Problem
from expertd_kernels.common.protocol import BackendModule, Experts, Packed
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle import table
from expertd_kernels.oracle.decision import Backend, Decision, backend_module
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.factors import fold
from expertd_kernels.weights.scheme import ActivationQuant

# Why it is so: decision 67 in DECISIONS.md.
__all__ = ["build", "build_backend", "experts_of", "pack", "problem_of"]

_FACTORS = "hidden_factors"
"""Name of the packed tensor [H] f32 that hidden states are multiplied by before the experts see them."""


def problem_of(
    weights: Weights,
    device: Device,
    *,
    top_k: int = 1,
    compute_dtype: str = "bf16",
    activation_quant: ActivationQuant = ActivationQuant.NONE,
    router_weight_on_input: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    packages: Mapping[str, Package] | None = None,
) -> Problem:
    """The problem that these weights pose on `device`.  Features are read from the tensors, never guessed.

    packages: distributions to reckon with.  Default: those that rows of the table need and that are installed here.
    None of them is imported; oracle.probe.packages_for(device, BACKENDS) does that, so a broken one is refused."""
    return Problem(
        **_facts(weights),
        device=device,
        top_k=top_k,
        router_weight_on_input=router_weight_on_input,
        activation_quant=activation_quant,
        compute_dtype=compute_dtype,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        packages=installed_packages(table.BACKENDS) if packages is None else packages,
    )


def _facts(weights: Weights) -> dict[str, Any]:
    """The fields of Problem that weights tell by themselves."""
    return {
        "w13": weights.w13.scheme,
        "w2": weights.w2.scheme,
        "num_experts": weights.num_experts,
        "hidden_size": weights.hidden_size,
        "intermediate_size": weights.intermediate_size,
        "activation": weights.activation,
        "bias": weights.w13.bias is not None or weights.w2.bias is not None,
        "act_order": weights.w13.columns is not None or weights.w2.columns is not None,
        "checkpoint_activation": weights.checkpoint_activation,
        "static_scales": weights.input_scales is not None,
    }


def pack(backend: Backend, weights: Weights, problem: Problem) -> Packed:
    """`weights` in the layout of `backend`, on their device.  Raises Refused with the rules' sentences where the
    weights are not what the backend serves, or with the packer's where their values are not; ImportError."""
    if refusals := judge(backend, replace(problem, **_facts(weights))):
        raise Refused("; ".join(refusals))
    try:
        plain, factors = fold(weights)
    except ValueError as e:
        raise Refused(str(e)) from e
    packed = _module(backend).pack(plain, problem)
    return packed if factors is None else replace(packed, tensors={**packed.tensors, _FACTORS: factors})


def experts_of(backend: Backend, packed: Packed, problem: Problem) -> Experts:
    """The experts of what pack() gave, or of a mapped copy of it.  Raises what the backend's module raises."""
    experts, factors = _module(backend).experts(packed, problem), packed.tensors.get(_FACTORS)
    return experts if factors is None else _Multiplied(experts, factors)


def build_backend(backend: Backend, weights: Weights, problem: Problem) -> Experts:
    """Pack `weights` for `backend` and make its experts.  Raises Refused or ImportError."""
    return experts_of(backend, pack(backend, weights, problem), problem)


def build(decision: Decision, weights: Weights) -> Experts:
    """Pack `weights` for the chosen backend and make its experts.  Raises NoBackendError, Refused or ImportError."""
    return build_backend(decision.require(), weights, decision.problem)


class _Multiplied:
    """Experts whose hidden states are multiplied first, column by column; the products are rounded to their type."""

    def __init__(self, experts: Experts, factors: Tensor) -> None:
        """factors [H] f32."""
        self.backend, self._experts = experts.backend, experts
        self._factors = {torch.float32: factors} | {
            dtype: narrow
            for dtype in (torch.bfloat16, torch.float16)
            if bool(((narrow := factors.to(dtype)).float() == factors).all())
        }

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See protocol.Experts."""
        dtype = hidden_states.dtype
        x = (hidden_states * self._factors.get(dtype, self._factors[torch.float32])).to(dtype)
        return self._experts(x, topk_ids, topk_weights, router_weight_on_input=router_weight_on_input, out=out)


def _module(backend: Backend) -> BackendModule:
    return cast(BackendModule, backend_module(backend))
