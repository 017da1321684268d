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


def _six_bits(unit: Unit) -> str | None:
    """MXFP6 packs 32 elements of 6 bits, which share an e8m0 scale, into 24 bytes."""
    if str(unit.quant.get("quant_method", "")).startswith("mxfp6"):
        return _quantized(unit)
    codes = next((unit.tensors[s] for s in ("weight_packed", "weight", "blocks", "") if unit.has(s)), None)
    scales = next((unit.tensors[s] for s in ("weight_scale", "scales", "scale") if unit.has(s)), None)
    if codes is None or scales is None or codes.dtype != "U8" or scales.dtype not in ("U8", "F8_E8M0"):
        return "no U8 codes with e8m0 scales"
    if codes.nbytes != 24 * scales.nbytes:
        return f"{codes.nbytes} bytes of codes for {scales.nbytes} scales, want 24 for each"
    weights = unit.n * unit.k  # as config.json says; 0: it does not
    return f"{codes.nbytes} bytes for {weights} weights" if weights and codes.nbytes * 8 != weights * 6 else None


FORMATS = (
    Format(
        "mxfp6",
        "refused",
        frozenset({"*"}),
        {},
        rule=_six_bits,
        refusal="MXFP6 weights (e2m3 or e3m2, 6 bits) are not read: no kernel here computes them; take the checkpoint"
        " in MXFP4, MXFP8 or NVFP4, or the unquantized model with --quantize",
        detected_by="quant_method mxfp6, or U8 codes, 24 bytes for each e8m0 scale",
        bias="-",
    ),
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
