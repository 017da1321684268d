"""Backend `triton_w8a8`: 8-bit weights, activations rounded to the weights' type; see backends/triton.py.

A row of its own because its answers differ and e4m3 needs tensor cores that multiply it.  The packed weights are those
of `triton`, but for int8 codes, which keep their sign.
"""

from __future__ import annotations

from expertd_kernels.backends.triton import experts, pack, unpack

__all__ = ["experts", "pack", "unpack"]
