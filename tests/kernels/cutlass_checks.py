"""What FlashInfer 0.7.2 asserts before its CUTLASS MoE kernels run, so that a stand-in refuses what it refuses.

Read from data/csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu: FusedMoeRunner::runMoe (rows) and
getQuantParams (scales).  E local experts; H and I as padded for the package.
"""

import torch
from refusals_of_packages import want

F32, I32, BF16 = torch.float32, torch.int32, torch.bfloat16
INNER = {torch.uint8: 2, torch.int64: 16}
"""mInnerDimMultiplier: codes in one element of the weights, by their type; 1 for others."""
GATED = (3, 4, 8)
"""ActivationType: Swiglu, Geglu, GegluTanh."""


def sizes(w13, w2):
    """(H, I)."""
    return w2.shape[1], w2.shape[2] * INNER.get(w2.dtype, 1)


def rows(x, ids, weights, w13, w2, given):
    """runMoe, up to the choice of the kernel."""
    want(ids.dtype == I32, "token_selected_experts must be int32")
    want(weights.dtype == F32, "token_final_scales must be float32")
    want(x.dim() == ids.dim() == weights.dim() == 2, "input, experts and scales must have 2 dimensions")
    want(w13.dim() == w2.dim() == 3, "weights must have 3 dimensions")
    want(w13.dtype == w2.dtype, "fc1_expert_weights and fc2_expert_weights must have one type")
    want(x.shape[0] == ids.shape[0] == weights.shape[0], "input and token_selected_experts must have the same tokens")
    want(ids.shape == weights.shape, "as many experts as scales for each token")
    want(w13.shape[0] == w2.shape[0], "fc1_expert_weights and fc2_expert_weights must have the same number of experts")
    (H, I), factor = sizes(w13, w2), 2 if given["activation_type"] in GATED else 1
    want(w13.shape[1] == factor * I, "fc1_expert_weights inter size must be 2 times fc2_expert_weights inter size")
    want(all(t.is_contiguous() for t in (x, ids, weights, w13, w2)), "inputs must be contiguous")
    if w13.dtype is torch.int64 and x.dtype is torch.float8_e4m3fn:
        least = 128  # isWMxfp4AMxfp8Quant
    else:
        least = 16 // min(x.element_size(), w13.element_size() if w13.dtype not in INNER else 1)
    want(H % least == 0, f"hidden_size must be divisible by {least}")
    want(I % least == 0, f"inter_size must be divisible by {least}")
    biases(w13, w2, given)
    per_expert(w13.shape[0], given, "swiglu_alpha", "swiglu_beta", "swiglu_limit")


def biases(w13, w2, given):
    """runMoe: both or none (it reads both where one is given), of the output's type."""
    first, second = given.get("fc1_expert_biases"), given.get("fc2_expert_biases")
    want((first is None) == (second is None), "both biases or none")
    for bias, w in ((first, w13), (second, w2)):
        if bias is not None:
            want(bias.dtype == BF16, "biases must have the output's type")
            want(tuple(bias.shape) == tuple(w.shape[:2]), "biases should match the weights' output shape")


def per_expert(experts, given, *names):
    """checkedActivationParams."""
    for name in names:
        if given.get(name) is not None:
            want(given[name].dtype == F32, f"{name} must be float32")
            want(tuple(given[name].shape) == (experts,), f"{name} must have one element an expert")
    if given["activation_type"] != 3:
        want(all(given.get(n) is None for n in names), "alpha, beta and limit are Swiglu's")


def _blocks(t, experts, n, k, group, what):
    """Exponents or e4m3 scales, four in an int32; rows and columns to 128 and to four scales."""
    want(t.dtype == I32, f"{what} weight block must be int32")
    want(t.dim() == 3, f"{what} weight block must have 3 dimensions")
    columns = -(-k // (4 * group)) * 4 * group
    want(tuple(t.shape) == (experts, -(-n // 128) * 128, columns // group // 4), f"{what} weight block size")


def _global(t, experts, what, scalar=False):
    want(t.dtype == F32, f"{what} must be float32")
    want((scalar and t.dim() == 0) or tuple(t.shape) == (experts,), f"{what} size must be (num_experts_on_rank,)")


def microscaled(scales, w13, w2):
    """getQuantParams of mxfp8 and of mxfp4 on mxfp8."""
    want(len(scales) == 4, "Expecting 4 quant scales")
    E, (H, I) = w13.shape[0], sizes(w13, w2)
    _blocks(scales[0], E, w13.shape[1], H, 32, "fc1")
    _global(scales[1], E, "fc1 global")
    _blocks(scales[2], E, H, I, 32, "fc2")
    _global(scales[3], E, "fc2 global")


def nvfp4(scales, w13, w2):
    """getQuantParams of nvfp4."""
    want(len(scales) == 6, "Expecting 6 quant scales for nvfp4 quantization")
    E, (H, I) = w13.shape[0], sizes(w13, w2)
    _global(scales[0], E, "fc1 act global", scalar=True)
    _blocks(scales[1], E, w13.shape[1], H, 16, "fc1")
    _global(scales[2], E, "fc1 global")
    _global(scales[3], E, "fc2 act global", scalar=True)
    _blocks(scales[4], E, H, I, 16, "fc2")
    _global(scales[5], E, "fc2 global")


def tensor(scales, w13):
    """getQuantParams of e4m3 with one scale an expert."""
    want(len(scales) == 4, "Expecting 4 quant scales for fp8 quantization")
    E = w13.shape[0]
    _global(scales[0], E, "fc1 dequant")
    _global(scales[1], E, "fc2 quant", scalar=True)
    _global(scales[2], E, "fc2 dequant")
    want(scales[3].dtype == F32, "fc1 input dequant must be float32")
    want(scales[3].dim() == 0, "fc1 input dequant must be a scalar")


def weight_only_mxfp4(scales, x):
    """getQuantParams and the constructor of mxfp4 on bf16 (SM90)."""
    want(len(scales) == 2, "Expecting 2 quant scales for W4A16 quantization")
    want(x.dtype == BF16, "SM90 MXFP4 W4A16 supports BF16 activations only")
