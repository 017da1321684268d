"""Rows of e4m3 with an f32 scale for 128 columns, the contract's DATA_TYPE_E4M3, in C++.

csrc/e4m3.h says how a row is quantized; the engine's core includes it, and a client calls it by addresses.
"""

from expertd.e4m3.library import quantizer, widener

__all__ = ["quantizer", "widener"]
