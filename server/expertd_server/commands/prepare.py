"""expertd prepare: the kernels that a start would compile, in Triton's cache before it; needs no GPU and no weights.
For a backend of FlashInfer its MoE module instead, which no start builds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from expertd_server.config.resolve import add_flags, resolve
from expertd_server.config.serve import ConfigError

if TYPE_CHECKING:
    from expertd_kernels.backends.device import Nvidia
    from expertd_kernels.common.problem import Device

__all__ = ["add_parser", "run"]

_OPTIONS = (
    "checkpoint", "synthetic", "layer_template", "quantize", "layers", "experts", "shard", "backend", "compute_dtype",
    "activations", "deterministic", "max_tokens", "warm_up_routes",
)  # fmt: skip
GPUS = {"h100": ("NVIDIA H100 80GB HBM3", 132), "h200": ("NVIDIA H200", 132)}
"""Products -> name as the driver gives it, and multiprocessors: what plans of kernels follow."""
_HOPPER_BYTES = 232448
"""Of shared memory that one program may use on compute capability 9.0."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "prepare",
        help="compile the kernels that a start would compile",
        description="Compiles the Triton kernels that expertd serve with the same options would compile, in parallel,"
        " into Triton's cache (TRITON_CACHE_DIR): for an image, or a volume that servers share.  Reads headers, no"
        " weights.  A later start under the same version, packages and path of the cache finds them.  With --backend"
        " flashinfer_cutlass or flashinfer_trtllm it builds FlashInfer's MoE module instead, which takes nvcc, ninja, a"
        " C++ compiler and a quarter of an hour or more.",
    )
    add_flags(parser, _OPTIONS)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"NVIDIA GPU of this machine (auto, cuda[:N]), or one that need not be here: {', '.join(GPUS)}",
    )


def run(args: argparse.Namespace) -> int:
    from expertd_kernels.backends.flashinfer_build import MODULES
    from expertd_kernels.compiling.ahead import CompileAhead, usable_processes
    from expertd_kernels.compiling.marks import cache_folder
    from expertd_kernels.oracle.probe import installed_packages
    from expertd_kernels.oracle.table import BACKENDS
    from expertd_server.boot.assignment import BootError, assign_layers, open_source
    from expertd_server.boot.compiling import job_of

    try:
        config = resolve(args)
        device, gpu = _gpu(config.device)
        if config.backend in MODULES:
            return _build(config.backend, device)
        assignments = assign_layers(config, open_source(config), device, installed_packages(BACKENDS))
    except (ConfigError, BootError) as e:
        print(f"expertd prepare: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else e.exit_code
    job = job_of(gpu, assignments, config.warm_routes, config.max_tokens)
    if job is None:
        names = ", ".join(sorted({a.decision.chosen.name for a in assignments if a.decision.chosen})) or "none"
        print(f"nothing to compile: the backends of these layers compile no Triton kernels of ours ({names})")
        return 0
    ahead = CompileAhead.start(usable_processes())
    if ahead is None:
        print("expertd prepare: no process can be started", file=sys.stderr)
        return 1
    ahead.give(job)
    outcome = ahead.wait()
    ahead.close()
    print(f"{outcome}; in {cache_folder()}, for {gpu.name}")
    return 1 if outcome.faults else 0


def _build(backend: str, device: Device) -> int:
    """FlashInfer's module for a GPU of that kind; the exit code."""
    from expertd_kernels.backends.flashinfer_build import build_module

    assert device.capability is not None, "an NVIDIA GPU has one"
    try:
        library = build_module(backend, device.capability)
    except Exception as e:  # of the package, of its build, of a GPU that it has no module for
        print(f"expertd prepare: {type(e).__name__}: {e}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    print(f"{backend}: {library}")
    return 0


def _gpu(name: str) -> tuple[Device, Nvidia]:
    """Of this machine, or of GPUS.  Raises BootError."""
    from expertd_kernels.backends.device import Nvidia, nvidia_of
    from expertd_kernels.common.problem import NAMED_DEVICES
    from expertd_server.boot.assignment import BootError, WrongOptionError, resolve_device

    if name.lower() in GPUS:
        product, multiprocessors = GPUS[name.lower()]
        device = NAMED_DEVICES["sm90"]
        return device, Nvidia(product, device.capability, multiprocessors, _HOPPER_BYTES)
    wanted = f"want an NVIDIA GPU of this machine, or one of {', '.join(GPUS)}"
    try:
        device, where = resolve_device(name)
    except BootError as e:
        raise WrongOptionError(f"{e}; {wanted}") from e
    gpu = nvidia_of(where)
    if gpu is None:
        raise WrongOptionError(f"--device: got {name}, {wanted}")
    return device, gpu
