"""Random canonical weights of any scheme, on the quantization grid, and a synthetic model made of them.

Values have a standard deviation near 1 / sqrt(K), so that the layer's output is of the input's order; no tensor is
zero anywhere by construction, and zero points, scale signs and biases vary, so that a kernel that drops one is seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from expertd_kernels.sources.counted import CODE_SPREAD, counted_matrix
from expertd_kernels.sources.source import LayerInfo
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, Weights
from expertd_kernels.weights.models import MODELS, ModelShape
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

__all__ = ["SyntheticModel", "random_inputs", "random_matrix", "random_weights"]


def random_matrix(
    scheme: Scheme,
    shape: tuple[int, int, int],
    *,
    segments: int = 1,
    bias: bool = False,
    act_order: bool = False,
    signed_scales: bool = False,
    generator: torch.Generator,
) -> QuantTensor:
    """[E, N, K] random codes with random scales.  signed_scales: about half of the scales negative (not e8m0)."""
    E, N, K = shape
    dev = generator.device

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, device=dev, generator=generator)

    def randint(low: int, high: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, size, device=dev, generator=generator, dtype=dtype)

    element, std = scheme.element, 1.0 / math.sqrt(K)
    scales = zeros = global_scales = None
    if element.quantized:
        scale_shape = (E, *scheme.scale_shape(N, K, segments))
        unit = std / CODE_SPREAD[element]
        if scheme.global_scale:
            global_scales = (0.5 + rand(E, segments)) * (unit / 4.0)
            unit = 4.0
        if scheme.scale is ScaleType.E8M0:
            center = 127 + round(math.log2(unit))
            scales = randint(center - 1, center + 2, scale_shape, torch.uint8)
        else:
            s = (0.5 + rand(*scale_shape)) * unit
            if signed_scales:
                s = s * (randint(0, 2, scale_shape, torch.int64) * 2 - 1)
            scales = s.to(SCALE_DTYPE[scheme.scale])
        if scheme.zeros:
            low, high = (0, 16) if element is Element.INT4 else (-20, 21)
            zeros = randint(low, high, scale_shape, CODE_DTYPE[element])
    if element.packed:
        codes = randint(0, 256, (E, N, -(-K // 2)), torch.uint8)
        if K % 2:
            codes[..., -1] &= 15
    elif element is Element.INT8:
        codes = randint(-127, 128, (E, N, K), torch.int8)
    else:
        codes = torch.empty((E, N, K), dtype=CODE_DTYPE[element], device=dev)
        factor = 64.0 if element is Element.E4M3 else std
        for e in range(E):  # one expert at a time: the f32 normals of a real layer would be gigabytes
            codes[e] = (torch.randn(N, K, device=dev, generator=generator) * factor).to(codes.dtype)
    columns = None
    if act_order:
        columns = torch.stack([torch.randperm(K, device=dev, generator=generator) for _ in range(E)]).int()
    b = torch.randn(E, N, device=dev, generator=generator) * 0.1 if bias else None
    return QuantTensor(scheme, shape, codes, scales, zeros, global_scales, columns, b, segments)


def random_weights(
    scheme: Scheme | str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    activation: Activation | None = None,
    bias: bool = False,
    act_order: bool = False,
    signed_scales: bool = False,
    w2_scheme: Scheme | str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Weights:
    """A random layer.  Schemes by name ("int4_g128_zp") or as values; w2_scheme: another one for w2."""
    a = activation or Activation()
    s13 = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    other = w2_scheme if w2_scheme is not None else s13
    s2 = Scheme.parse(other) if isinstance(other, str) else other
    g = torch.Generator(device=device)
    g.manual_seed(seed)
    E, H, I, seg = num_experts, hidden_size, intermediate_size, a.segments
    w13 = random_matrix(
        s13, (E, seg * I, H), segments=seg, bias=bias, act_order=act_order, signed_scales=signed_scales, generator=g
    )
    w2 = random_matrix(s2, (E, H, I), bias=bias, act_order=act_order, signed_scales=signed_scales, generator=g)
    return Weights(w13, w2, a)


def random_inputs(
    tokens: int,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    zipf_exponent: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states [M, H] ~ normal(0, 1); topk_ids [M, k] int32, different experts a token, uniform or Zipf
    (probability of expert e ~ 1 / (e + 1) ** zipf_exponent); topk_weights [M, k] f32, softmax of normals."""
    g = torch.Generator(device=device)
    g.manual_seed(seed)
    x = torch.randn(tokens, hidden_size, device=device, generator=g).to(dtype)
    rank = torch.arange(1, num_experts + 1, device=device, dtype=torch.float32)
    # Gumbel top-k draws top_k different experts with probability proportional to rank ** -zipf_exponent.
    u = torch.rand(tokens, num_experts, device=device, generator=g).clamp_min(1e-20)
    key = -zipf_exponent * rank.log() - torch.log(-torch.log(u))
    ids = key.topk(top_k, dim=1).indices.to(torch.int32)
    w = torch.randn(tokens, top_k, device=device, generator=g).softmax(dim=1)
    return x, ids, w


class SyntheticModel:
    """A source of random experts with a public model's shape: "qwen3-30b-a3b:int4_g128".

    Expert e of layer l is the same whichever experts are asked for together, and on whatever device it is drawn, so
    shards of one synthetic model agree.  device: where load() draws.
    """

    def __init__(self, shape: ModelShape, scheme: Scheme, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.scheme = scheme
        self.device = torch.device(device)
        self.family = shape.family
        self.layers = shape.layers
        self.fingerprint = hashlib.sha256(f"synthetic 2 {shape} {scheme}".encode()).hexdigest()

    @classmethod
    def parse(cls, text: str, device: torch.device | str = "cpu") -> SyntheticModel:
        """From "MODEL:SCHEME".  ValueError lists the known models."""
        name, sep, scheme = text.partition(":")
        if name not in MODELS or not sep:
            raise ValueError(
                f"synthetic model {text!r}: want MODEL:SCHEME, as qwen3-30b-a3b:int4_g128; models: {', '.join(MODELS)}"
            )
        return cls(MODELS[name], Scheme.parse(scheme), device)

    def info(self, layer: int) -> LayerInfo:
        s = self.shape
        if layer not in s.layers:
            raise KeyError(f"layer {layer} of {s.name}: it has experts in layers {s.layers[0]} to {s.layers[-1]}")
        return LayerInfo(
            layer,
            s.num_experts,
            s.top_k,
            s.hidden_size,
            s.intermediate_size,
            self.scheme,
            self.scheme,
            s.activation,
            bias=s.bias,
            notes=("synthetic random weights",),
        )

    def load(self, layer: int, experts: Sequence[int] | None = None) -> Weights:
        info = self.info(layer)
        seeds = [(layer << 16) + e for e in (range(info.num_experts) if experts is None else experts)]
        E, H, I, seg = len(seeds), info.hidden_size, info.intermediate_size, info.activation.segments

        def drawn(name: str, shape: tuple[int, int, int], segments: int) -> QuantTensor:
            return counted_matrix(
                self.scheme, shape, seeds, name, segments=segments, bias=info.bias, device=self.device
            )

        return Weights(drawn("w13", (E, seg * I, H), seg), drawn("w2", (E, H, I), 1), info.activation)
