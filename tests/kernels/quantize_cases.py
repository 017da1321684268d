"""Kernels that quantize and pack against the steps of torch, in Triton's interpreter."""

import torch
from adversarial import adversarial
from interpreted import answer_cases

from expertd_kernels import QuantTensor, Scheme
from expertd_kernels.backends.gluon.weight_only.codec import codec_of
from expertd_kernels.backends.gluon.weight_only.packing import pack_codes
from expertd_kernels.backends.gluon.weight_only.packing_code import pack_int4
from expertd_kernels.weights.canonical import unpack_nibbles
from expertd_kernels.weights.quantize import _INT4_DIVISORS, quantize_matrix
from expertd_kernels.weights.quantize_code import round_int4, round_mxfp4


def case(name: str, dtype: str) -> None:
    w = adversarial(1, 20, 512)
    scheme, plain = Scheme.parse(name), Scheme.parse(dtype)
    w = w.to({"bf16": torch.bfloat16, "f32": torch.float32}[dtype])
    want = quantize_matrix(QuantTensor(plain, (1, 20, 512), w), scheme)
    codes, scales = torch.zeros_like(want.codes), torch.zeros_like(want.scales)
    if name == "mxfp4":
        round_mxfp4(w, codes, scales)
    else:
        round_int4(w, codes, scales, scheme.cols, _INT4_DIVISORS)
    assert torch.equal(scales, want.scales)
    assert torch.equal(codes, want.codes)


def packing(gated: bool) -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 128, 96), generator=g, dtype=torch.uint8)
    scheme = Scheme.parse("int4_g64")
    want = pack_codes(unpack_nibbles(codes, 192), scheme.element, codec_of(scheme), gated)
    out = torch.zeros_like(want)
    pack_int4(codes, out, gated)
    assert torch.equal(out, want)


CASES = {
    f"{name} of {dtype}": lambda name=name, dtype=dtype: case(name, dtype)
    for name in ("int4_g32", "int4_g128", "int4_g256", "mxfp4")
    for dtype in ("bf16", "f32")
}

CASES |= {f"packing int4, gated {gated}": lambda gated=gated: packing(gated) for gated in (True, False)}

if __name__ == "__main__":
    answer_cases(CASES)
