"""The package vllm-xpu-kernels on a CPU: its own Python, and stand-ins for the native operators that it calls."""

import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import torch
from vendor import load_file, package_folder, stand_ins

from expertd_kernels import Activation, ActivationKind
from expertd_kernels.weights.float32 import apply_activation


def signed_nibbles(u8):
    """[..., K/2] -> [..., K]: two's complement nibbles, low one first."""
    n = torch.stack((u8 & 15, u8 >> 4), -1).flatten(-2).to(torch.int16)
    return torch.where(n >= 8, n - 16, n).float()


class Operators:
    """The native operators, by their documented meaning; weights through the vendor's dequant functions."""

    def __init__(self, utils):
        self._C, self._moe_C, self._xpu_C, self.utils = self, self, self, utils
        self.seen_ids = []

    def remap_hidden_states(self, hidden_states, expert_map, rows_per_expert, topk_ids, total_experts_num, **kw):
        self.seen_ids.append(topk_ids.clone())
        assert int(topk_ids.min()) >= 0, "the package takes negative ids for expert 0"
        assert int(topk_ids.max()) < total_experts_num == len(expert_map)
        local = expert_map[topk_ids.long()]
        place, kw_out = kw["unpermuted_row_to_permuted_row"], kw["remapped_hidden_states"]
        place.fill_(-1)
        kw_out.fill_(float("nan"))
        at = 0
        for e in range(len(rows_per_expert)):
            for row, j in (local == e).nonzero().tolist():
                place[row, j], kw_out[at], at = at, hidden_states[row], at + 1
            rows_per_expert[e] = (local == e).sum()

    def weight(self, b, scale, e):
        """[N, K] f32 of expert e."""
        if b.dtype == torch.int8:
            w = signed_nibbles(b[e].view(torch.uint8))
            return w * scale[e].float().repeat_interleave(w.shape[1] // scale.shape[2], dim=1)
        if b.dtype == torch.float4_e2m1fn_x2:
            return self.utils.dequant_wei(b[e].view(torch.uint8), scale[e], "mxfp4")
        if b.dtype == torch.bfloat16:
            return self.utils.dequant_wei(b[e], None, "bf16").float().t()
        assert b.dtype == torch.float8_e4m3fn
        recipe = {torch.uint8: "mxfp8", torch.float32: "fp8block" if scale.ndim == 3 else "fp8"}[scale.dtype]
        return self.utils.dequant_wei(b[e], scale[e], recipe).t()

    def cutlass_grouped_gemm_interface(
        self, ptr_A, ptr_A_scale, ptr_B, ptr_B_scale, ptr_bias, ptr_D, rows_per_expert, N, K, num_experts
    ):
        assert ptr_A_scale is None
        assert ptr_A.shape[1] == K
        ptr_D.fill_(float("nan"))
        at = 0
        for e in range(num_experts):
            rows = slice(at, at + int(rows_per_expert[e]))
            y = ptr_A[rows].float() @ self.weight(ptr_B, ptr_B_scale, e).t()
            ptr_D[rows] = (y if ptr_bias is None else y + ptr_bias[e].float()).to(ptr_D.dtype)
            assert y.shape[1] == N
            at = rows.stop

    def moe_gather(self, output, gemm, weights, place, num_experts):
        rows = torch.where((place < 0)[..., None], 0.0, gemm[place.long().clamp_min(0)].float())
        output.copy_((rows.nan_to_num(nan=float("nan")) * weights[..., None]).sum(1))

    def silu_and_mul(self, out, x):
        out.copy_(apply_activation(x.float(), Activation()))

    def gelu_and_mul(self, out, x):
        out.copy_(apply_activation(x.float(), Activation(ActivationKind.GELU_AND_MUL)))

    def gelu_tanh_and_mul(self, out, x):
        out.copy_(apply_activation(x.float(), Activation(ActivationKind.GELU_TANH_AND_MUL)))

    def swigluoai_and_mul(self, out, x, alpha=1.702, limit=7.0):
        pairs = torch.cat((x[:, 0::2], x[:, 1::2]), dim=1).float()
        out.copy_(apply_activation(pairs, Activation(ActivationKind.SWIGLUOAI, alpha, 1.0, limit)))

    def relu2_no_mul(self, out, x):
        out.copy_(apply_activation(x.float(), Activation(ActivationKind.RELU2)))


@cache
def vendor():
    """(its module fused_moe_interface on our operators, its module moe_utils)."""
    folder = package_folder("vllm_xpu_kernels")
    name = "vllm_xpu_kernels_under_test"
    natives = [f"{name}.{n}" for n in ("_C", "_moe_C", "_xpu_C")]
    with stand_ins(name, *natives):
        parent = sys.modules[name]
        parent.__path__ = [str(folder)]
        for n in natives:
            setattr(parent, n.rpartition(".")[2], sys.modules[n])
        utils = load_file(folder / "moe_utils.py", f"{name}.moe_utils")
        face = load_file(folder / "fused_moe_interface.py", f"{name}.fused_moe_interface")
    ops = Operators(utils)
    plain = torch

    class Torch(ModuleType):
        def __getattr__(self, attribute):
            return getattr(plain, attribute)

    face.torch = Torch("torch")
    face.torch.ops = ops
    assert face.FUSEDMOE_AVAILABLE
    return SimpleNamespace(face=face, utils=utils, ops=ops)
