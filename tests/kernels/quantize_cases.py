"""Kernels of weights/quantize_code.py against the steps of torch, in Triton's interpreter."""

import torch
from adversarial import adversarial
from interpreted import answer_cases

from expertd_kernels import QuantTensor, Scheme
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


CASES = {
    f"{name} of {dtype}": lambda name=name, dtype=dtype: case(name, dtype)
    for name in ("int4_g32", "int4_g128", "int4_g256", "mxfp4")
    for dtype in ("bf16", "f32")
}

if __name__ == "__main__":
    answer_cases(CASES)
