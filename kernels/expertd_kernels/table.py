"""The backend table: one row a backend.  Adding a backend = one row here and one module in backends/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertd_kernels.oracle import Backend, DeviceRange, SchemeSupport
from expertd_kernels.scheme import Element

__all__ = ["BACKENDS", "ORDER"]

_ANYWHERE = tuple(DeviceRange(kind) for kind in ("cpu", "cuda", "rocm", "xpu"))
_EVERY_SCHEME = tuple(SchemeSupport(e, groups=None, blocks=None, zeros=e.integer, global_scale=True) for e in Element)

BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="reference",
        target="expertd_kernels.backends.reference",
        devices=_ANYWHERE,
        schemes=_EVERY_SCHEME,
        summary="float32 on dequantized weights, one expert at a time: right everywhere, fast nowhere",
        compute_dtypes=frozenset({"bf16", "f32"}),
        act_order=True,
    ),
)

ORDER: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "reference"),
    "cuda": ("triton", "reference"),
}
"""Order of preference by arch or kind of device; rows not named follow in the order of the table."""
