"""What the oracle is asked: a layer on a device.  Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

__all__ = ["Device", "NAMED_DEVICES", "Package", "Problem"]


@dataclass(frozen=True)
class Device:
    """A kind of hardware.

    kind        "cpu", "cuda", "rocm", "xpu"
    capability  CUDA compute capability (9, 0); ROCm gfx version (9, 4, 2) -> (9, 42); (0, 0) where it means nothing
    arch        "sm90", "gfx942", "xe2", "x86_64", "aarch64": the name that rules and tables print
    features    of a CPU: "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", ...
    """

    kind: str
    arch: str
    capability: tuple[int, int] = (0, 0)
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}"


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}

NAMED_DEVICES: Mapping[str, Device] = {
    "cpu-portable": Device("cpu", "x86_64"),
    "cpu-avx2": Device("cpu", "x86_64", features=_AVX2),
    "cpu-avx512": Device("cpu", "x86_64", features=_AVX512_BF16),
    "cpu-amx": Device("cpu", "x86_64", features=_AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
    "cpu-arm": Device("cpu", "aarch64", features=frozenset({"neon"})),
    "sm80": Device("cuda", "sm80", (8, 0)),
    "sm86": Device("cuda", "sm86", (8, 6)),
    "sm89": Device("cuda", "sm89", (8, 9)),
    "sm90": Device("cuda", "sm90", (9, 0)),
    "sm100": Device("cuda", "sm100", (10, 0)),
    "sm103": Device("cuda", "sm103", (10, 3)),
    "sm120": Device("cuda", "sm120", (12, 0)),
    "gfx942": Device("rocm", "gfx942", (9, 42)),
    "gfx950": Device("rocm", "gfx950", (9, 50)),
    "gfx1100": Device("rocm", "gfx1100", (11, 0)),
    "xpu-xe2": Device("xpu", "xe2", (2, 0)),
    "xpu-xe3": Device("xpu", "xe3", (3, 0)),
}
"""Hardware that can be asked about without having it: `expertd explain --device NAME`."""


@dataclass(frozen=True)
class Package:
    """An installed distribution.  error: why its import failed, "" if it was not tried or went well; remedy: the
    command that mends it where pip does not."""

    version: str
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Problem:
    """One layer to be served on one device.

    w13, w2               schemes of the two matrices
    num_experts           held here (E); hidden_size H; intermediate_size I; top_k of the router
    bias                  whether experts have biases
    act_order             whether code columns are permuted (GPTQ desc_act, compressed-tensors actorder=group)
    router_weight_on_input  the self-check calls with the router weight on the input (top_k 1); every row takes it
    activation_quant      how activations are to be rounded; NONE = weight-only
    checkpoint_activation how the checkpoint asks for it
    static_scales         whether static activation scales come with the weights
    compute_dtype         "bf16" or "f32": element type of the activations inside the kernel
    deterministic         bit-identical from run to run is demanded
    batch_invariant       so is that a token's bits do not depend on the batch that it is computed in
    packages              installed distributions by name, as found on this machine (or assumed for another)
    """

    device: Device
    w13: Scheme
    w2: Scheme
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int = 1
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    act_order: bool = False
    router_weight_on_input: bool = False
    activation_quant: ActivationQuant = ActivationQuant.NONE
    checkpoint_activation: ActivationQuant = ActivationQuant.NONE
    static_scales: bool = False
    compute_dtype: str = "bf16"
    deterministic: bool = False
    batch_invariant: bool = False
    packages: Mapping[str, Package] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size", "intermediate_size", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"problem: {name} is {getattr(self, name)}, want >= 1")
        if self.compute_dtype not in ("bf16", "f32"):
            raise ValueError(f"problem: compute dtype {self.compute_dtype!r}, want bf16 or f32")

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The distinct schemes of the layer: one, or two for a layer that mixes."""
        return (self.w13,) if self.w13 == self.w2 else (self.w13, self.w2)

    @property
    def scheme_name(self) -> str:
        """ "int4_g128", or "int4_g128+bf16" where w13 and w2 differ."""
        return "+".join(dict.fromkeys(s.name for s in self.schemes))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer's weights as formats store them, without biases."""
        H, I = self.hidden_size, self.intermediate_size
        seg = self.activation.segments
        return self.num_experts * (self.w13.nbytes(seg * I, H, seg) + self.w2.nbytes(H, I))
