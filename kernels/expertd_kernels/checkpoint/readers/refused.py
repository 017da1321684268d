"""Methods of quantization that are known by name and not read.  No functions: detection stops at the row."""

from __future__ import annotations

from expertd_kernels.checkpoint.formats import Format
from expertd_kernels.checkpoint.readers.protocol import Unit

__all__ = ["FORMATS"]

METHODS = (
    "aqlm",
    "bitnet",
    "bitsandbytes",
    "eetq",
    "higgs",
    "hqq",
    "quanto",
    "quark",
    "quip",
    "spqr",
    "torchao",
    "vptq",
)


def _quantized(unit: Unit) -> str | None:
    plain = [s for s in ("weight", "") if unit.has(s) and unit.tensors[s].dtype in ("BF16", "F16", "F32")]
    return "the projection is unquantized" if plain and len(unit.tensors) == 1 + unit.has("bias") else None


FORMATS = (
    Format(
        "other_methods",
        "refused",
        frozenset(METHODS),
        {},
        rule=_quantized,
        refusal=f"checkpoints of {', '.join(METHODS)} are not read; take one in GPTQ, AWQ, compressed-tensors, FP8,"
        " MXFP4 or ModelOpt format, or the unquantized model with --quantize",
        detected_by="quant_method",
        bias="-",
    ),
)
