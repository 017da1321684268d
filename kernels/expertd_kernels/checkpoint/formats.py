"""The table of formats: how each is recognised, which reader reads it, what is worth knowing of it.

Detection decides for each projection, by the tensors that are there and the quantization config together.  Exactly one
row must match; several or none is an error that shows the config and the rows that came close.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import cast

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.readers.protocol import Reader, Unit

__all__ = ["READERS", "Format", "detect", "formats", "reader_of"]


def _always(unit: Unit) -> str | None:
    return None


@dataclass(frozen=True)
class Format:
    """One row.

    name       stable: "gptq_v1", "ct_pack_quantized", ...
    reader     module in readers/ that has layout() and read()
    methods    values of quantization_config.quant_method for which it may apply ("" = no quantization config); "*" in
               it = any (unquantized projections of a quantized checkpoint)
    tensors    suffix -> dtypes (space separated) that the unit must have
    absent     suffixes that it must not have
    optional   suffixes that it may have besides; any other is then a miss, for a tensor that nobody reads may matter.
               None: not checked
    rule       a further condition; returns why the row does not apply, or None if it does
    refusal    set for a format that is recognised and deliberately not read: the sentence
    The rest are columns of the docs table.
    """

    name: str
    reader: str
    methods: frozenset[str]
    tensors: Mapping[str, str]
    absent: frozenset[str] = frozenset()
    optional: frozenset[str] | None = None
    rule: Callable[[Unit], str | None] = _always
    refusal: str = ""
    detected_by: str = ""
    packing: str = ""
    scales: str = ""
    zero_points: str = "none"
    bias: str = "optional, per projection"
    activation: str = "none"
    since: str = "0.1"
    fixture: str = ""

    def of_method(self, unit: Unit) -> bool:
        """Whether the row belongs to the checkpoint's quant_method."""
        return "*" in self.methods or unit.quant.get("quant_method", "") in self.methods

    def misses(self, unit: Unit) -> list[str]:
        """Why the row does not fit the unit; empty if it does."""
        out = []
        if not self.of_method(unit):
            method = unit.quant.get("quant_method", "")
            out.append(f"quant_method is {method or 'absent'!r}, want {' or '.join(m or 'none' for m in self.methods)}")
        for suffix, dtypes in self.tensors.items():
            if not unit.has(suffix):
                out.append(f"tensor {suffix!r} is missing")
            elif unit.tensors[suffix].dtype not in dtypes.split():
                out.append(f"{suffix!r} is {unit.tensors[suffix].dtype}, want {' or '.join(dtypes.split())}")
        out += [f"tensor {suffix!r} is there" for suffix in sorted(self.absent) if unit.has(suffix)]
        if self.optional is not None:
            extra = sorted(set(unit.tensors) - set(self.tensors) - self.absent - self.optional)
            out += [f"tensor {suffix!r} is not known" for suffix in extra]
        if not out:
            reason = self.rule(unit)
            out += [reason] if reason else []
        return out


READERS = ("plain", "gptq", "awq", "compressed_tensors", "fp8", "gptoss_mxfp4", "modelopt", "modelopt_awq", "refused")
"""Modules of readers/, in the order of the docs table."""


@cache
def formats() -> tuple[Format, ...]:
    """The whole table: the FORMATS of every reader module."""
    rows = tuple(row for name in READERS for row in _module(name).FORMATS)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), f"two formats of one name: {sorted(names)}"
    return rows


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"expertd_kernels.checkpoint.readers.{name}")


def reader_of(row: Format) -> Reader:
    return cast(Reader, _module(row.reader))


def detect(unit: Unit) -> Format:
    """The one row that fits the unit.  CheckpointError if there is none, if several fit, or if a refused one does."""
    judged = [(row, row.misses(unit)) for row in formats()]
    matches = [row for row, misses in judged if not misses]
    for row in matches:
        if row.refusal:
            raise CheckpointError(f"{unit.name}: {row.name}: {row.refusal}")
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(row.name for row in matches)
        raise CheckpointError(f"{unit.name}: fits several formats ({names}); found {_found(unit)}")
    near = sorted((not row.of_method(unit), len(misses), row.name, misses) for row, misses in judged)
    close = "; ".join(f"{name} ({', '.join(misses)})" for *far, name, misses in near if far == list(near[0][:2]))
    raise CheckpointError(f"{unit.name}: fits no known format; found {_found(unit)}; closest: {close}")


def _found(unit: Unit) -> str:
    """The config and the tensors in one line, for errors."""
    keys = ("quant_method", "quant_algo", "format", "checkpoint_format", "packing_format", "version", "bits")
    config = ", ".join(f"{k} {unit.quant[k]!r}" for k in keys if unit.quant.get(k) is not None)
    tensors = ", ".join(f"{s or 'weight'} {t.dtype} {list(t.shape)}" for s, t in sorted(unit.tensors.items()))
    return f"{config or 'no quantization_config'} in config.json and tensors {tensors or 'none'}"
