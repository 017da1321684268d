"""What every launch of our Triton kernels is compiled with.  Imports nothing."""

__all__ = ["OPTIONS"]

OPTIONS = {"enable_fp_fusion": True}
"""A product that is added to something is rounded once.  Triton's default so far; 3.9 warns that it will end."""
