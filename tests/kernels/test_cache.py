"""The cache of packed weights: same bits back, staleness by key, damage found."""

from pathlib import Path

import pytest
import torch

from expertd_kernels import Device, decide, problem_of
from expertd_kernels.backends import reference as backend
from expertd_kernels.cache import ALIGN, CacheError, PackedCache, checksum, read_packed
from expertd_kernels.synthetic import random_weights

CPU = Device("cpu", "x86_64")


def entry(tmp_path: Path, scheme="int4_g32_zp"):
    w = random_weights(scheme, 3, 64, 32, bias=True)
    decision = decide(problem_of(w, CPU), pin="reference")
    cache = PackedCache(tmp_path)
    facts = cache.facts("f" * 64, 7, [0, 1, 2], decision.require(), decision.problem)
    return cache, facts, backend.pack(w, decision.problem)


@pytest.mark.parametrize("scheme", ["int4_g32_zp", "e4m3_block128", "nvfp4", "mxfp8", "bf16"])
def test_an_entry_comes_back_bit_for_bit_and_mapped(tmp_path, scheme):
    cache, facts, packed = entry(tmp_path, scheme)
    assert cache.load(facts) is None
    path = cache.store(facts, packed)
    again = cache.load(facts)
    assert again.backend == packed.backend
    assert again.meta == packed.meta
    assert list(again.tensors) == list(packed.tensors)
    for name, t in packed.tensors.items():
        assert again.tensors[name].dtype == t.dtype
        assert torch.equal(again.tensors[name].view(torch.uint8), t.view(torch.uint8))
        assert again.tensors[name].data_ptr() % ALIGN == 0
    assert list(tmp_path.iterdir()) == [path]


def test_writing_to_a_mapped_tensor_changes_no_file(tmp_path):
    cache, facts, packed = entry(tmp_path)
    cache.store(facts, packed)
    cache.load(facts).tensors["w13.codes"].zero_()
    assert torch.equal(cache.load(facts).tensors["w13.codes"], packed.tensors["w13.codes"])


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "0" * 64}, {"layer": 8}, {"experts": [0, 1, 3]}, {"layout_version": 2}, {"packages": {"x": "1"}}],
)
def test_other_facts_are_another_entry(tmp_path, change):
    cache, facts, packed = entry(tmp_path)
    path = cache.store(facts, packed)
    other = {**facts, **change}
    assert cache.load(other) is None
    with pytest.raises(CacheError, match="made from other facts: " + next(iter(change))):
        read_packed(path, other)


@pytest.mark.parametrize("where", ["first", "header", "data", "end", "short"])
def test_damage_is_found_and_the_entry_removed(tmp_path, where):
    cache, facts, packed = entry(tmp_path)
    path = cache.store(facts, packed)
    raw = bytearray(path.read_bytes())
    if where == "short":
        raw = raw[:-ALIGN]
    else:
        at = {"first": 0, "header": 20, "data": 2 * ALIGN + 5, "end": None}[where]
        if at is None:  # the last byte that belongs to a tensor
            last = packed.tensors["w2.bias"]
            at = len(raw) - ALIGN + last.numel() * last.element_size() - 1
        raw[at] ^= 0x40
    path.write_bytes(raw)
    with pytest.warns(RuntimeWarning, match="removed and made again"):
        assert cache.load(facts) is None
    assert not path.exists()


def test_checksum_sees_one_bit_anywhere():
    t = torch.randint(0, 255, (3 << 20,), dtype=torch.uint8)[:-5]
    seen = {checksum(t)}
    for at in (0, 1 << 20, (2 << 20) + 17, t.numel() - 1):
        t[at] ^= 1
        seen.add(checksum(t))
    assert len(seen) == 5
