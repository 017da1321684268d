"""A digest belongs to an expert's weights: not to whom they were loaded with, where they are, nor what they become."""

from dataclasses import replace

import pytest
import torch

from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.sources.synthetic import SyntheticModel, random_weights
from expertd_kernels.weights import quantize as quantizing
from expertd_kernels.weights.digest import BLOCK_BYTES, expert_digests

SCHEMES = ("int4_g32_zp", "int8_g32", "e4m3_channel", "mxfp4", "nvfp4", "bf16", "f32")


def weights_of(scheme, hidden=96, intermediate=33):
    return random_weights(scheme, 4, hidden, intermediate, bias=True, act_order=scheme.startswith("int4"), seed=3)


def changed(weights, matrix, name, expert, at):
    """The same weights, one bit of one byte of one expert turned."""
    old = getattr(getattr(weights, matrix), name)
    tensor = old.clone()
    tensor.reshape(4, -1).view(torch.uint8)[expert].view(-1)[at] ^= 1
    return replace(weights, **{matrix: replace(getattr(weights, matrix), **{name: tensor})})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_byte_of_every_tensor_counts_for_its_expert(scheme):
    weights = weights_of(scheme)
    before = expert_digests(weights)
    assert len(set(before.tolist())) == 4
    assert 0 <= int(before.min()) <= int(before.max()) < 1 << 32
    for matrix in ("w13", "w2"):
        for name, tensor in getattr(weights, matrix).tensors():
            size = tensor[0].numel() * tensor.element_size()
            for at in {0, size // 2, size - 1}:
                after = expert_digests(changed(weights, matrix, name, 2, at))
                assert (after != before).tolist() == [False, False, True, False], (matrix, name, at)


def test_blocks_that_are_exchanged_count():
    weights = random_weights("bf16", 2, 256, 64, seed=1)
    before = expert_digests(weights)
    codes = weights.w2.codes.clone()
    rows = BLOCK_BYTES // (2 * codes.shape[2])  # of a block
    codes[1, : 2 * rows] = codes[1, : 2 * rows].roll(rows, dims=0)
    after = expert_digests(replace(weights, w2=replace(weights.w2, codes=codes)))
    assert (after != before).tolist() == [False, True]


@pytest.mark.parametrize("scheme", ["int4_g32", "bf16"])
def test_it_is_the_same_whoever_else_is_loaded(scheme):
    source = SyntheticModel.parse(f"tiny:{scheme}")
    whole = expert_digests(source.load(1))
    assert expert_digests(source.load(1, [2, 5])).tolist() == whole[[2, 5]].tolist()
    assert expert_digests(source.load(1).experts([2, 5])).tolist() == whole[[2, 5]].tolist()
    assert not set(whole.tolist()) & set(expert_digests(source.load(0)).tolist())


def test_of_what_is_quantized_while_loading_it_is_that_of_the_origin(monkeypatch):
    """Another device may round otherwise."""
    source = QuantizedSource(SyntheticModel.parse("tiny:bf16"), "int4_g128")
    first = source.load(1)
    origin = expert_digests(source.source.load(1)).tolist()
    assert expert_digests(first).tolist() == origin
    assert expert_digests(first.experts([3])).tolist() == origin[3:4]
    assert expert_digests(replace(first, origin=None)).tolist() != origin
    monkeypatch.setattr(quantizing, "_INT4_DIVISORS", (8.0,))
    other = source.load(1)
    assert not torch.equal(other.w2.codes, first.w2.codes)
    assert expert_digests(other).tolist() == origin
