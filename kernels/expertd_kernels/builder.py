"""From a decision and canonical weights to experts that compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from expertd_kernels.oracle import table
from expertd_kernels.oracle.decision import Decision, backend_module
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.problem import Device, Package, Problem
from expertd_kernels.protocol import BackendModule, Experts
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["build", "problem_of"]


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

    packages: distributions to reckon with; default: those that rows of the table need and that are installed here."""
    return Problem(
        device=device,
        w13=weights.w13.scheme,
        w2=weights.w2.scheme,
        num_experts=weights.num_experts,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        top_k=top_k,
        activation=weights.activation,
        bias=weights.w13.bias is not None or weights.w2.bias is not None,
        act_order=weights.w13.columns is not None or weights.w2.columns is not None,
        router_weight_on_input=router_weight_on_input,
        activation_quant=activation_quant,
        checkpoint_activation=weights.checkpoint_activation,
        compute_dtype=compute_dtype,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        packages=installed_packages(table.BACKENDS) if packages is None else packages,
    )


def build(decision: Decision, weights: Weights) -> Experts:
    """Pack `weights` for the chosen backend and make its experts.  Raises NoBackendError, Refused or ImportError."""
    module = cast(BackendModule, backend_module(decision.require()))
    return module.experts(module.pack(weights, decision.problem), decision.problem)
