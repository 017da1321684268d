"""gpt-oss: e2m1 blocks of 32 with e8m0 scales, gate and up rows of the fused matrix interleaved, biases."""

from __future__ import annotations

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.floats import Floats, layout_floats, read_floats
from expertd_kernels.checkpoint.readers.protocol import Layout, Part, Unit
from expertd_kernels.weights.scheme import Element

__all__ = ["FORMATS", "layout", "read"]

_FLOATS = Floats(Element.E2M1, "blocks", "scales", blocks=True)


def layout(unit: Unit) -> Layout:
    return layout_floats(unit, _FLOATS)


def read(unit: Unit) -> Part:
    return read_floats(unit, _FLOATS)


FORMATS = (
    Format(
        "gptoss_mxfp4",
        "gptoss_mxfp4",
        frozenset({"mxfp4"}),
        {"blocks": "U8", "scales": "U8 F8_E8M0"},
        optional=frozenset({"bias"}),
        detected_by="quant_method mxfp4, `*_blocks` and `*_scales`",
        packing="U8 [rows, K/32, 16], low nibble = even k, e2m1",
        scales="U8 [rows, K/32] e8m0",
        bias="`*_bias` bf16 [E, rows]",
        fixture="mxfp4-oai-modelopt-gptoss-ns",
    ),
)
