"""The packed matrices of a layer on the GPU, and the constants of their GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.constants import Gemm, Tile
from expertd_kernels.backends.gluon.weight_only.packed_matrix import TILE, round_up
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.serial import activation_from_json, scheme_from_json

__all__ = ["Matrix", "gemms"]


@dataclass(frozen=True)
class Matrix:
    """The packed tensors of w13 or w2 on the GPU, and the constants of its GEMM."""

    gemm: Gemm
    codes: Tensor  # [E, rows/64, units, 4, 32, 4] int32: bf16, too
    scales: Tensor  # packed scales; codes where there are none (never read)
    bias: Tensor  # [E, rows] f32; empty where there is none (never read)
    unscale: float

    def descriptor(self, t: Tile) -> TensorDescriptor:
        """The bulk copy's view: [row tiles of all experts, units * 16, 32] words, a stage a box."""
        E, T, units = self.codes.shape[:3]
        box = [t.T, 16 * t.stage_units, 32]
        return TensorDescriptor(self.codes, [E * T, units * 16, 32], [units * 512, 32, 1], box, t.SW)


def gemms(packed: Packed, top_k: int, weight_on_input: bool) -> tuple[Gemm, Gemm]:
    """w13's and w2's."""
    a: Activation = activation_from_json(packed.meta["activation"])
    H, I = packed.meta["w2"]["shape"][1:]
    E = packed.meta["w2"]["shape"][0]
    Hp, Ip = round_up(H, TILE), round_up(I, TILE)
    c13, c2 = (codec_of(scheme_from_json(packed.meta[n]["scheme"])) for n in ("w13", "w2"))
    w13 = Gemm(
        c13,
        K=Hp,
        rows=a.segments * Ip // TILE,
        x_columns=H,
        x_stride=H,
        out_columns=Ip,
        experts=E,
        top_k=top_k,
        first=True,
        gated=a.gated,
        weight=weight_on_input,
        bias="w13.bias" in packed.tensors,
        act=a.kind.value,
        alpha=a.alpha,
        beta=a.beta,
        limit=a.limit or 0.0,
        limited=a.limit is not None,
    )
    w2 = Gemm(
        c2,
        K=Ip,
        rows=Hp // TILE,
        x_columns=Ip,
        x_stride=Ip,
        out_columns=H,
        experts=E,
        top_k=top_k,
        first=False,
        gated=False,
        weight=not weight_on_input,
        bias="w2.bias" in packed.tensors,
    )
    return w13, w2
