"""What the rows for Hopper share.

calls            what a call checks, and how it is cut into pieces
launches         what is launched before and after the GEMMs: routes grouped by expert, results added up
routing          the kernels of those launches
grouping         how routes are cut for grouping
tickets          which tile is next in the persistent kernels, and who hears of it
space            scratch memory of a call, by its sizes
gpu              what the layers ask of the GPU
measured         numbers that plans follow, for GPUs of any size
triton_versions  what differs between the versions of Triton
"""
