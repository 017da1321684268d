"""The table of formats: how each is recognised, which reader reads it, what is worth knowing of it.

Detection decides for each projection, by the tensors that are there and the quantization config together.  Exactly one
row must match; several or none is an error that shows the config and the rows that came close.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from expertd_kernels.checkpoint.readers.protocol import Unit

__all__ = ["Format"]


@dataclass(frozen=True)
class Format:
    """One row.

    name       stable: "gptq_v1", "ct_pack_quantized", ...
    reader     module in readers/ that has layout() and read()
    methods    values of quantization_config.quant_method for which it may apply ("" = no quantization config); "*" in
               it = any (unquantized projections of a quantized checkpoint)
    tensors    suffix -> dtypes (space separated) that the unit must have
    absent     suffixes that it must not have
    rule       a further condition; returns why the row does not apply, or None if it does
    refusal    set for a format that is recognised and deliberately not read: the sentence
    The rest are columns of the docs table.
    """

    name: str
    reader: str
    methods: frozenset[str]
    tensors: Mapping[str, str]
    absent: frozenset[str] = frozenset()
    rule: Callable[[Unit], str | None] = field(default=lambda unit: None)
    refusal: str = ""
    detected_by: str = ""
    packing: str = ""
    scales: str = ""
    zero_points: str = "none"
    bias: str = "optional, per projection"
    activation: str = "none"
    since: str = "0.1"
    fixture: str = ""
