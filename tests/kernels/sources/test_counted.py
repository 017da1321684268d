"""Weights of synthetic models: hashes of counters, the same in any order, cut and device."""

import hashlib
import math

import pytest
import torch

from expertd_kernels import Scheme
from expertd_kernels.sources import counted as module
from expertd_kernels.sources.counted import GOLDEN, ODD, counted_matrix, words
from expertd_kernels.sources.synthetic import SyntheticModel
from expertd_kernels.weights.scheme import Element, ScaleType

CPU = torch.device("cpu")
WRAP = 1 << 64
SCHEMES = ("int4_g128", "int4_g32_zp", "int8_channel", "int8_g32_zp", "e4m3_block128", "mxfp4", "mxfp8", "nvfp4",
           "bf16", "f16", "f32")  # fmt: skip


def word(key: int, i: int) -> int:
    """The formula of the module, in whole numbers."""
    z = (i * GOLDEN + key) % WRAP
    z = (z ^ (z >> 32)) * ODD % WRAP
    return z ^ (z >> 32)


def raw(q):
    return {name: t.contiguous().view(torch.uint8) for name, t in q.tensors()}


def test_words_are_the_formula():
    keys = [0, 5, (1 << 63) + 12345, WRAP - 1]
    for first in (0, 7, 1 << 33):
        found = words(keys, first, 9, CPU).tolist()
        assert [[v % WRAP for v in row] for row in found] == [[word(k, first + i) for i in range(9)] for k in keys]


def test_torch_and_numpy_make_the_same_words():
    """torch's way is taken on devices; here it is asked on the CPU."""

    class Elsewhere:  # a device that is not called "cpu", where torch computes
        type = "meta"

    keys = [3, (1 << 63) + 12345, WRAP - 1]
    arange, tensor = torch.arange, torch.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.torch, "arange", lambda *a, device: arange(*a))
        patch.setattr(module.torch, "tensor", lambda *a, device: tensor(*a))
        there = words(keys, 1 << 20, 1000, Elsewhere)
    assert torch.equal(there, words(keys, 1 << 20, 1000, CPU))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_experts_in_any_order_and_any_cut_have_the_same_bits(scheme, monkeypatch):
    s = Scheme.parse(scheme)

    def drawn(seeds):
        return raw(counted_matrix(s, (len(seeds), 96, 384), seeds, "w13", segments=2, bias=True, device=CPU))

    whole = drawn([1, 2, 3])
    assert {k: v.tolist() for k, v in drawn([1, 2, 3]).items()} == {k: v.tolist() for k, v in whole.items()}
    for name, t in drawn([3, 1]).items():
        assert torch.equal(t, whole[name][[2, 0]])
    monkeypatch.setattr(module, "CPU_WORDS", 37)
    for name, t in drawn([1, 2, 3]).items():
        assert torch.equal(t, whole[name])
    assert all(len({hashlib.sha256(e.numpy().tobytes()).digest() for e in t}) == 3 for t in whole.values())


@pytest.mark.parametrize("scheme", [*SCHEMES, "e4m3_tensor", "int4_channel"])
def test_values_spread_as_weights_do_and_none_of_a_kind_is_missing(scheme):
    K = 1024
    q = counted_matrix(Scheme.parse(scheme), (2, 256, K), [5, 6], "w2", device=CPU)
    w = q.dequantize()
    assert torch.isfinite(w).all()
    assert 0.5 < float(w.std()) * math.sqrt(K) < 2.5
    assert abs(float(w.mean())) < 0.3 * float(w.std())
    if q.scheme.element.packed:
        assert len(q.codes.unique()) == 256
    if q.scheme.element is Element.INT8:
        assert int(q.codes.min()) == -127 and int(q.codes.max()) == 127  # noqa: PT018
    if q.zeros is not None:
        assert len(q.zeros.unique()) == (16 if q.scheme.element is Element.INT4 else 41)
    if q.scheme.scale is ScaleType.E8M0:
        assert len(q.scales.unique()) == 3
    elif q.scales is not None and q.scales.numel() > 2000:
        assert len(q.scales.view(torch.uint8).unique()) > 10


def test_neighbouring_words_and_streams_are_unlike():
    """Bits of a word agree with those of the next word, and of the next stream, half of the time."""
    z = words([module._key(1, "w13 codes"), module._key(2, "w13 codes")], 0, 20000, CPU)
    for a, b in ((z[0, 1:], z[0, :-1]), (z[0], z[1])):
        same = ~(a ^ b)
        for bit in range(64):
            assert abs(float(((same >> bit) & 1).float().mean()) - 0.5) < 0.02


def test_shards_of_a_synthetic_model_agree_and_its_matrices_differ():
    model = SyntheticModel.parse("tiny:int4_g128")
    whole, part = model.load(1), model.load(1, [5, 2])
    assert torch.equal(part.w13.codes, whole.w13.codes[[5, 2]])
    assert torch.equal(part.w2.scales, whole.w2.scales[[5, 2]])
    size = whole.w2.codes[0].numel()
    assert not torch.equal(whole.w13.codes[0].flatten()[:size], whole.w2.codes[0].flatten())
    assert not torch.equal(whole.w2.codes, model.load(0).w2.codes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_draws_the_bits_of_a_cpu(scheme):
    for name in ("tiny", "tiny-oss"):
        here, there = (SyntheticModel.parse(f"{name}:{scheme}", d).load(1) for d in ("cpu", "cuda"))
        for a, b in ((here.w13, there.w13), (here.w2, there.w2)):
            assert b.device.type == "cuda"
            for (field, x), (_, y) in zip(raw(a).items(), raw(b).items(), strict=True):
                assert torch.equal(x, y.cpu()), field
