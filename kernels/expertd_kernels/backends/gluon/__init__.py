"""The rows for Hopper in Triton's Gluon dialect, a room for each.

    shared       what both need: routes by expert, sums, tiles by tickets, scratch, Triton's versions
    weight_only  row gluon_sm90: kernels block, gemv, ws and wide
    w8a8         row gluon_w8a8: kernels w8a8 and w8a8_few

In a room a kernel's file bears its name; constants.py holds what the compiler sees of a launch, plan.py how a GEMM is
cut, experts.py the layer on the GPU.
"""
