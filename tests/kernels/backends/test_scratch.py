"""Scratch memory: one block for a device and stream, counters apart from it, layouts that fit what kernels write."""

import itertools
import types

import pytest
import torch

from expertd_kernels.backends import scratch as module
from expertd_kernels.backends.gluon.shared.space import FLOAT32_TOKENS, layer_space, tokens_of, w8a8_space
from expertd_kernels.backends.gluon.w8a8.plan import Shape8
from expertd_kernels.backends.gluon.weight_only.planning import TABLE_ROUTES
from expertd_kernels.backends.scratch import COUNTERS, Layout, held_bytes, reserve, scratch_of, settle_counters

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch):
    """Streams of a device as numbers: set .now; .captures: whether its current one is being captured."""
    state = types.SimpleNamespace(now=1, captures=False)
    monkeypatch.setattr(module, "stream_of", lambda device: state.now)
    monkeypatch.setattr(module, "capturing", lambda device: state.captures)
    monkeypatch.setattr(module, "_all", {})
    monkeypatch.setattr(module, "_spare", {})
    return state


def test_parts_are_aligned_and_apart():
    layout = Layout({"a": ((3,), torch.int32), "b": ((5, 7), torch.bfloat16), "c": ((1,), torch.uint8)})
    assert layout.places == {"a": (0, 12), "b": (256, 70), "c": (512, 1)}
    assert layout.nbytes == 768


def test_every_layer_of_a_stream_has_the_same_memory_and_another_stream_its_own(streams):
    large = Layout({"a": ((1 << 20,), torch.float32)}, {"done": (0, 8)})
    small = Layout({"b": ((100,), torch.uint8)}, {"done": (4, 8)})
    first = scratch_of(CPU).kept_parts(large)
    assert scratch_of(CPU).kept_parts(small)["b"].data_ptr() == first["a"].data_ptr()
    assert scratch_of(CPU).kept_parts(small)["done"].data_ptr() == first["done"].data_ptr() + 16
    assert scratch_of(CPU).kept_parts(large) is first
    streams.now = 2
    other = scratch_of(CPU).kept_parts(large)
    assert other["a"].data_ptr() != first["a"].data_ptr()
    assert other["done"].data_ptr() != first["done"].data_ptr()
    assert held_bytes(CPU) == 2 * (4 << 20)


def test_what_is_outgrown_stays_for_the_graphs_that_hold_its_address(streams):
    first = scratch_of(CPU).memory(100)
    assert scratch_of(CPU).memory(50).data_ptr() == first.data_ptr()
    larger = scratch_of(CPU).memory(2 * first.numel() + 1)
    assert scratch_of(CPU).memory(10).data_ptr() == larger.data_ptr()
    assert held_bytes(CPU) == first.numel() + larger.numel()


def test_parts_that_were_kept_move_with_the_memory(streams):
    layout = Layout({"a": ((100,), torch.uint8)})
    before = scratch_of(CPU).kept_parts(layout)
    reserve(CPU, 1 << 22)
    after = scratch_of(CPU).kept_parts(layout)
    assert after["a"].data_ptr() == scratch_of(CPU).memory(0).data_ptr() != before["a"].data_ptr()


def test_reserving_holds_what_was_asked_and_no_more(streams):
    reserve(CPU, 5_000_000)
    block = scratch_of(CPU).memory(5_000_000)
    reserve(CPU, 4_000_000)
    assert scratch_of(CPU).memory(1).data_ptr() == block.data_ptr()
    assert held_bytes(CPU) == 5_000_000


def test_memory_of_inference_mode_can_be_written_outside_of_it(streams):
    layout = Layout({"a": ((4,), torch.float32)}, {"done": (0, 4)})
    with torch.inference_mode():
        parts = scratch_of(CPU).kept_parts(layout)
    parts["a"].zero_()
    parts["done"].zero_()


def test_counters_exist_before_a_capture_or_the_call_is_refused(streams):
    """Zeroed within a capture they would be zero at each replay, and not before the first."""
    streams.captures = True
    with pytest.raises(RuntimeError, match="first call on this stream is being captured; call the layer before"):
        scratch_of(CPU)
    streams.captures = False
    settle_counters(CPU)
    streams.captures = True
    made = []
    for streams.now in range(module.STREAMS):
        made.append(scratch_of(CPU).words)
    assert not any(w.any() for w in made)
    assert len({w.data_ptr() for w in made}) == module.STREAMS
    streams.now = -1
    with pytest.raises(RuntimeError, match="call the layer before"):
        scratch_of(CPU)


SIZES = list(itertools.product((1, 8, 128, 512), (1, 8, 32), (1, 3, 16, 33, 512, 1000, 4096)))


@pytest.mark.parametrize(("experts", "top_k", "tokens"), SIZES)
def test_a_layout_of_gluon_sm90_fits_every_call_of_its_tokens(experts, top_k, tokens):
    H, I = 2880, 1000
    shapes = layer_space(experts, H, I, tokens_of(tokens), top_k).shapes
    n = tokens * top_k
    ints = shapes["ints"][0][0]
    split = -(-(2 * n + experts) // 16) * 16
    # lists: counts [E], then the routes; a table: up to a power of two of blocks, then whole blocks of up to 64 routes
    assert split >= experts
    assert ints >= split + n
    if n <= TABLE_ROUTES:
        for block in (8, 16, 32, 64):
            blocks = min(n, n // block + min(experts, n))
            assert split >= 1 << (blocks - 1).bit_length()
            assert ints >= split + blocks * min(block, 64)
    assert shapes["h"][0][0] >= n * 1024
    assert shapes["y"][0][0] >= n * H
    assert shapes["y"][0][0] >= 2 * min(tokens, FLOAT32_TOKENS) * top_k * H, "and as f32 those of few"


@pytest.mark.parametrize(("experts", "top_k", "tokens"), SIZES)
def test_a_layout_of_gluon_w8a8_fits_every_call_of_its_tokens(experts, top_k, tokens):
    H, I, n = 1152, 384, tokens * top_k
    for grouped, static in ((True, False), (False, True), (False, False)):
        layout = w8a8_space(Shape8(experts, top_k, H, I), grouped, static, tokens_of(tokens), 2)
        rows = {name: shape[0] for name, (shape, _) in layout.shapes.items()}
        assert min(rows[name] for name in ("lists", "places", "h", "y")) >= n
        assert rows["x"] >= tokens
        assert rows["partial"] >= 2 * n
        assert (rows["wide"] >= n) == (not grouped and not static)
        assert (rows["x_scale"] >= tokens) == (rows["h_scale"] >= n) == (rows["listed_scale"] >= n) == (not static)
        assert layout.counters["tickets"][1] <= COUNTERS
        for name in ("y", "x", "h"):  # bulk copies want 16 bytes, and y is seen as e4m3 rows of inputs, too
            assert layout.places[name][0] % 16 == 0
