"""What sglang 0.5.23 asserts before its Marlin MoE GEMM runs, so that a stand-in refuses what the package refuses.

Read from sglang/kernels/jit/csrc/gemm/marlin_moe/moe_wna16_marlin.cuh; the function is named beside each check.
"""

from refusals_of_packages import want

GROUPS = {
    "uint4": (-1, 32, 64, 128),
    "uint4b8": (-1, 32, 64, 128),
    "uint8b128": (-1, 32, 64, 128),
    "float8_e4m3fn": (-1, 128),
    "float4_e2m1f": (16, 32),
}
"""Type -> columns a scale that get_marlin_kernel has a kernel for (COMMON_GET_IF, BIGGROUP_GET_IF, NVFP4_GET_IF,
MXFP4_GET_IF).  There is none for kU8, which checks alone let pass."""
SMALL, LARGE = ((128, 128), (64, 128)), ((64, 256), (64, 128))
"""small_batch_thread_configs and large_batch_thread_configs: (thread_k, thread_n)."""
TILE, LEAST_N = 16, 64
"""device::marlin::tile_size and min_thread_n."""


def bits(q_type):
    return 4 if q_type in ("uint4", "uint4b8", "float4_e2m1f") else 8


def shapes(a, c, codes, size_m, size_n, size_k, top_k, q_type):
    """moe_wna16_marlin_gemm: a, b_q_weight and c."""
    want(tuple(a.shape) == (size_m, size_k), "Shape mismatch: a")
    want(size_k % TILE == 0, "size_k is not divisible by tile_size")
    want(codes.shape[1] == size_k // TILE, "Shape mismatch: b_q_weight.size(1)")
    want(codes.shape[2] % TILE == 0, "b_q_weight.size(2) is not divisible by tile_size")
    want(codes.shape[2] // TILE * (32 // bits(q_type)) == size_n, "size_n is not that of b_q_weight")
    want(codes.is_contiguous(), "b_q_weight is not contiguous")
    want(tuple(c.shape) == (size_m * top_k, size_n), "Shape mismatch: c")
    want(c.is_contiguous(), "c is not contiguous")
    want(size_n % LEAST_N == 0, "size_n is not divisible by min_thread_n")


def scales(s, zeros, size_n, size_k, q_type):
    """moe_wna16_marlin_gemm: b_scales and b_zeros; marlin_mm and get_marlin_kernel: which kernels there are."""
    want(s.dim() == 3, "b_scales rank is not 3")
    want(s.shape[2] == size_n, "b_scales dim 2 is not size_n")
    want(s.is_contiguous(), "b_scales is not contiguous")
    groups = s.shape[1]
    want(size_k % groups == 0, "size_k is not divisible by b_scales.size(1)")
    group = size_k // groups if groups > 1 else -1
    if zeros is None:
        known = ("uint4b8", "uint8b128", "float8_e4m3fn", "float4_e2m1f")
        want(q_type in known, "b_q_type must be uint4b8, uint8b128, float8_e4m3fn or float4_e2m1f when has_zp = False")
    else:
        want(q_type in ("uint4", "uint8"), "b_q_type must be u4 or u8 when has_zp = True")
        want(tuple(zeros.shape[1:]) == (groups, size_n * bits(q_type) // 32), "b_zeros has another shape")
        want(zeros.is_contiguous(), "b_zeros is not contiguous")
    want(group in GROUPS.get(q_type, ()), f"Unsupported shapes: no kernel of {q_type} with group_size {group}")


def blocks(size_n, size_k, block):
    """is_valid_config of determine_exec_config: one thread block must divide both sizes."""
    want(block == 8 or (block % 16 == 0 and 16 <= block <= 64), "unsupported moe_block_size")
    fits = [size_k % k == 0 and size_n % n == 0 for k, n in (LARGE if block > 16 else SMALL)]
    want(any(fits), f"Invalid thread config for [{size_n}, {size_k}]")


def workspace(locks, size_n, sorted_ids, block, multiprocessors):
    """moe_wna16_marlin_gemm: the locks."""
    least = min(size_n // LEAST_N * (sorted_ids.shape[0] // block), multiprocessors * 4)
    want(locks.shape[0] >= least, "workspace.numel is below min_workspace_size")
