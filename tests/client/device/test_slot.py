"""Tensors that lie in a session's memory: nothing is copied, and nobody gets another's."""

import random
from itertools import pairwise

import pytest
import torch
from connection_kit import E, H
from software_gpu import MISSING, STREAM, forward, inputs

from expertd.errors import ExpertIdOutOfRangeError, LayerNotHeldError
from expertd_client.device.slot import Ground

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]


def fill(slot, tensors):
    for to, t in zip((slot.hidden_states, slot.topk_ids, slot.topk_weights), tensors, strict=True):
        to.copy_(t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_answers_are_right_beside_calls_of_tensors_elsewhere(lane, dtype):
    slots = [lane.slot(M, H, 2, dtype) for M in (1, 7, 3)]
    for seed in range(12):
        slot = slots[seed % 3]
        t, want = inputs(len(slot.output), dtype, seed=seed)
        fill(slot, t)
        slot.output.fill_(float("nan"))
        first, other = inputs(4, seed=100 + seed)
        assert torch.allclose(forward(lane, 1, first).float(), other, rtol=1e-2)
        assert slot.forward(seed % 2, stream=STREAM) is slot.output
        assert slot.output.dtype == dtype
        assert torch.allclose(slot.output.float(), want, rtol=1e-2)
        assert all(torch.equal(a, b) for a, b in zip((slot.hidden_states, slot.topk_ids), t[:2], strict=True))
    assert len(lane._prepared) == 7, "each slot and layer is asked for once"


def test_what_is_refused_is_nan_and_only_that(lane):
    a, b = lane.slot(3, H, 2), lane.slot(3, H, 2)
    assert (a.topk_ids == -1).all(), "nobody's, until somebody says so"
    t, want = inputs(3)
    for slot in (a, b):
        fill(slot, t)
    assert torch.allclose(b.forward(0, stream=STREAM).float(), want, rtol=1e-2)
    a.topk_ids[2, 1] = E
    assert a.forward(0, stream=STREAM).isnan().all()
    assert torch.allclose(b.output.float(), want, rtol=1e-2)
    with pytest.raises(ExpertIdOutOfRangeError, match=r"\[2, 1\]: got|\[2, 1\]"):
        lane.check()
    with pytest.raises(LayerNotHeldError):
        a.forward(5, stream=STREAM)
    a.topk_ids[2, 1] = t[1][2, 1]
    assert torch.allclose(a.forward(0, stream=STREAM).float(), want, rtol=1e-2)


def test_memory_is_given_back_and_bounded(lane):
    whole = lane.bytes
    a_slot = 100 * (4 * H + 16)
    slots = [lane.slot(100, H, 2) for _ in range(whole // (a_slot + 1024))]
    with pytest.raises(ValueError, match="no memory left for a slot of 200 tokens"):
        lane.slot(200, H, 2)
    assert lane.bytes < whole
    with pytest.raises(ValueError, match="split the batch"):
        forward(lane, 0, inputs(lane.bytes // 16)[0])
    for slot in slots:
        slot.close()
        slot.close()
    assert lane.bytes == whole
    with pytest.raises(ValueError, match="closed"):
        slots[0].forward(0)
    with pytest.raises(ValueError, match="want at least 1"):
        lane.slot(0, H, 2)
    with pytest.raises(ValueError, match="of bf16, f16 or f32"):
        lane.slot(1, H, 2, torch.int32)


def test_no_two_have_the_same_memory():
    for seed in range(200):
        rng, taken, calls = random.Random(seed), [], 0
        ground = Ground(1 << 14)
        for _ in range(60):
            sizes = [rng.randint(1, 900) for _ in range(4)]
            kind = rng.choice(("slot", "slot", "call", "free"))
            if kind == "slot" and (place := ground.slot(sizes)):
                taken.append(place)
            elif kind == "call" and (place := ground.call(sizes)):
                calls = max(calls, place.end)
            elif kind == "free" and taken:
                ground.free(taken.pop(rng.randrange(len(taken))))
            ends = sorted((p.hidden, p.end) for p in taken)
            assert all(a[1] <= b[0] for a, b in pairwise(ends))
            assert not ends or (calls <= ends[0][0] and ends[-1][1] <= 1 << 14)
            assert ground.left == min([1 << 14, *(begin for begin, _ in ends)])
