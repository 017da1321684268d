"""The composition root: from a configuration to layers that are ready to compute.

    config -> source -> oracle for each layer -> load and pack layer by layer -> self-check -> warm-up

Everything that may fail before the first answer fails here, with one sentence (BootError).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from expertd_kernels.oracle import Backend, Decision, NoBackendError, Refused, decide
from expertd_kernels.problem import Device, Package
from expertd_kernels.scheme import ActivationQuant
from expertd_kernels.source import ExpertSource, LayerInfo
from expertd_kernels.table import BACKENDS
from expertd_server.batch import ServedLayer
from expertd_server.config import ServeConfig
from expertd_server.render import span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from expertd_kernels.backends.protocol import Experts
    from expertd_kernels.canonical import Weights

__all__ = [
    "Booted",
    "BootError",
    "LayerPlan",
    "Stopped",
    "boot_layer",
    "boot_layers",
    "open_source",
    "plan_layers",
    "resolve_device",
    "without",
]

log = logging.getLogger(__name__)

_WARM_UP_CPU = (1, 32)
_WARM_UP_DEVICE = tuple(1 << i for i in range(11))
"""Batch sizes that are run once before SERVING: kernels that compile or choose on first use do it then.  On a CPU
nothing compiles; on an accelerator a size met first under load would hold up its callers for a compiler's run."""


class BootError(Exception):
    """The server cannot start.  The text is one sentence for the user (a refusal has the oracle's table under it)."""


class Stopped(Exception):  # noqa: N818 - asked for, not an error
    """SIGTERM came while the server was loading."""


@dataclass(frozen=True)
class LayerPlan:
    """What will be served of one layer, known before any weight is read.  held: global ids of the experts."""

    info: LayerInfo
    held: tuple[int, ...]
    decision: Decision


@dataclass(frozen=True, eq=False)
class Booted:
    """A layer that passed its self-check.  error, tolerance: relative, against the float32 reference."""

    plan: LayerPlan
    served: ServedLayer
    error: float
    tolerance: float
    seconds: float


def open_source(config: ServeConfig) -> ExpertSource:
    """The checkpoint or the synthetic model, quantized while loading if that is asked.  Raises BootError."""
    source: ExpertSource
    try:
        if config.synthetic is not None:
            from expertd_kernels.synthetic import SyntheticModel

            source = SyntheticModel.parse(config.synthetic)
        else:
            from expertd_kernels.checkpoint import open_checkpoint

            assert config.checkpoint is not None
            # pyright holds a cached_property apart from the str that the protocol's property gives.
            source = cast("ExpertSource", open_checkpoint(config.checkpoint, layer_template=config.layer_template))
        if config.quantize is not None:
            from expertd_kernels.quantized_source import QuantizedSource

            source = QuantizedSource(source, config.quantize)
    except (ValueError, OSError) as e:
        raise BootError(str(e)) from e
    return source


def resolve_device(name: str) -> tuple[Device, torch.device]:
    """What the oracle and what torch call the device.  Raises BootError where it is not there."""
    from expertd_kernels.probe import detect_device

    try:
        device = detect_device(name)
    except (RuntimeError, ValueError) as e:
        raise BootError(str(e)) from e
    kind = "cuda" if device.kind == "rocm" else device.kind
    return device, torch.device(name if ":" in name else kind)


def plan_layers(
    config: ServeConfig, source: ExpertSource, device: Device, packages: Mapping[str, Package]
) -> list[LayerPlan]:
    """The oracle's decision for each layer asked for, from headers alone; a decision may have nothing chosen.  Raises
    BootError."""
    wanted = source.layers if config.layers is None else config.layers.numbers
    missing = [n for n in wanted if n not in source.layers]
    if missing:
        raise BootError(
            f"--layers: got {config.layers}, but layer {missing[0]} has no experts; layers with experts:"
            f" {span(source.layers)}"
        )
    plans = []
    for n in wanted:
        try:
            info = source.info(n)
        except (ValueError, KeyError, OSError) as e:
            raise BootError(f"layer {n}: {e}") from e
        held = _held(config, info)
        problem = info.problem(
            device,
            held=len(held),
            activation_quant=info.checkpoint_activation if config.activations == "checkpoint" else ActivationQuant.NONE,
            compute_dtype=config.compute,
            packages=packages,
        )
        try:
            plans.append(LayerPlan(info, held, decide(problem, pin=config.pin(n))))
        except ValueError as e:  # a pin that names no row
            raise BootError(f"--backend: {e}") from e
    return plans


def _held(config: ServeConfig, info: LayerInfo) -> tuple[int, ...]:
    if config.shard is not None:
        held = tuple(config.shard.experts(info.num_experts))
        if not held:
            raise BootError(
                f"--shard {config.shard}: layer {info.layer} has {info.num_experts} experts, too few for"
                f" {config.shard.count} parts"
            )
        return held
    if config.experts is not None:
        if config.experts.numbers[-1] >= info.num_experts:
            raise BootError(
                f"--experts: got {config.experts}, but layer {info.layer} has the experts 0 to {info.num_experts - 1}"
            )
        return config.experts.numbers
    return tuple(range(info.num_experts))


def boot_layer(plan: LayerPlan, source: ExpertSource, device: torch.device) -> Booted:
    """Load, pack, check and warm up one layer.  The canonical weights are gone when it returns, so the peak of memory
    is the packed layers and one canonical one.  Raises BootError."""
    from expertd_kernels.selfcheck import boot_reference_experts, self_check

    start = time.perf_counter()
    info, n = plan.info, plan.info.layer
    try:
        every = len(plan.held) == info.num_experts
        weights = source.load(n, None if every else plan.held)
    except (ValueError, OSError) as e:
        raise BootError(f"layer {n}: {e}") from e
    weights = weights.to(device)
    decision, experts = _build(plan.decision, weights, n)
    chosen = decision.require()
    check = self_check(
        experts, weights, decision.problem, reference_experts=boot_reference_experts(weights), device=device
    )
    if not check.ok:
        raise BootError(
            f"layer {n}: self-check of backend {chosen.name} against the float32 reference: {check.fault}; choose"
            " another --backend, and report this"
        )
    served = ServedLayer(
        layer=n,
        num_experts=info.num_experts,
        held=plan.held,
        top_k=info.top_k,
        hidden_size=info.hidden_size,
        intermediate_size=info.intermediate_size,
        experts=experts,
        backend=chosen.name,
        input_weights=chosen.router_weight_on_input,
    )
    _warm_up(served, device, decision.problem.compute_dtype)
    plan = replace(plan, decision=decision)
    return Booted(plan, served, check.relative_error, check.tolerance, time.perf_counter() - start)


def _build(decision: Decision, weights: Weights, layer: int) -> tuple[Decision, Experts]:
    """Pack for the chosen backend.  Where the choice is the oracle's, a backend that refuses or fails gets that as its
    verdict and the next eligible one is taken; a pinned one is taken or BootError raised."""
    from expertd_kernels.builder import build

    while True:
        try:
            return decision, build(decision, weights)
        except NoBackendError as e:
            raise BootError(f"layer {layer}: {e}") from e
        except Exception as e:
            name = decision.require().name
            why = str(e) if isinstance(e, Refused) else f"{type(e).__name__}: {e}"
            if decision.pinned:
                raise BootError(f"layer {layer}: the pinned backend {name} cannot take the weights: {why}") from e
            log.warning("layer %d: backend %s cannot take the weights: %s; the next one is tried", layer, name, why)
            decision = without(decision, name, f"when packing: {why}", BACKENDS)


def without(decision: Decision, backend: str, refusal: str, backends: Sequence[Backend]) -> Decision:
    """The decision after `backend` turned out not to serve: its refusal in the table, the next eligible row chosen."""
    verdicts = tuple(
        replace(v, refusals=(*v.refusals, refusal)) if v.backend == backend else v for v in decision.verdicts
    )
    eligible = [v.backend for v in verdicts if v.eligible]
    chosen = next((b for name in eligible for b in backends if b.name == name), None)
    return replace(decision, verdicts=verdicts, chosen=chosen)


def _warm_up(layer: ServedLayer, device: torch.device, compute_dtype: str) -> None:
    from expertd_kernels.synthetic import random_inputs

    dtype = torch.float32 if compute_dtype == "f32" else torch.bfloat16
    held = len(layer.held)
    for tokens in _WARM_UP_CPU if device.type == "cpu" else _WARM_UP_DEVICE:
        x, ids, w = random_inputs(tokens, layer.hidden_size, held, min(layer.top_k, held), dtype=dtype, device=device)
        with torch.inference_mode():
            layer.experts(x, ids, w)


def boot_layers(
    plans: Sequence[LayerPlan],
    source: ExpertSource,
    device: torch.device,
    *,
    done: Callable[[Booted], None],
    stopped: Callable[[], bool],
) -> list[Booted]:
    """Boot the layers one after another; done() after each.  Raises BootError, or Stopped once stopped() says so."""
    out = []
    for plan in plans:
        if stopped():
            raise Stopped
        out.append(boot_layer(plan, source, device))
        done(out[-1])
    return out
