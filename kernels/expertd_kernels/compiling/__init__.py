"""Triton kernels compiled ahead, in processes of their own: before a layer is there, and without a GPU."""
