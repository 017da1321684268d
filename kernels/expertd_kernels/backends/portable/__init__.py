"""Kernels of the rows `triton`, `triton_w8a8` and `triton_w4a8`, for every GPU that Triton knows: routing, GEMMs on
quantized weights, activation rounding, combine.

    layout.py     where each code, scale and zero point lies, as a value; pack and unpack of one matrix
    space.py      what a call keeps in scratch memory
    route.py      tokens -> lists of rows per expert
    unpack.py     packed codes -> bf16 operands of the tensor cores
    loops.py      the loops over K
    gemm.py       weight-only GEMM: gather, unpack, multiply, activation or plain epilogue
    rounded.py    activations rounded to e4m3, and the GEMM on them
    combine.py    weighted sum of a token's rows
    tiling.py     tile sizes by rows an expert
    matrix.py     one packed matrix as the kernels take it
    replay.py     a layer's launches, remembered
    experts.py    the whole layer
"""
