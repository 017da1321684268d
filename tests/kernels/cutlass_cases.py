"""Stand-ins for flashinfer.fused_moe's CUTLASS entry point: they undo its layouts and compute in f32."""

from types import SimpleNamespace

import cutlass_checks as checks
import torch
from torch.nn.functional import pad

from expertd_kernels import Activation, ActivationKind
from expertd_kernels.backends.cutlass_layout import BITS
from expertd_kernels.weights.float32 import apply_activation


def tile_slowly(codes):
    """[N, bytes] in the order of the kernel's threads: a block of 16 threads takes 64 codes of rows r and r + 8."""
    N, size = codes.shape
    out = torch.zeros_like(codes)
    for block in range(N // 2):
        row = block // 8 * 16 + block % 8
        for part in range(size // 32):
            for lane in range(16):
                m, low = lane // 4, lane % 4
                at = part * 32 + m * 8 + low
                four = (codes[row, at], codes[row + 8, at], codes[row, at + 4], codes[row + 8, at + 4])
                word = sum(int(b) << (8 * i) for i, b in enumerate(four))
                spread = sum((word >> i & 1) << place for i, place in enumerate(BITS))
                to = part * 32 + lane // 8 * 16 + low * 4
                for i in range(4):
                    out[row + m % 2 * 8, to + i] = spread >> (8 * i) & 255
    return out


class EntryPoint:
    """Stands in for flashinfer.fused_moe: its entry point in f32, with its activation numbers."""

    ActivationType = SimpleNamespace(Swiglu=3, Geglu=4, Relu2=6, GegluTanh=8)

    def __init__(self, w):
        self.w = w  # only for the codes of mxfp4, whose order another test has shown

    def _matrix(self, codes, scales, q, rows):
        if codes.dtype == torch.bfloat16:
            return codes.float()
        if codes.dtype == torch.float8_e4m3fn:
            return codes.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert scales.dtype == torch.int32
        _, N, size = codes.shape
        parts = q.codes.chunk(rows, 1)[::-1]
        natural = torch.cat([pad(p, (0, size - p.shape[2], 0, N // rows - p.shape[1])) for p in parts], 1)
        assert torch.equal(codes[0], tile_slowly(natural[0]))
        n = torch.stack((natural & 15, natural >> 4), -1).flatten(-2).long()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        folded = scales.view(torch.uint8)
        E, b, c = folded.shape[:3]
        sf = folded.view(E, b, c, 16, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(E, b * 64, c * 4)
        return values[n] * torch.exp2(sf.float() - 127).repeat_interleave(32, 2)

    def cutlass_fused_moe(self, x, ids, weights, w13, w2, dtype, *, quant_scales, ep_size, ep_rank, **k):
        E = w13.shape[0]
        assert (ep_size, ep_rank) == (2, 0)
        assert ids.dtype == torch.int32
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 2 * E
        checks.rows(x, ids, weights, w13, w2, k)
        if w13.dtype == torch.uint8:
            checks.weight_only_mxfp4(quant_scales, x)
        s13, s2 = quant_scales or (None, None)
        gated = k["activation_type"] != 6
        m13 = self._matrix(w13, s13, self.w.w13, 2 if gated else 1)
        m2 = self._matrix(w2, s2, self.w.w2, 1)
        out = torch.zeros(x.shape[0], w2.shape[1])
        for row, j in (ids < E).nonzero().tolist():
            e = int(ids[row, j])
            h = m13[e] @ x[row].float()
            if "fc1_expert_biases" in k:
                h = h + k["fc1_expert_biases"][e].float()
            y = m2[e] @ self._between(h, e, k)
            if "fc2_expert_biases" in k:
                y = y + k["fc2_expert_biases"][e].float()
            out[row] += weights[row, j] * y
        return [out.to(dtype)]

    def _between(self, h, e, k):
        kind = k["activation_type"]
        if kind == 6:
            return apply_activation(h, Activation(ActivationKind.RELU2))
        up, gate = h.chunk(2)
        if kind in (4, 8):
            name = ActivationKind.GELU_AND_MUL if kind == 4 else ActivationKind.GELU_TANH_AND_MUL
            return apply_activation(torch.cat((gate, up)), Activation(name))
        if "swiglu_limit" in k:
            limit = k["swiglu_limit"][e]
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        a = k["swiglu_alpha"][e] if "swiglu_alpha" in k else 1.0
        b = k["swiglu_beta"][e] if "swiglu_beta" in k else 0.0
        return gate * torch.sigmoid(a * gate) * (up + b)


class BlackwellEntryPoint(EntryPoint):
    """The same function with the quantizations of SM100, by the contract that its docstring and checks give."""

    def __init__(self, form):
        self.form = form

    def _weights(self, codes, blocks):
        """[E, N, K] f32 in [up, gate] order, without the factor of each expert."""
        if self.form == "e4m3_tensor":
            assert codes.dtype == torch.float8_e4m3fn
            return codes.float()
        assert blocks.dtype == torch.int32
        if self.form == "mxfp8":
            assert codes.dtype == torch.float8_e4m3fn
            numbers = codes.float()
        else:
            assert codes.dtype == torch.int64
            packed = codes.view(torch.uint8)
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            numbers = values[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
        E, N, K = numbers.shape
        group = 16 if self.form == "nvfp4" else 32
        assert blocks.shape == (E, N, K // group // 4)
        sf = blocks.view(torch.uint8).reshape(E, N // 128, K // group // 4, 32, 4, 4)
        sf = sf.permute(0, 1, 4, 3, 2, 5).reshape(E, N, K // group)
        sf = sf.view(torch.float8_e4m3fn).float() if self.form == "nvfp4" else torch.exp2(sf.float() - 127)
        return numbers * sf.repeat_interleave(group, 2)

    def cutlass_fused_moe(self, x, ids, weights, w13, w2, dtype, *, quant_scales, ep_size, ep_rank, **k):
        E = w13.shape[0]
        assert (ep_size, ep_rank) == (2, 0)
        assert not k["use_w4_group_scaling"]
        assert not k["use_deepseek_fp8_block_scale"]
        checks.rows(x, ids, weights, w13, w2, k)
        one = torch.ones(E)
        if self.form in ("mxfp4", "mxfp8"):
            checks.microscaled(quant_scales, w13, w2)
            s13, a, s2, b = quant_scales
            assert torch.equal(a, one)
            assert torch.equal(b, one)
            assert k["use_mxfp8_act_scaling"]
            assert k["swizzled_input_sf"] is False
            assert (x.dtype, k["input_sf"].shape) == (torch.float8_e4m3fn, (x.shape[0], x.shape[1] // 32))
            x = x.float() * torch.exp2(k["input_sf"].float() - 127).repeat_interleave(32, 1)
            first, down, second = one, one, one
        elif self.form == "e4m3_tensor":
            checks.tensor(quant_scales, w13)
            first, second, down, inputs = quant_scales
            assert (x.dtype, inputs.ndim, first.ndim) == (torch.float8_e4m3fn, 0, 1)
            s13 = s2 = None
            x = x.float()
        else:
            checks.nvfp4(quant_scales, w13, w2)
            a1, s13, first, second, s2, down = quant_scales
            assert (x.dtype, a1.shape) == (torch.bfloat16, (E,))
        m13, m2 = self._weights(w13, s13), self._weights(w2, s2)
        out = torch.zeros(x.shape[0], w2.shape[1])
        for row, j in (ids < E).nonzero().tolist():
            e = int(ids[row, j])
            steps = x[row].float() * a1[e] if self.form == "nvfp4" else x[row]
            h = m13[e] @ steps * first[e]
            h = h + k["fc1_expert_biases"][e].float() if "fc1_expert_biases" in k else h
            y = m2[e] @ (self._between(h, e, k) * second[e]) * down[e]
            y = y + k["fc2_expert_biases"][e].float() if "fc2_expert_biases" in k else y
            out[row] += weights[row, j] * y
        return [out.to(dtype)]
