"""What FlashInfer 0.7.2 asserts before its TRTLLM MoE kernels run, so that a stand-in refuses what the package refuses.

Each check is a fact read from data/csrc/trtllm_fused_moe_kernel_launcher.cu; the class and method are named beside it.
Sizes are those of the tensors handed over: E local experts, H and I as padded for the package, M tokens, k routes.
"""

import torch
from refusals_of_packages import RefusedError, want

__all__ = ["RefusedError", "bf16", "e2m1", "e4m3_blocks", "e4m3_tensor", "mxint4", "routing"]

E4M3, U8, F32, BF16 = torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bfloat16


def routing(ids, weights, x, given):
    """FusedMoeLauncher::check_routing_common, and the index checks that each launcher repeats."""
    k, total, local = given["top_k"], given["num_experts"], given["local_num_experts"]
    want(0 < k <= total, "top_k must be between 1 and num_experts")
    want(0 < local <= total, "local_num_experts must be between 1 and num_experts")
    want(given["local_expert_offset"] >= 0, "expert offset and count must be within valid range")
    want(given["local_expert_offset"] + local <= total, "expert offset and count must be within valid range")
    want(ids.dtype == torch.int32, "expert_indices must be int32.")
    want(tuple(ids.shape) == (x.shape[0], k), "expert_indices must be [M, top_k]")
    want(ids.is_contiguous(), "expert_indices must be contiguous.")
    want(weights is None or weights.dtype in (BF16, F32), "expert_weights must be bfloat16 or float32.")
    want(weights is None or tuple(weights.shape) == (x.shape[0], k), "expert_weights must be [M, top_k]")


def routing_in_fours(given):
    """Fp8BlockScaleLauncher::check_routing: alone among the launchers used here, and reached with given routes too."""
    want(given["num_experts"] % 4 == 0, "Routing kernel expects that num_experts must be divisible by 4")
    want(given["num_experts"] > given["top_k"], "num_experts must be greater than top_k")


def per_expert(given, *names):
    """FusedMoeLauncher::check_optional_per_expert_float_tensor."""
    for name in names:
        t = given.get(name)
        if t is not None:
            want(t.dtype == F32, f"{name} must be float32.")
            want(tuple(t.shape) == (given["local_num_experts"],), f"{name} dim0 must be local_num_experts")
            want(t.is_contiguous(), f"{name} must be contiguous.")


CURVE = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")


def bf16(x, given):
    """Bf16MoeLauncher::check_moe."""
    want(given["weight_layout"] == 2, "BF16 Moe: weight_layout must be BlockMajorK")
    want(x.dtype == BF16, "hidden_states must be bfloat16.")
    for name in ("gemm1_weights", "gemm2_weights"):
        want(given[name].dtype == BF16, f"{name} must be bfloat16.")
        want(given[name].dim() == 4, f"{name} must be [experts, K / block, M, block]")
        want(given[name].shape[0] == given["local_num_experts"], f"{name} dim0 must be local_num_experts")
    want(given["intermediate_size"] % 128 == 0, "the second dimension of weights must be a multiple of 128.")
    per_expert(given, *CURVE)


def mxint4(x, given):
    """MxInt4BlockScaleLauncher::check_moe."""
    want(x.dtype == BF16, "hidden_states must be bf16.")
    for i in (1, 2):
        want(given[f"gemm{i}_weights"].dtype == U8, f"gemm{i}_weights must be uint8.")
        want(given[f"gemm{i}_weights_scale"].dtype == BF16, f"gemm{i}_weights_scale must be bf16.")
    per_expert(given, *CURVE)


def e4m3_blocks(x, scale, given):
    """Fp8BlockScaleLauncher::check_routing and check_moe."""
    routing_in_fours(given)
    want(x.dtype == E4M3, "hidden_states must be fp8.")
    mx, local = given["fp8_quantization_type"] == 2, given["local_num_experts"]
    H, I = x.shape[1], given["intermediate_size"]
    for i in (1, 2):
        want(given[f"gemm{i}_weights"].dtype == E4M3, f"gemm{i}_weights must be fp8.")
        want(given[f"gemm{i}_weights_scale"].dtype == (U8 if mx else F32), f"gemm{i}_weights_scale has a wrong type.")
    want(I % 128 == 0, "intermediate_size must be a multiple of 128.")
    if mx:
        want(given["use_shuffled_weight"], "use_shuffled_weight must be true for MxFp8.")
        want(given["weight_layout"] == 0, "weight_layout must be 0 for MxFp8.")
        want(scale.dtype == U8, "hidden_states_scale must be uint8.")
    else:
        want(scale.dtype == F32, "hidden_states_scale must be float.")
        want(tuple(scale.shape) == (H // 128, x.shape[0]), "hidden_states_scale must be [H / 128, M]")
        first, second = (tuple(given[f"gemm{i}_weights_scale"].shape) for i in (1, 2))
        want(first == (local, 2 * I // 128, H // 128), "gemm1_weights_scale has incorrect shape.")
        want(second == (local, H // 128, I // 128), "gemm2_weights_scale has incorrect shape.")
    per_expert(given, *CURVE)


def e4m3_tensor(x, given):
    """Fp8PerTensorLauncher::check_moe."""
    want(x.dtype in (E4M3, torch.float16, BF16), "hidden_states must be fp8, fp16 or bf16")
    for i in (1, 2):
        want(given[f"gemm{i}_weights"].dtype == E4M3, f"gemm{i}_weights must be fp8.")
    for name in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"):
        want(given.get(name) is not None, f"{name} is required")
        per_expert(given, name)


def e2m1(x, scale, given):
    """FP4BlockScaleLauncher::check_moe, and trtllm_fp4_block_scale_moe before it."""
    want(x.dtype in (U8, BF16, E4M3), "hidden_states must be uint8, bf16 or fp8")
    for i in (1, 2):
        want(given[f"gemm{i}_weights"].dtype == U8, f"gemm{i}_weights must be byte.")
        want(given[f"gemm{i}_weights_scale"].dtype == E4M3, f"gemm{i}_weights_scale must be fp8.")
    if x.dtype == U8:
        want(scale is not None, "hidden_states_scale is required for E2m1 activation")
        for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
            want(given.get(name) is not None, f"{name} is required for E2m1 activation")
    if x.dtype != BF16:
        want(scale is not None and scale.dtype == E4M3, "hidden_states_scale must be fp8")
