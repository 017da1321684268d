"""Where experts come from: a checkpoint on disk or a synthetic model.  One seam, so that the server knows neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from expertd_kernels.common.problem import Device, Package, Problem
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from expertd_kernels.weights.canonical import Weights

__all__ = ["ExpertSource", "LayerInfo"]


@dataclass(frozen=True)
class LayerInfo:
    """What is known of a layer without reading its weights.

    num_experts      of the whole model (global ids are 0..num_experts - 1)
    w13, w2          schemes of the canonical matrices that load() will return
    bias, act_order, static_scales  (of activations) read from the tensors that are there, never guessed
    notes            sentences for the user: "gate_proj is f16 and up_proj int4_g64: w13 is widened to f32"
    """

    layer: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    w13: Scheme
    w2: Scheme
    activation: Activation
    bias: bool = False
    act_order: bool = False
    checkpoint_activation: ActivationQuant = ActivationQuant.NONE
    static_scales: bool = False
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        """Whether one of the two matrices is."""
        return self.w13.element.quantized or self.w2.element.quantized

    def problem(
        self,
        device: Device,
        *,
        held: int | None = None,
        activation_quant: ActivationQuant = ActivationQuant.NONE,
        compute_dtype: str = "bf16",
        deterministic: bool = False,
        batch_invariant: bool = False,
        packages: Mapping[str, Package] | None = None,
    ) -> Problem:
        """The problem that serving `held` experts (default: all) of this layer on `device` poses."""
        return Problem(
            device=device,
            w13=self.w13,
            w2=self.w2,
            num_experts=self.num_experts if held is None else held,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            top_k=self.top_k,
            activation=self.activation,
            bias=self.bias,
            act_order=self.act_order,
            activation_quant=activation_quant,
            checkpoint_activation=self.checkpoint_activation,
            static_scales=self.static_scales,
            compute_dtype=compute_dtype,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
            packages=packages or {},
        )


class ExpertSource(Protocol):
    """A model's experts, layer by layer.

    family        "qwen3_moe", "gpt_oss", ...
    fingerprint   hex digest that replicas and shards of one model share: of config and tensor index, not of the path
    layers        numbers of the MoE layers, ascending
    """

    @property
    def family(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    def info(self, layer: int) -> LayerInfo:
        """Facts of one layer, from headers alone."""
        ...

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        """Canonical weights of the experts with these global ids, in this order (None = all), on the CPU; of a source
        that makes them, on the device that it was opened for."""
        ...
