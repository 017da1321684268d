"""What an engine computes, and for whom."""

from __future__ import annotations

import select
import time
import zlib

import numpy as np
import pytest
import torch
from setup_kit import H, inputs, on_cpu

from expertd.errors import (
    DrainingError,
    ExpertIdOutOfRangeError,
    LayerNotHeldError,
    NonFiniteHiddenStatesError,
    NonFiniteWeightsError,
    RequestCancelledError,
)
from expertd_server.engine.convert import bits_of
from expertd_server.engine.policy import Policy
from expertd_server.engine.request import STORAGE, Answer, Operand


def test_a_number_of_routes_whose_kernels_are_not_there_yet_is_said_once(make, caplog):
    s = make(warm_routes=(3,))
    one = [[2]], [[1.0]]
    s.run(
        s.caller.request(1, inputs(1), [[2, 3]], [[1.0, 1.0]]), s.caller.request(2, inputs(1), [[2, 3, 5]], [[1.0] * 3])
    )
    assert "routes a token" not in caplog.text, "the layer's own top-k, and one that was warmed up"
    s.run(s.caller.request(3, inputs(1), *one))
    s.run(s.caller.request(4, inputs(1), *one))
    assert caplog.text.count("--warm-up-routes 1 compiles them at startup") == 1
    caplog.clear()
    s = make()
    s.run(s.caller.request(1, inputs(1), *one))
    assert "routes" not in caplog.text, "nothing compiles on a CPU"


def test_e4m3_of_several_callers_is_widened_by_its_scales(make):
    """H is no whole block of 128; every code; scales of any sign, and at an odd address as they may lie in messages."""
    s = make()
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, H)
    scales = torch.tensor([0.5, -2.0, 3e-3, 448.0] * 4)
    raw = np.frombuffer(b"x" + scales.numpy().tobytes(), np.uint8)[1:].view(np.float32)
    requests = []
    for tag in (1, 2):
        r = s.caller.request(tag, torch.zeros(16, H), [[2]] * 16, [[1.0]] * 16)
        r.hidden = Operand("e4m3", codes.view(-1).numpy(), raw)
        assert r.nbytes == 256 + 64 + 2 * 64 + 4 * 256
        requests.append(r)
    s.run(*requests)
    want = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    for tag in (1, 2):
        np.testing.assert_array_equal(s.caller.outputs[tag].reshape(16, H), want.numpy())


def test_global_ids_become_slots_and_absent_experts_count_nothing(make):
    s = make()
    x = inputs(3)
    s.run(s.caller.request(1, x, [[2, 5], [0, 3], [-1, 7]], [[0.5, 2.0], [1.0, 1.0], [1.0, 1.0]]))
    factor = torch.tensor([[0.5 * 1 + 2.0 * 3], [2.0], [0.0]])
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(3, H), x * factor)
    answer = s.caller.outcomes[1]
    assert (answer.routes_computed, answer.batch_tokens, answer.batch_requests, answer.backend) == (3, 3, 1, "fake")
    s.engine.stop(10)
    assert s.reports[0].expert_tokens.tolist() == [1, 1, 1]


def test_what_waits_for_one_layer_is_computed_as_one_batch_and_split_again(make):
    s = make()
    s.block()
    xs = {tag: inputs(tag, seed=tag) for tag in (1, 2, 3)}
    for tag, x in xs.items():
        s.engine.submit(s.caller.request(tag, x, [[3]] * tag, [[float(tag)]] * tag))
    assert s.engine.load().queued_tokens == 1 + 6
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert [c[0] for c in s.fake.calls] == [1, 6]
    for tag, x in xs.items():
        assert torch.equal(torch.from_numpy(s.caller.outputs[tag]).view(tag, H), x * 2 * tag)
        assert s.caller.outcomes[tag].batch_tokens == 6
        assert s.caller.outcomes[tag].batch_requests == 3
        assert s.caller.outcomes[tag].queue_ns > 0
    assert s.engine.idle()


def test_a_batch_joins_different_dtypes_and_different_top_k(make):
    s = make()
    s.block()
    x = inputs(2)
    s.engine.submit(s.caller.request(1, x, [[2, 3, 5], [5, 3, 2]], [[1.0, 1.0, 1.0]] * 2))
    s.engine.submit(s.caller.request(2, x, [[3], [5]], [[1.0], [1.0]], hidden_dtype="bf16", id_dtype=np.int64))
    s.engine.submit(s.caller.request(3, x, [[3], [-1]], None, hidden_dtype="f16"))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert s.fake.calls[1] == (6, 3, False), "narrower rows are padded"
    out = {tag: torch.from_numpy(o).view(2, H) for tag, o in s.caller.outputs.items() if tag}
    assert torch.equal(out[1], x * 6)
    assert torch.equal(out[2], x.bfloat16().float() * torch.tensor([[2.0], [3.0]]))
    assert torch.equal(out[3], x.half().float() * torch.tensor([[2.0], [0.0]]))
    assert s.caller.outcomes[3].routes_computed == 1


@pytest.mark.parametrize("output_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
def test_output_dtypes_and_their_digests(make, compute_dtype, output_dtype):
    s = make(compute_dtype=compute_dtype)
    x = inputs(5).bfloat16().float()
    plain = s.caller.request(1, x, [[2]] * 5, [[1.0]] * 5, output_dtype=output_dtype)
    digest = s.caller.request(2, x, [[2]] * 5, [[1.0]] * 5, output_dtype=output_dtype, digest=True)
    s.run(plain, digest)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[output_dtype]
    want = x.to(dtype)
    assert s.caller.outputs[1].tobytes() == bits_of(want).tobytes()
    total, squares, crc = s.caller.outcomes[2].digest
    assert total == pytest.approx(want.double().sum().item(), rel=1e-12)
    assert squares == pytest.approx(want.double().square().sum().item(), rel=1e-12)
    assert crc == zlib.crc32(bits_of(want).tobytes())
    assert s.caller.outcomes[1].digest is None


@pytest.mark.parametrize(
    ("ids", "weights", "error", "says"),
    [
        ([[2, 8]], [[1.0, 1.0]], ExpertIdOutOfRangeError, r"topk_ids\[0, 1\] of layer 0: got 8, want 0 to 7"),
        ([[-2, 2]], [[1.0, 1.0]], ExpertIdOutOfRangeError, r"topk_ids\[0, 0\] of layer 0: got -2"),
        ([[2, 3]], [[1.0, float("nan")]], NonFiniteWeightsError, r"topk_weights\[0, 1\]: got nan"),
        ([[2, 3]], [[float("-inf"), 1.0]], NonFiniteWeightsError, r"topk_weights\[0, 0\]: got -inf"),
    ],
)
def test_a_bad_request_fails_alone_in_its_batch(make, ids, weights, error, says):
    s = make()
    s.block()
    x = inputs(1)
    s.engine.submit(s.caller.request(1, x, [[2, 3]], [[1.0, 1.0]]))
    s.engine.submit(s.caller.request(2, x, ids, weights))
    s.engine.submit(s.caller.request(3, x, [[5, 3]], [[1.0, 1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    with pytest.raises(error, match=says):
        raise s.caller.outcomes[2]
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(1, H), x * 3)
    assert torch.equal(torch.from_numpy(s.caller.outputs[3]).view(1, H), x * 5)


ODD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hidden_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("nonfinite", ["pass", "refuse", "zero"])
def test_hidden_states_that_are_no_numbers_go_by_the_servers_policy(make, nonfinite, odd, hidden_dtype, compute_dtype):
    s = make(nonfinite=nonfinite, compute_dtype=compute_dtype)
    s.block()
    fine, other = ((4 * inputs(m)).round() for m in (2, 3))  # bf16 and f16 hold them
    other[1, 5] = other[2, 0] = odd
    s.engine.submit(s.caller.request(1, fine, [[2]] * 2, [[1.0]] * 2))
    s.engine.submit(s.caller.request(2, other, [[3]] * 3, [[1.0]] * 3, hidden_dtype=hidden_dtype))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(2, H), fine)
    if nonfinite == "refuse":
        with pytest.raises(NonFiniteHiddenStatesError, match=rf"hidden_states\[1, 5\]: got {odd}, want finite numbers"):
            raise s.caller.outcomes[2]
        return
    got = torch.from_numpy(s.caller.outputs[2]).view(3, H)
    want = (other if nonfinite == "pass" else torch.where(other.isfinite(), other, 0.0)) * 2
    assert torch.equal(got[0], want[0]), "other rows do not notice"
    assert torch.equal(got.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))


@pytest.mark.parametrize("odd", ODD)
def test_weights_that_are_no_numbers_count_as_zero_where_that_is_asked(make, odd):
    s = make(nonfinite="zero")
    x = inputs(1)
    s.run(s.caller.request(1, x, [[2, 3]], [[odd, 1.0]]))
    assert torch.equal(torch.from_numpy(s.caller.outputs[1]).view(1, H), x * 2)
    assert s.caller.outcomes[1].routes_computed == 2
    s = make(nonfinite="refuse")
    s.run(s.caller.request(1, x, [[2, 3]], [[odd, 1.0]]))
    assert isinstance(s.caller.outcomes[1], NonFiniteWeightsError)


def test_ids_beyond_32_bits_do_not_wrap_round(make):
    s = make()
    s.run(s.caller.request(1, inputs(1), [[(1 << 32) + 2]], [[1.0]], id_dtype=np.int64))
    with pytest.raises(ExpertIdOutOfRangeError, match="got 4294967298"):
        raise s.caller.outcomes[1]


def test_an_empty_queue_takes_a_request_of_any_size(make):
    s = make(max_queue_tokens=2)
    s.run(s.caller.request(1, inputs(50), [[2]] * 50, [[1.0]] * 50))
    assert isinstance(s.caller.outcomes[1], Answer)


def test_drain_refuses_new_requests_and_finishes_those_taken(make):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.drain()
    assert s.engine.load().draining
    with pytest.raises(DrainingError):
        s.engine.submit(s.caller.request(2, inputs(1), [[2]], [[1.0]]))
    assert not s.engine.idle()
    s.fake.gate.set()
    s.caller.wait(0, 1)
    assert isinstance(s.caller.outcomes[1], Answer)
    s.engine.stop(10)
    assert s.engine.idle()


def test_stop_answers_what_it_could_not_compute_and_says_what_it_waited_for(make, caplog):
    s = make()
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.stop(0.05)
    s.caller.wait(1)
    assert isinstance(s.caller.outcomes[1], DrainingError)
    assert "stop: the engine's thread did not end in 0." in caplog.text


def test_a_layer_that_is_not_held_is_refused(make):
    s = make()
    with pytest.raises(LayerNotHeldError, match="layer: got 5, want one of those held here: 0-1"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]], layer=5))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("compute_dtype", ["f32", "bf16"])
def test_an_output_has_the_dtype_that_the_request_wants(make, compute_dtype, dtype):
    s = make(compute_dtype=compute_dtype)
    x = inputs(3).bfloat16().float()
    s.run(s.caller.request(1, x, [[3]] * 3, [[1.0]] * 3, output_dtype=dtype))
    got = s.caller.outputs[1]
    assert got.dtype == STORAGE[dtype]
    want = bits_of((x * 2).to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]))
    np.testing.assert_array_equal(got.view(want.dtype), want.reshape(-1))


def test_a_checksum_is_that_of_the_output(make):
    s = make()
    s.run(s.caller.request(1, inputs(1), [[3]], [[1.0]], digest=True))
    assert s.caller.outcomes[1].digest[2] == zlib.crc32(bits_of(inputs(1) * 2).tobytes())


def test_a_request_cancelled_in_its_batch_is_told_when_its_memory_is_free(make):
    s = make()
    s.block()
    gone = s.caller.request(1, inputs(1), [[3]], [[1.0]])
    s.engine.submit(gone)
    s.engine.submit(s.caller.request(2, inputs(1), [[3]], [[1.0]]))
    s.fake.entered.clear()
    s.fake.cancel = lambda: setattr(gone, "cancelled", True)  # while its batch is in the kernel
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert s.fake.calls[1][0] == 2, "it was computed"
    assert isinstance(s.caller.outcomes[1], RequestCancelledError)
    assert isinstance(s.caller.outcomes[2], Answer)


def test_layers_take_turns_by_their_oldest_request(make):
    s = make()
    s.block()
    for tag, layer in ((1, 1), (2, 0), (3, 1)):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]], layer=layer))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    s.engine.stop(10)
    assert [(b.layer.layer, b.requests) for b in s.reports] == [(0, 1), (1, 2), (0, 1)]


@on_cpu
def test_callers_answered_together_are_joined_again_when_they_come_back_one_by_one(make):
    s = make(policy=Policy(64, patience=1e7))  # of a batch of some microseconds
    s.block()
    for tag in (1, 2, 3):
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    for tag in (4, 5, 6):
        time.sleep(0.01)
        s.engine.submit(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
    s.caller.wait(4, 5, 6)
    assert [c[0] for c in s.fake.calls] == [1, 3, 3]


def test_whoever_borrowed_the_outcomes_hands_them_out(make):
    s = make()
    one = inputs(1), [[2]], [[1.0]]
    bell = s.engine.delivery.lend()
    s.engine.submit(s.caller.request(2, *one))
    assert select.select([bell], [], [], 20)[0]
    for _ in range(2):
        s.engine.between(lambda: None)  # its thread has had turns since
    assert 2 not in s.caller.outcomes
    s.engine.delivery.deliver()
    assert 2 in s.caller.outcomes
    s.engine.delivery.report()
    assert len(s.reports) == 1
    s.engine.delivery.take_back()
    s.run(s.caller.request(3, *one))


def test_a_view_is_kept_for_its_memory_and_size_alone(make):
    s = make()
    for tag, tokens in enumerate((1, 3, 3, 2, 1), 1):
        x = inputs(tokens, tag)
        weights = [[float(tag * row)] for row in range(1, tokens + 1)]
        s.run(s.caller.request(tag, x, [[3]] * tokens, weights))
        np.testing.assert_array_equal(s.caller.outputs[tag].reshape(tokens, H), x * 2.0 * torch.tensor(weights))
