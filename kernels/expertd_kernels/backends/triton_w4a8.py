"""Backend `triton_w4a8`: 4-bit weights on activations rounded to e4m3, int4 also on int8; see backends/triton.py.

int4 and e2m1 codes are exact in e4m3, and int4 less its zero point in both, so only the activations lose digits.  A row
of its own because its answers differ from those of `triton`, whose packed weights it shares.
"""

from __future__ import annotations

from expertd_kernels.backends.triton import experts, pack, unpack

__all__ = ["experts", "pack", "unpack"]
