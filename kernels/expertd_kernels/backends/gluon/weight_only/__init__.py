"""Row gluon_sm90: quantized or bf16 weights, bf16 activations.

codec, packing, packed_matrix      how weights are stored, on any device
plan, planning, rules, plans/      which kernel with which tiles: the values, the rules, their numbers, tuned tables
constants, gemv_constants          what the compiler sees of a launch
block, gemv, ws, wide              the kernels, each in the file of its name
dequant, pieces, wide_epilogue     device code that they share
matrix, experts                    packed matrices on the GPU, and the layer
"""
