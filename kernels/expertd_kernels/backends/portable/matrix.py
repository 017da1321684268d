"""One packed matrix as the kernels take it: its tensors, its layout, its sizes, and the constants they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from expertd_kernels.backends.portable.layout import ELEM, ROW_TILE, Layout
from expertd_kernels.backends.portable.tiling import Tile
from expertd_kernels.backends.portable.unpack import leftover
from expertd_kernels.weights.scheme import Element

__all__ = ["Matrix"]

INTEGERS = (ELEM[Element.INT4], ELEM[Element.INT8])


@dataclass(frozen=True, eq=False)
class Matrix:
    """tensors by name (layout.pack_matrix); n: rows of one of `segments` segments; k: columns."""

    tensors: Mapping[str, Tensor]
    layout: Layout
    n: int
    k: int
    segments: int

    def pointer(self, name: str) -> Tensor:
        """The tensor, or any other where there is none: the kernel does not read it."""
        return self.tensors.get(name, self.tensors["codes"])

    def has(self, name: str) -> bool:
        return name in self.tensors

    def weighted(self, tile: Tile) -> int:
        """How this tile multiplies scales: unpack.FOLD_NONE, FOLD_BF16 or FOLD_F32."""
        lay = self.layout
        if lay.odd:
            return 1
        always = lay.fold == 1 and lay.elem not in INTEGERS  # e8m0 and e4m3 scales: the product is exact
        return lay.fold if lay.group > 0 and (tile.weighted or always) else 0

    def sizes(self) -> dict[str, Any]:
        """Constants of both kinds of GEMM."""
        return {
            "N": self.n,
            "K": self.k,
            "NP": -(-self.n // ROW_TILE) * ROW_TILE,
            "SEGMENTS": self.segments,
            "ROWS": self.layout.rows,
            "SW": self.layout.sw,
            "SBITS": self.layout.sbits,
            "SKIND": self.layout.skind,
            "GLOBAL": self.has("global_scales"),
            "BIAS": self.has("bias"),
        }

    def groups(self) -> dict[str, Any]:
        """Constants of both: what a code is, and what shares a scale."""
        lay = self.layout
        return {"ELEM": lay.elem, "P": lay.p, "G": lay.group, "SPW": lay.spw, "ROW_SCALE": self.has("row_scales")}

    def zeros(self) -> dict[str, Any]:
        """Constants of both: zero points."""
        return {"ZSPW": self.layout.zspw, "ZEROS": self.layout.zeros}

    def constants(self, tile: Tile, ptx: bool) -> dict[str, Any]:
        """Constants of the weight-only GEMM."""
        lay, weighted = self.layout, self.weighted(tile)
        ptx = ptx and not lay.odd
        return {
            **self.sizes(),
            **self.groups(),
            **self.zeros(),
            "WEIGHTED": weighted,
            "PTX": ptx,
            "ODD": lay.odd,
            "LEFT": leftover(lay.elem, weighted, lay.zeros, ptx),
            "COLUMNS": self.has("columns"),
            "BC": tile.containers,
            "KPB": tile.k_blocks,
        }
