"""From a configuration to what will be served of each layer, by headers alone: no weight is read.

    config -> source -> device -> experts held -> the oracle's decision for each layer

Everything that can be refused here is refused with one sentence (BootError).  Imports no torch by itself.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from expertd.common.ranges import format_ranges
from expertd_kernels.common.problem import Device, Package
from expertd_kernels.oracle import table
from expertd_kernels.oracle.decision import Decision, decide
from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Pins

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

# Why it is so: decision 4 in DECISIONS.md.
__all__ = [
    "BootError",
    "WrongOptionError",
    "Assignment",
    "files_state",
    "open_source",
    "assign_layers",
    "resolve_device",
]


class BootError(Exception):
    """The server cannot start.  The text is one sentence for the user (a refusal has the oracle's table under it).

    exit_code: of the command.  1 = another start may succeed: a port or memory was taken, a backend failed."""

    exit_code = 1


class WrongOptionError(BootError):
    """An option, or a file that an option names, is wrong: every start with the same options fails in the same way.  A
    supervisor must not start the server again."""

    exit_code = 2


@dataclass(frozen=True)
class Assignment:
    """What this server takes of one layer, and on which backend.

    held      global ids of the experts
    decision  where the layer has parts: that of the first, for all its experts
    parts     (number of its site, what it takes), of a layer that devices share; () = one device takes it all
    why       of a part, why these experts are there
    """

    info: LayerInfo
    held: tuple[int, ...]
    decision: Decision
    parts: tuple[tuple[int, Assignment], ...] = ()
    why: str = ""

    @property
    def each(self) -> tuple[Assignment, ...]:
        """What is loaded by itself: the parts, or this."""
        return tuple(part for _, part in self.parts) or (self,)

    @property
    def whole(self) -> bool:
        """Whether every expert of the layer is held."""
        return len(self.held) == self.info.num_experts

    @property
    def chosen_by(self) -> str:
        """Who chose the backend: "pin" (the user), "measure" or "order" (the oracle)."""
        if self.decision.pinned:
            return "pin"
        return "measure" if any(v.times for v in self.decision.verdicts) else "order"


def open_source(config: ServeConfig, device: torch.device | str = "cpu") -> ExpertSource:
    """The checkpoint or the synthetic model, quantized while loading if that is asked.  device: where weights that are
    drawn are to be.  Raises BootError."""
    source: ExpertSource
    try:
        if config.synthetic is not None:
            from expertd_kernels.sources.synthetic import SyntheticModel

            source = SyntheticModel.parse(config.synthetic, device)
        else:
            from expertd_kernels.checkpoint import open_checkpoint

            assert config.checkpoint is not None
            if not config.checkpoint.is_dir():
                kept = "" if config.held is None else "; after an update --held needs the folder from before it, too"
                raise WrongOptionError(
                    f"--checkpoint {config.checkpoint}: is no folder here; want one with config.json and safetensors"
                    f" files, such as a volume that is mounted there{kept}"
                )
            # pyright holds a cached_property apart from the str that the protocol's property gives.
            source = cast("ExpertSource", open_checkpoint(config.checkpoint, layer_template=config.layer_template))
        if config.quantize is not None:
            from expertd_kernels.sources.quantized import QuantizedSource

            source = QuantizedSource(source, config.quantize)
    except (ValueError, FileNotFoundError, NotADirectoryError) as e:
        raise WrongOptionError(str(e)) from e
    except OSError as e:
        raise BootError(str(e)) from e
    return source


def files_state(config: ServeConfig) -> str:
    """Hex digest of names, sizes and times of change of the checkpoint's files, and of how they are to be read: weights
    that were packed from other files are not these.  "" for a synthetic model."""
    if config.checkpoint is None:
        return ""
    digest = hashlib.sha256(f"{config.layer_template}\n".encode())
    for path in sorted(config.checkpoint.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def resolve_device(name: str) -> tuple[Device, torch.device]:
    """What the oracle and what torch call the device; this thread computes there from now on.  Raises BootError where
    it is not there."""
    import torch

    from expertd_kernels.oracle.probe import detect_device, use_device

    try:
        device = detect_device(name)
    except (RuntimeError, ValueError) as e:
        raise WrongOptionError(str(e)) from e
    kind = "cuda" if device.kind == "rocm" else device.kind  # torch's name for both
    _, sep, index = name.partition(":")
    where = torch.device(kind + sep + index)
    use_device(where)
    return device, where


def assign_layers(
    config: ServeConfig, source: ExpertSource, device: Device, packages: Mapping[str, Package]
) -> list[Assignment]:
    """The oracle's decision for each layer asked for; a decision may have nothing chosen.  Raises BootError."""
    return Assigner(config, source, device, packages).all()


class Assigner:
    """What a configuration says of the layers of a source, one by one."""

    def __init__(
        self,
        config: ServeConfig,
        source: ExpertSource,
        device: Device,
        packages: Mapping[str, Package],
        joint: bool = False,
    ) -> None:
        """joint: there are other devices, and a pinned backend may be for one of those.  Raises BootError for a pin
        that would do nothing."""
        self._config, self._source, self._device, self._packages = config, source, device, packages
        self._pins, self._joint = _pins(config, source), joint

    def of(self, source: ExpertSource) -> Assigner:
        """The same for another source of the same model, or of some of its layers."""
        out = copy.copy(self)
        out._source = source
        return out

    def all(self) -> list[Assignment]:
        """Of each layer that the configuration asks for.  Raises BootError."""
        wanted = self._source.layers if self._config.layers is None else self._config.layers.numbers
        self.require_layers(wanted, f"--layers: got {self._config.layers}")
        return [self.layer(n) for n in wanted]

    def these(self, held: Mapping[int, Collection[int]]) -> list[Assignment]:
        """Of these experts, by layer.  Raises BootError."""
        self.require_layers(held, f"layers to hold: got {format_ranges(held)}")
        return [self.layer(n, experts) for n, experts in sorted(held.items()) if experts]

    def require_layers(self, layers: Iterable[int], got: str) -> None:
        """Raises BootError where one of them has no experts.  got: how the sentence begins."""
        missing = sorted(set(layers) - set(self._source.layers))
        if missing:
            raise WrongOptionError(
                f"{got}, but layer {missing[0]} has no experts; layers with experts:"
                f" {format_ranges(self._source.layers)}"
            )

    def layer(self, n: int, held: Collection[int] | None = None) -> Assignment:
        """The oracle's decision for layer n and the experts `held`; None: those that the configuration asks for.  It
        may have nothing chosen.  Raises BootError."""
        config = self._config
        try:
            info = self._source.info(n)
        except (ValueError, KeyError) as e:
            raise WrongOptionError(f"layer {n}: {e}") from e
        except OSError as e:
            raise BootError(f"layer {n}: {e}") from e
        experts = _held(config, info) if held is None else tuple(sorted(held))
        if experts and not 0 <= experts[0] <= experts[-1] < info.num_experts:
            raise WrongOptionError(
                f"layer {n}: got the experts {format_ranges(experts)}, want some of 0 to {info.num_experts - 1}"
            )
        problem = info.problem(
            self._device,
            held=len(experts),
            activation_quant=info.checkpoint_activation if config.activations == "checkpoint" else ActivationQuant.NONE,
            compute_dtype=config.compute,
            deterministic=config.deterministic != "no",
            batch_invariant=config.deterministic == "batches",
            packages=self._packages,
        )
        decision = decide(problem, pin=self._pins(n))
        if self._joint and any(v.backend == decision.pin and v.elsewhere for v in decision.verdicts):
            decision = decide(problem)
        return Assignment(info, experts, decision)


def _pins(config: ServeConfig, source: ExpertSource) -> Pins:
    """The backends that the user demands; BootError for a layer or a name that is not there: it would do nothing."""
    pins = config.pins
    if odd := sorted(pins.layers - set(source.layers)):
        raise WrongOptionError(
            f"--backend: got {config.backend}, but layer {odd[0]} has no experts; layers with experts:"
            f" {format_ranges(source.layers)}"
        )
    known = sorted(b.name for b in table.BACKENDS)
    if wrong := sorted(pins.names - set(known)):
        names = ", ".join(known)
        raise WrongOptionError(f"--backend: got {config.backend}, want for {wrong[0]!r} one of {names} or auto")
    return pins


def _held(config: ServeConfig, info: LayerInfo) -> tuple[int, ...]:
    if config.shard is not None:
        if config.shard.count > info.num_experts:
            raise WrongOptionError(
                f"--shard {config.shard}: layer {info.layer} has {info.num_experts} experts, too few for"
                f" {config.shard.count} shards"
            )
        return tuple(config.shard.experts(info.num_experts))
    if config.experts is not None:
        if config.experts.numbers[-1] >= info.num_experts:
            raise WrongOptionError(
                f"--experts: got {config.experts}, but layer {info.layer} has the experts 0 to {info.num_experts - 1}"
            )
        return config.experts.numbers
    return tuple(range(info.num_experts))
