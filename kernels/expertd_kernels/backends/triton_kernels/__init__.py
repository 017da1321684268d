"""Kernels of the row `triton`: routing, GEMMs on quantized weights, activation rounding, combine.

The package of the same name on the internet is another project; nothing of it is used here.

    layout.py     where each code, scale and zero point lies, as a value; pack and unpack of one matrix
    space.py      what a call keeps in scratch memory
    route.py      tokens -> lists of rows per expert
    unpack.py     packed codes -> bf16 operands of the tensor cores
    loops.py      the loops over K
    gemm.py       weight-only GEMM: gather, unpack, multiply, activation or plain epilogue
    rounded.py    activations rounded to e4m3, and the GEMM on them
    combine.py    weighted sum of a token's rows
    plan.py       tile sizes by rows an expert
    matrix.py     one packed matrix as the kernels take it
    device.py     what the host side asks of a device
    replay.py     a layer's launches, remembered
    layer.py      the whole layer
"""
