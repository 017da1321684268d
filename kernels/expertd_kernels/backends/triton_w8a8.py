"""Backend `triton_w8a8`: e4m3 weights, activations rounded to e4m3 by token or by group of 128; see backends/triton.py.

A row of its own because it needs tensor cores that multiply e4m3.  The packed weights are those of `triton`.
"""

from __future__ import annotations

from expertd_kernels.backends.triton import experts, pack, unpack

__all__ = ["experts", "pack", "unpack"]
