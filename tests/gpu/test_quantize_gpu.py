"""Weights that are quantized and packed on a GPU: the bits of a CPU, for every served scheme and backend."""

import pytest
import torch
from adversarial import adversarial

from expertd_kernels import QuantTensor, Scheme, Weights, detect_device
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import pack, problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights import quantize as quantize_module
from expertd_kernels.weights.quantize import quantize, quantize_matrix, scheme_named
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on an accelerator, this machine has none"),
]

SCHEMES = ("int4_g128", "int4_g32", "int4_channel", "int4_g128_zp", "int8_channel", "e4m3_block128", "e4m3_channel")
SCHEMES += ("mxfp8", "mxfp4", "nvfp4")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "steps"])
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_bits_are_those_of_the_cpu(name, fused, dtype, monkeypatch):
    if not fused:
        monkeypatch.setattr(quantize_module, "_fused", lambda w, scheme, out: False)
    w = adversarial(3, 256, 512)
    if dtype == "f16":
        w = w.clamp(-6e4, 6e4)
    w = w.to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype])
    w = torch.nan_to_num(w, posinf=3e38, neginf=-3e38)
    q = QuantTensor(Scheme.parse(dtype), (3, 256, 512), w, segments=2)
    here, there = (quantize_matrix(x, scheme_named(name)) for x in (q, q.to("cuda")))
    for (field, a), (_, b) in zip(here.tensors(), there.tensors(), strict=True):
        assert b.device.type == "cuda"
        assert same(a, b), field


def test_a_nan_is_named_as_on_the_cpu():
    w = torch.zeros(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    w[1, 40, 5] = float("nan")
    with pytest.raises(ValueError, match="expert 1 holds nan at row 40, column 5"):
        quantize_matrix(QuantTensor(Scheme.parse("bf16"), (2, 64, 128), w, segments=2), scheme_named("int4_g128"))


PACKED = [
    ("gluon_sm90", "int4_g128", ActivationQuant.NONE),
    ("gluon_sm90", "int8_channel", ActivationQuant.NONE),
    ("gluon_sm90", "mxfp4", ActivationQuant.NONE),
    ("gluon_sm90", "e4m3_block128", ActivationQuant.NONE),
    ("triton", "int4_g128", ActivationQuant.NONE),
    ("triton", "int8_channel", ActivationQuant.NONE),
    ("triton", "mxfp4", ActivationQuant.NONE),
    ("triton", "e4m3_block128", ActivationQuant.NONE),
    ("gluon_w8a8", "e4m3_block128", ActivationQuant.E4M3_GROUP128),
]


@pytest.mark.parametrize(("backend", "scheme", "rounding"), PACKED)
def test_packed_bits_are_those_of_the_cpu(backend, scheme, rounding):
    plain = random_weights("bf16", 6, 512, 256, seed=3)
    row = next(b for b in BACKENDS if b.name == backend)
    packed = []
    for weights in (plain, plain.to("cuda")):
        made: Weights = quantize(weights, scheme)
        problem = problem_of(made, detect_device("auto"), activation_quant=rounding)
        if refusals := judge(row, problem):
            pytest.skip("; ".join(refusals))
        packed.append(pack(row, made, problem))
    here, there = packed
    assert here.meta == there.meta
    assert here.tensors.keys() == there.tensors.keys()
    for name in here.tensors:
        assert same(here.tensors[name], there.tensors[name]), name
