"""The cache of packed weights: same bits back, staleness by key, damage found."""

import os
from pathlib import Path

import pytest
import torch

from expertd_kernels import NAMED_DEVICES, ActivationQuant, Device, decide, problem_of
from expertd_kernels.backends import reference as backend
from expertd_kernels.oracle.decision import backend_module
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.cache import ALIGN, CacheError, PackedCache, code_digest, read_packed, write_packed
from expertd_kernels.packed.file import checksum
from expertd_kernels.packed.integrity import prove
from expertd_kernels.packed.selfcheck import accept, check
from expertd_kernels.sources.synthetic import random_weights

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
    assert cache.find(facts).outcome == "miss"
    path = cache.store(facts, packed)
    found = cache.find(facts)
    assert (found.outcome, found.why) == ("hit", "")
    again = found.entry.packed
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
    cache.find(facts).entry.packed.tensors["w13.codes"].zero_()
    assert torch.equal(cache.find(facts).entry.packed.tensors["w13.codes"], packed.tensors["w13.codes"])


@pytest.mark.parametrize("change", [{"fingerprint": "0" * 64}, {"layer": 8}, {"experts": [0, 1, 3]}, {"device": "x"}])
def test_other_facts_are_another_entry(tmp_path, change):
    cache, facts, packed = entry(tmp_path)
    path = cache.store(facts, packed)
    other = {**facts, **change}
    assert cache.find(other).outcome == "miss"
    with pytest.raises(CacheError, match="made from other facts: " + next(iter(change))):
        read_packed(path, other)
    second = cache.store(other, packed)
    assert cache.find(facts).outcome == cache.find(other).outcome == "hit"
    assert sorted(tmp_path.iterdir()) == sorted([path, second])


@pytest.mark.parametrize("change", [{"packages": {"x": "1"}}, {"files": "changed"}, {"code": "0" * 64}])
def test_another_version_is_stale_and_its_successor_takes_its_place(tmp_path, change):
    cache, facts, packed = entry(tmp_path)
    old = cache.store(facts, packed)
    newer = {**facts, **change}
    found = cache.find(newer)
    assert found.outcome == "stale"
    assert found.entry is None
    assert found.why == f"{old}: made with other {next(iter(change))}"
    path = cache.store(newer, packed)
    assert list(tmp_path.iterdir()) == [path]
    assert cache.find(newer).outcome == "hit"


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
    path.chmod(0o644)
    path.write_bytes(raw)
    found = cache.find(facts)
    assert (found.outcome, found.entry) == ("damaged", None)
    assert str(path) in found.why
    cache.store(facts, packed)
    assert cache.find(facts).outcome == "hit"


@pytest.mark.parametrize("size", [0, 7, 12, 100])
def test_a_file_that_ends_at_once_is_damaged(tmp_path, size):
    cache, facts, packed = entry(tmp_path)
    path = cache.store(facts, packed)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:size])
    assert cache.find(facts).outcome == "damaged"


def test_a_proof_lies_beside_the_weights_and_judges_them_without_canonical_ones(tmp_path):
    w = random_weights("int4_g32_zp", 6, 64, 32)
    p = problem_of(w, CPU, top_k=2)
    packed = backend.pack(w, p)
    proof = prove(w, p, reference_experts=2)
    assert check(backend.experts(packed, p), proof, p, w).ok
    cache = PackedCache(tmp_path)
    facts = cache.facts("f" * 64, 0, range(6), decide(p, pin="reference").require(), p)
    cache.store(facts, packed, accept(backend.experts(packed, p), proof, p))
    mapped = cache.find(facts).entry
    assert check(backend.experts(mapped.packed, p), mapped.proof, p).ok
    other = backend.pack(random_weights("int4_g32_zp", 6, 64, 32, seed=1), p)
    assert "relative error" in check(backend.experts(other, p), mapped.proof, p).fault
    mapped.packed.tensors["w13.scales"][3] *= 1.2  # an expert that has no reference row
    assert "expert slot 3" in check(backend.experts(mapped.packed, p), mapped.proof, p).fault
    with pytest.raises(ValueError, match="neither canonical weights nor an accepted answer"):
        check(backend.experts(packed, p), proof, p)


def test_what_a_process_left_half_written_is_swept_later(tmp_path):
    cache, facts, packed = entry(tmp_path)
    old, new = tmp_path / "layer0-x.part", tmp_path / "layer1-x.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    path = cache.store(facts, packed)
    assert sorted(tmp_path.iterdir()) == sorted([path, new])


def test_the_code_digest_is_of_the_sources(tmp_path, monkeypatch):
    import expertd_kernels.packed.cache as module

    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "cache.py"))
    before = code_digest.__wrapped__()
    (tmp_path / "a.py").write_text("2")
    assert code_digest.__wrapped__() != before


def test_checksum_sees_one_bit_anywhere():
    t = torch.randint(0, 255, (3 << 20,), dtype=torch.uint8)[:-5]
    seen = {checksum(t)}
    for at in (0, 1 << 20, (2 << 20) + 17, t.numel() - 1):
        t[at] ^= 1
        seen.add(checksum(t))
    assert len(seen) == 5


SOMEWHERE = ("cpu-avx512", "sm90", "sm100", "xpu-xe2", "gfx942")


SCHEMES = ("int4_g32", "mxfp4", "mxfp8", "e4m3_block128", "nvfp4", "bf16")


def taken(name):
    """(weights, decision) of each scheme that the row takes on some device."""
    packages = dict(assumed_packages(BACKENDS))
    for scheme in SCHEMES:
        w = random_weights(scheme, 2, 256, 128)
        problems = [
            problem_of(w, NAMED_DEVICES[d], top_k=2, packages=packages, activation_quant=rounding)
            for rounding in ActivationQuant
            for d in SOMEWHERE
        ]
        decision = next((d for p in problems if (d := decide(p, pin=name)).chosen is not None), None)
        if decision is not None:
            yield w, decision


@pytest.mark.parametrize("name", [b.name for b in BACKENDS])
def test_every_backends_packed_layers_come_back_from_disk(tmp_path, name):
    """Whatever a packer puts into tensors and meta survives the file: unpacking gives the same weights."""
    schemes = []
    for w, decision in taken(name):
        comes_back(tmp_path / w.w13.scheme.name, w, decision)
        schemes.append(w.w13.scheme.name)
    assert schemes


def comes_back(path, w, found):
    module = backend_module(found.require())
    packed = module.pack(w, found.problem)
    write_packed(path, packed, {})
    before, after = module.unpack(packed), module.unpack(read_packed(path, {}))
    for a, b in ((before.w13, after.w13), (before.w2, after.w2)):
        assert a.scheme == b.scheme
        assert [n for n, _ in a.tensors()] == [n for n, _ in b.tensors()]
        assert torch.equal(a.dequantize(), b.dequantize())
        assert torch.equal(a.codes.contiguous().view(torch.uint8), b.codes.contiguous().view(torch.uint8))
