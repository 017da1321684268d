"""The C++ library of CPU kernels, and the cores that its threads run on."""
