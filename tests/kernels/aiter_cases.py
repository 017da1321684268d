"""A stand-in for the package aiter: its entry point in f32, with the package's own torch code and its assertions."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from refusals_of_packages import want
from vendor import functions, stand_ins

from expertd_kernels.backends import aiter_layout as layout


class Vendor:
    """Stands in for aiter: fused_moe in f32 through the package's own torch_moe, with the mask that it reads."""

    QuantType = SimpleNamespace(
        **{n: n for n in ("No", "per_Token", "per_Tensor", "per_1x32", "per_1x128", "per_128x128")}
    )
    ActivationType = SimpleNamespace(Silu="Silu", Swiglu="Swiglu")

    def __init__(self, folder):
        module = ModuleType("fused")
        module.dtypes = SimpleNamespace(fp32=torch.float32, i32=torch.int32)
        module.ActivationType = self.ActivationType
        module.aiter = SimpleNamespace(get_torch_act=lambda activation: torch.nn.functional.silu)
        module.QuantType, module.quant_remap = self.QuantType, {}
        stages = {"torch_moe", "torch_moe_act", "torch_moe_stage1", "torch_moe_stage2", "swiglu", "get_inter_dim"}
        module.dtypes.fp16 = torch.float16
        self.own = functions(folder / "fused_moe.py", stages, module)
        self.fp4 = ModuleType("aiter.utility.fp4_utils")
        self.fp4.dtypes = module.dtypes
        functions(folder / "utility" / "fp4_utils.py", {"mxfp4_to_f32", "e8m0_to_f32"}, self.fp4)
        self.fused_moe = SimpleNamespace(fused_moe=self.run)

    def run(self, x, w1, w2, weights, ids, *, expert_mask, activation, quant_type, w1_scale, w2_scale, **mxfp4):
        """fused_moe_, and what it asserts before it sorts the routes."""
        assert w1.is_shuffled
        assert w2.is_shuffled
        want(x.dtype in (torch.float16, torch.bfloat16), "Fused_moe unsupported out dtype")
        inner = w2.shape[2] * (w2.shape[1] // w1.shape[2])  # get_inter_dim: two codes a byte
        want(w1.shape[1] in (inner, 2 * inner), "Invalid MoE weight")
        want(x.shape[1] == w2.shape[1], "hidden states and weights have one model_dim")
        assert (activation == "Swiglu") == (quant_type == "per_1x32") == bool(mxfp4)
        assert (x.dtype, weights.dtype, ids.dtype) == (torch.bfloat16, torch.float32, torch.int32)
        assert expert_mask.tolist() == [1] * len(w1) + [0]
        assert 0 <= int(ids.min()) <= int(ids.max()) <= len(w1)
        if mxfp4:
            return self.mxfp4(x, w1, w2, weights, ids, w1_scale, w2_scale, **mxfp4)
        matrices = [self.numbers(w, s, quant_type) for w, s in ((w1, w1_scale), (w2, w2_scale))]
        return self.own.torch_moe(x, *matrices, weights, ids, expert_mask=expert_mask)

    def numbers(self, codes, scales, quant_type):
        w = layout.unshuffle(codes).float()
        if quant_type == "per_Token":
            assert scales.shape == (*w.shape[:2], 1)
            return w * scales
        if quant_type == "per_128x128":
            assert scales.shape == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
            return w * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert scales is None
        return w

    def mxfp4(self, x, w1, w2, weights, ids, w1_scale, w2_scale, *, bias1, bias2, hidden_pad, intermediate_pad):
        """The two stages with its own torch code for weights of 4 bits on activations of 16.  Padded columns must be
        zeros: the kernels may leave them out (n_pad_zeros, k_pad_zeros)."""
        assert w1.dtype == w2.dtype == torch.float4_e2m1fn_x2
        want(2 * w1.shape[2] >= 256, "K must be larger than Tile_K(256)")
        matrices = []
        for w, scale, segments in ((w1, w1_scale, 2), (w2, w2_scale, 1)):
            codes = layout.unshuffle_mxfp4(w.view(torch.uint8), segments)
            matrices.append((codes, layout.unshuffle_scales(scale, segments)))
        (c1, s1), (c2, s2) = matrices
        H, inner = x.shape[1], 2 * c2.shape[2]
        assert not x[:, H - hidden_pad :].any()
        assert not c1.view(len(c1), 2, inner, -1)[:, :, inner - intermediate_pad :].any()
        assert not c2[:, H - hidden_pad :].any()
        assert all(b is None or b.dtype == torch.float32 for b in (bias1, bias2))
        with stand_ins("aiter", "aiter.utility", "aiter.utility.fp4_utils"):
            sys.modules["aiter.utility"].fp4_utils = self.fp4
            middle = self.own.torch_moe_stage1(
                x, c1, c2, weights, ids, torch.bfloat16, "Swiglu", "per_1x32", w1_scale=s1, w1_bias=bias1
            )
            return self.own.torch_moe_stage2(
                middle, c1, c2, weights, ids, torch.bfloat16, "per_1x32", w2_scale=s2, w2_bias=bias2
            )
