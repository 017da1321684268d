"""Weights rounded by the CPU kernel: the bits of the steps of torch, on each kind of registers."""

from __future__ import annotations

import pytest
import torch
from adversarial import adversarial

from expertd_kernels.native import rounding
from expertd_kernels.native.library import Context, kernel_error, levels
from expertd_kernels.weights import quantize as quantize_module
from expertd_kernels.weights.canonical import QuantTensor
from expertd_kernels.weights.quantize import quantize_matrix
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

pytestmark = pytest.mark.skipif(bool(kernel_error()), reason=kernel_error())

SCHEMES = [
    *(
        Scheme.parse(name, scale)
        for name in ("int4_g32", "int4_g128", "int4_g128_zp", "int4_channel", "int4_channel_zp", "e4m3_channel")
        for scale in (ScaleType.BF16, ScaleType.F16, ScaleType.F32)
    ),
    Scheme.parse("mxfp4"),
    Scheme.parse("nvfp4"),
]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def matrix(dtype: str, *shape: int, seed: int = 0) -> QuantTensor:
    w = adversarial(*shape, seed=seed)
    most = float(torch.finfo(DTYPES[dtype]).max)
    w = w.clamp(-most, most).to(DTYPES[dtype])
    assert torch.isfinite(w).all()
    return QuantTensor(Scheme(Element(dtype)), tuple(w.shape), w, segments=2)  # type: ignore[arg-type]


def native_and_torch(
    q: QuantTensor, scheme: Scheme, monkeypatch: pytest.MonkeyPatch, level: str
) -> tuple[QuantTensor, QuantTensor]:
    on, calls = Context(level, threads=2), []
    real = rounding.round_rows

    def counted(*args: object) -> None:
        calls.append(args)
        real(*args, on=on)  # type: ignore[arg-type]

    monkeypatch.setattr(quantize_module, "round_rows", counted)
    native = quantize_matrix(q, scheme)
    assert calls, "the CPU kernel took no part"
    monkeypatch.setattr(quantize_module, "rounds", lambda columns, block: False)
    taken = len(calls)
    slow = quantize_matrix(q, scheme)
    assert len(calls) == taken
    return native, slow


@pytest.mark.parametrize("level", ["best", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bits_are_those_of_torch(scheme: Scheme, dtype: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = matrix(dtype, 2, 32, 1280, seed=len(dtype))
    native, slow = native_and_torch(q, scheme, monkeypatch, levels()[0] if level == "best" else level)
    for (field, got), (_, want) in zip(native.tensors(), slow.tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), field
    assert native.codes.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_call_takes_a_few_weights_at_a_time(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may wait for the same threads."""
    q, scheme, sizes = matrix(dtype, 5, 32, 256), Scheme.parse("int4_g128"), list[int]()
    want = quantize_matrix(q, scheme)
    real = rounding.round_rows

    def noted(kind: rounding.Kind, weights: torch.Tensor, *rest: object) -> None:
        sizes.append(weights.numel())
        real(kind, weights, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(quantize_module, "round_rows", noted)
    monkeypatch.setattr(quantize_module, "_CALL_ELEMENTS", 3 * 16 * 256)
    got = quantize_matrix(q, scheme)
    assert sizes == [3 * 16 * 256] * 3 + [16 * 256]
    for (field, a), (_, b) in zip(got.tensors(), want.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounding.rounds(256, 128)
    assert not rounding.rounds(288, 128), "a block that is cut"
    assert not rounding.rounds(36, 36), "no whole registers"
    monkeypatch.setattr(rounding, "kernel_error", lambda: "not built")
    assert not rounding.rounds(256, 128)
    monkeypatch.setattr(quantize_module, "round_rows", None)
    quantize_matrix(matrix("f32", 1, 32, 256), Scheme.parse("int4_g128"))


def test_bad_sizes_are_refused() -> None:
    w, ones = torch.ones(1, 2, 256), torch.ones(1)
    codes, scales = torch.zeros(1, 2, 128, dtype=torch.uint8), torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    for block, tries in ((0, [8.0]), (12, [8.0]), (192, [8.0])):
        with pytest.raises(ValueError, match="rounding to int4: bad argument"):
            rounding.round_rows("int4", w, block, tries, ones, codes, scales)
    with pytest.raises(ValueError, match="rounding to int4: bad argument"):
        rounding.round_rows("int4", w, 128, [8.0], ones, codes, scales, zeros=torch.zeros(1, 2, 2, dtype=torch.uint8))
    assert not codes.any()
