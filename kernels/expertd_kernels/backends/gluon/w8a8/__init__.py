"""Row gluon_w8a8: e4m3 weights, activations rounded to e4m3.

plan, plans/           which kernel, how cut and buffered: the rules, and the numbers behind them
constants              what the compiler sees of a launch
prepare                activations rounded, routes grouped
w8a8, w8a8_few         the kernels of many and of few tokens
products, epilogue     device code of theirs
experts                the layer on the GPU
"""
