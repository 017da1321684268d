"""What the tests of the row `flashinfer_trtllm` share: layers, what the oracle says of them, the package's own layout
functions, and stand-ins for its entry points."""

from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
import trtllm_checks as checks
from vendor import functions, package_folder

from expertd_kernels import NAMED_DEVICES, ActivationQuant, decide, problem_of
from expertd_kernels.backends.rounding import round_groups, round_mx, round_nvfp4, round_static
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights

SM100 = NAMED_DEVICES["sm100"]
NAME = "flashinfer_trtllm"
FORMS = {"bf16": "bf16", "int4_g32": "int4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "e4m3_block128": "block",
         "nvfp4": "nvfp4", "e4m3_tensor": "tensor"}  # fmt: skip
ROUNDED = {"e4m3_block128": ActivationQuant.E4M3_GROUP128, "mxfp8": ActivationQuant.MXFP8,
           "nvfp4": ActivationQuant.NVFP4, "e4m3_tensor": ActivationQuant.E4M3_TENSOR}  # fmt: skip
STATIC = ("nvfp4", "e4m3_tensor")
SIZES = [(256, 256), (384, 128)]


def layer(scheme, H=256, I=128, E=3, **kw):
    w = random_weights(scheme, E, H, I, bias=kw.pop("bias", scheme == "mxfp4"), **kw)
    if scheme not in STATIC:
        return w
    steps = torch.tensor([[0.008, 0.011], [0.01, 0.007], [0.009, 0.009]]).repeat(-(-E // 3), 1)[:E]
    return replace(w, input_scales=steps / 6 if scheme == "nvfp4" else steps)


def problem(w, **kw):
    rounding = ROUNDED.get(w.w13.scheme.name, ActivationQuant.NONE)
    return problem_of(
        w, SM100, top_k=2, packages=dict(assumed_packages(BACKENDS)), **{"activation_quant": rounding, **kw}
    )


def refusals(w, **kw):
    return next(v for v in decide(problem(w, **kw)).verdicts if v.backend == NAME).refusals


@cache
def package_helpers():
    """The package's own layout functions, from its sources."""
    folder = package_folder("flashinfer")
    utils = functions(
        folder / "utils.py",
        {
            "srcToDstBlk16RowMap",
            "srcToDstBlk32RowMap",
            "get_shuffle_block_size",
            "get_shuffle_matrix_a_row_indices",
            "get_shuffle_matrix_sf_a_row_indices",
        },
        ModuleType("utils"),
    )
    names = {
        "_maybe_get_cached_w3_w1_permute_indices",
        "get_w2_permute_indices_with_cache",
        "get_reorder_rows_for_gated_act_gemm_row_indices",
        "convert_to_block_layout",
    }
    core = functions(folder / "fused_moe" / "core.py", names, utils)
    return functions(folder / "fused_moe" / "prepare.py", {"_swizzle_cutile_fp4_scales"}, core)


def vendor_rows(helpers, t, w13, scales=False):
    """One expert's [N, bytes] in the package's order, from [up, gate] rows."""
    more = {"num_elts_per_sf": 16} if scales else {}
    if w13:
        order = helpers._maybe_get_cached_w3_w1_permute_indices({}, t, 128, is_gated_act_gemm=True, **more)
    else:
        order = helpers.get_w2_permute_indices_with_cache({}, t, 128, **more)
    return t[order].contiguous()


def up_gate(t, w13):
    return torch.cat(t.chunk(2)[::-1]) if w13 else t


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(codes):
    """[M, K / 2] u8 -> [M, K] f32."""
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


class EntryPoints:
    """Stand-ins for the package's functions: they undo its layout with its helpers and compute in f32."""

    def __init__(self, helpers):
        self.helpers = helpers

    def _matrix(self, codes, scales, form, w13):
        """[E, N, K] f32 in [up, gate] order."""
        t = codes.view(torch.uint8)
        t = t.permute(0, 2, 1, 3).flatten(2) if form in ("bf16", "int4") else t
        out = []
        for e in range(len(t)):
            N = t.shape[1]
            order = torch.arange(N)[:, None]
            order = order if form == "block" else vendor_rows(self.helpers, order, w13)
            natural = torch.empty_like(t[e])
            natural[order[:, 0]] = t[e]
            if form == "bf16":
                out.append(natural.view(torch.bfloat16).float())
                continue
            if form == "block":
                big = scales[e].repeat_interleave(128, 0).repeat_interleave(128, 1)
                out.append(natural.view(torch.float8_e4m3fn).float() * big)
                continue
            if form == "tensor":
                out.append(natural.view(torch.float8_e4m3fn).float())
                continue
            n = torch.stack((natural & 15, natural >> 4), -1).flatten(-2).long()
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            number = torch.where(n >= 8, n - 16, n).float() if form == "int4" else values[n]
            number = natural.view(torch.float8_e4m3fn).float() if form == "mxfp8" else number
            group = 16 if form == "nvfp4" else 32
            sf, S = scales[e], number.shape[1] // group
            sf = sf.view(torch.uint8) if form in ("mxfp4", "mxfp8") else sf
            sf = sf.reshape(N // 128, S // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(N, S)
            sf = torch.exp2(sf.float() - 127) if form in ("mxfp4", "mxfp8") else sf.float()
            placed = torch.empty_like(sf)
            placed[order[:, 0]] = sf
            out.append(number * placed.repeat_interleave(group, 1))
        return torch.stack(out)

    def _run(self, form, x, ids, weights, k):
        E = k["local_num_experts"]
        checks.routing(ids, weights, x, k)
        assert k["num_experts"] > E, "absent routes go to an expert that is elsewhere"
        assert int(ids.min()) >= 0
        assert int(ids.max()) < k["num_experts"]
        w13 = self._matrix(k["gemm1_weights"], k.get("gemm1_weights_scale"), form, True)
        w2 = self._matrix(k["gemm2_weights"], k.get("gemm2_weights_scale"), form, False)
        assert w2.shape[2] == k["intermediate_size"]
        out = torch.zeros(x.shape[0], w2.shape[1])
        scalars = [k.get(f"output{i}") for i in ("1_gate", "1", "2")]
        for row, j in (ids < E).nonzero().tolist():
            e = int(ids[row, j])
            h = w13[e] @ x[row].float()
            if k.get("gemm1_bias") is not None:
                h = h + self._bias(k["gemm1_bias"][e], True)
            up, gate = h.chunk(2)
            if scalars[0] is not None:  # to the steps of the second input scale and back
                out[row] += weights[row, j].float() * self._static(e, up, gate, w2[e], scalars)
                continue
            alpha, beta, limit = (k[n] for n in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
            if limit is not None:
                up, gate = up.clamp(-limit[e], limit[e]), gate.clamp(max=limit[e])
            a, b = (1.0 if alpha is None else alpha[e]), (0.0 if beta is None else beta[e])
            y = w2[e] @ (gate * torch.sigmoid(a * gate) * (up + b))
            if k.get("gemm2_bias") is not None:
                y = y + self._bias(k["gemm2_bias"][e], False)
            out[row] += weights[row, j].float() * y
        return out.to(torch.bfloat16)

    def _static(self, e, up, gate, w2, scalars):
        """The contract of the package's scalars: the gate's makes it a number, the up's also steps of w2's input."""
        gate_scalar, up_scalar, down_scalar = (float(s[e]) for s in scalars)
        gate = gate * gate_scalar
        return (w2 @ (gate * torch.sigmoid(gate) * up * up_scalar)) * down_scalar

    def trtllm_fp8_per_tensor_scale_routed_moe(self, topk_ids, hidden_states, **k):
        assert hidden_states.dtype == torch.float8_e4m3fn
        assert not k.pop("use_routing_scales_on_input")
        checks.e4m3_tensor(hidden_states, k)
        given = dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
        given |= {"output1_gate": k.pop("output1_scales_gate_scalar"), "output1": k.pop("output1_scales_scalar")}
        return self._run("tensor", hidden_states, *topk_ids, {**k, **given, "output2": k.pop("output2_scales_scalar")})

    def _bias(self, bias, w13):
        order = vendor_rows(self.helpers, torch.arange(len(bias))[:, None], w13)[:, 0]
        natural = torch.empty_like(bias)
        natural[order] = bias
        return natural

    def trtllm_bf16_routed_moe(self, topk_ids, hidden_states, use_shuffled_weight, weight_layout, **k):
        assert use_shuffled_weight
        checks.bf16(hidden_states, {**k, "weight_layout": weight_layout})
        return self._run("bf16", hidden_states, *topk_ids, k)

    def trtllm_mxint4_block_scale_routed_moe(self, topk_ids, hidden_states, **k):
        checks.mxint4(hidden_states, k)
        weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16)
        return [self._run("int4", hidden_states, topk_ids >> 16, weights, k)]

    def trtllm_fp4_block_scale_routed_moe(self, topk_ids, hidden_states, hidden_states_scale, **k):
        checks.e2m1(hidden_states, hidden_states_scale, k)
        if hidden_states.dtype == torch.uint8:
            return [self._nvfp4(topk_ids, hidden_states, hidden_states_scale, k)]
        if hidden_states_scale is not None:
            assert k["hidden_states_scale_layout"] == 2
            assert hidden_states_scale.dtype == torch.float8_e4m3fn
            hidden_states = self._mx(hidden_states, hidden_states_scale.view(torch.uint8))
        assert k["gemm1_weights_scale"].dtype == torch.float8_e4m3fn
        return [self._run("mxfp4", hidden_states, *topk_ids, k)]

    def trtllm_fp8_block_scale_routed_moe(self, topk_ids, hidden_states, hidden_states_scale, **k):
        checks.e4m3_blocks(hidden_states, hidden_states_scale, k)
        assert k["weight_layout"] == 0
        assert k["use_shuffled_weight"] == (k["fp8_quantization_type"] == 2)
        if k["fp8_quantization_type"] == 2:
            return self._run("mxfp8", self._mx(hidden_states, hidden_states_scale), *topk_ids, k)
        x = hidden_states.float() * hidden_states_scale.t().repeat_interleave(128, 1)
        return self._run("block", x, *topk_ids, k)

    def _nvfp4(self, topk_ids, codes, scales, k):
        assert k["hidden_states_scale_layout"] == 2
        assert torch.equal(k["gemm1_alpha"], torch.ones(k["local_num_experts"]))
        assert scales.shape == (codes.shape[0], codes.shape[1] // 8)
        x = e2m1(codes) * scales.float().repeat_interleave(16, 1)
        scalars = {"output1_gate": k["output1_scale_gate_scalar"], "output1": k["output1_scale_scalar"]}
        return self._run("nvfp4", x, *topk_ids, {**k, **scalars, "output2": k["output2_scale_scalar"]})

    def _mx(self, codes, exponents):
        assert exponents.shape == (codes.shape[0], codes.shape[1] // 32)
        return codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)


def rounded(x, how, scale=None):
    """x as the kernel multiplies it."""
    if how is ActivationQuant.NONE:
        return x
    if how is ActivationQuant.E4M3_TENSOR:
        return round_static(x, scale).float() * scale
    if how is ActivationQuant.NVFP4:
        codes, block = round_nvfp4(x, scale)
        return e2m1(codes) * block.float().repeat_interleave(16, 1) * scale
    if how is ActivationQuant.MXFP8:
        codes, exponents = round_mx(x)
        return codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    codes, scale = round_groups(x)
    return codes.float() * scale.repeat_interleave(128, 1)
