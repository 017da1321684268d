"""Layers of different shapes, schemes and rows share one scratch on a GPU: eager, captured, in turns, on two streams,
and when it grows.  Answers against the float32 reference, outputs and scratch poisoned."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from poisoned import counters_are_zero, poison_scratch

from expertd_kernels import (
    NoBackendError,
    build,
    decide,
    detect_device,
    problem_of,
    reference,
    relative_error,
    tolerance,
)
from expertd_kernels.backends.scratch import held_bytes, reserve, scratch_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = (1, 3, 17, 64, 130, 700, 2000)


@dataclass(frozen=True)
class Shape:
    """A layer of a row of the table."""

    row: str
    scheme: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    rounding: ActivationQuant = ActivationQuant.NONE


SHAPES = [
    Shape("gluon_sm90", "int4_g128", 32, 4, 2048, 768),
    Shape("gluon_sm90", "bf16", 9, 3, 1088, 320),
    Shape("gluon_w8a8", "e4m3_block128", 8, 2, 1152, 512, ActivationQuant.E4M3_GROUP128),
    Shape("gluon_sm90", "mxfp4", 5, 4, 2880, 1440),
    Shape("gluon_w8a8", "e4m3_channel", 40, 6, 512, 256, ActivationQuant.E4M3_TOKEN),
    Shape("triton", "int8_g32_zp", 16, 2, 640, 192),
]


class Made:
    """A layer that is ready to compute, and inputs by their number."""

    def __init__(self, s: Shape) -> None:
        self.shape = s
        device = detect_device("auto")
        where = "cuda" if device.kind == "cuda" else "cpu"
        self.weights = random_weights(s.scheme, s.experts, s.hidden, s.inner, signed_scales=True, device=where)
        problem = problem_of(self.weights, device, top_k=s.top_k, activation_quant=s.rounding, deterministic=True)
        try:
            decision = decide(problem, pin=s.row)
            decision.require()
        except NoBackendError as e:
            pytest.skip("; ".join(next(v for v in e.decision.verdicts if v.backend == s.row).refusals))
        self.experts = build(decision, self.weights)

    def inputs(self, tokens: int, seed: int = 0):
        s = self.shape
        x, ids, w = random_inputs(tokens, s.hidden, s.experts, s.top_k, seed=seed, device="cuda")
        ids[0, 0] = -1
        if tokens > 2:
            ids[tokens // 2 :] = s.experts - 1 if seed % 2 else ids[tokens // 2 :]
        return x, ids, w

    def right(self, batch):
        return reference(self.weights, *batch)

    def check(self, out, right, what):
        limit = 5e-3 if self.shape.rounding is ActivationQuant.NONE else tolerance("bf16", self.shape.rounding)
        error = relative_error(out, right)
        assert error <= limit, f"{self.shape}, {what}: relative error {error:.2e}"


@pytest.fixture(scope="module")
def layers():
    return [Made(s) for s in SHAPES]


def test_calls_in_turns_find_what_others_left(layers):
    for tokens in (*SIZES, *SIZES[::-1]):
        batches = [made.inputs(tokens, seed=tokens) for made in layers]
        outs = []
        for made, batch in zip(layers, batches, strict=True):  # launched in a row: kernels of neighbours overlap
            outs.append(made.experts(*batch, out=torch.full_like(batch[0], float("nan"))))
        assert counters_are_zero()
        for made, batch, out in zip(layers, batches, outs, strict=True):
            made.check(out, made.right(batch), f"{tokens} tokens")


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
def test_calls_find_rubbish(layers, byte):
    for made, tokens in itertools.product(layers, SIZES):
        batch = made.inputs(tokens, seed=1)
        made.experts(*batch)
        poison_scratch(byte)
        out = made.experts(*batch, out=torch.full_like(batch[0], float("nan")))
        made.check(out, made.right(batch), f"{tokens} tokens, scratch of {byte:#x}")
        assert counters_are_zero()


def test_graphs_of_many_layers_and_sizes_share_a_pool_and_a_scratch_that_grows_later(layers):
    """Each graph is captured for itself, replayed in two orders, between calls that are not, and again when larger
    calls have made the scratch move."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made_with = []
        for made, tokens in itertools.product(layers, (1, 17, 130)):
            batch = made.inputs(tokens, seed=tokens)
            out = torch.empty_like(batch[0])
            made.experts(*batch, out=out)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            made.experts(*batch, out=out)
            graph.capture_end()
            made_with.append((made, batch, out, made.right(batch), graph))
        assert counters_are_zero(), "capturing computes nothing"
        held = held_bytes(CUDA)

        def replay(order, between):
            for _, _, out, _, _ in made_with:
                out.fill_(float("nan"))
            poison_scratch()
            for i, (_, _, _, _, graph) in enumerate(order):
                graph.replay()
                between(i)
            stream.synchronize()
            for made, batch, out, right, _ in made_with:
                made.check(out, right, f"{len(batch[0])} tokens replayed")
            assert counters_are_zero()

        replay(made_with, lambda i: None)
        replay(made_with[::-1], lambda i: layers[i % len(layers)].experts(*layers[i % len(layers)].inputs(33)))
        before = scratch_of(CUDA).memory(0).data_ptr()
        reserve(CUDA, 2 * held + (64 << 20))
        assert scratch_of(CUDA).memory(0).data_ptr() != before
        rubbish = torch.full(
            (held,), 0xFF, dtype=torch.uint8, device="cuda"
        )  # were the old block free, here it would go
        replay(made_with, lambda i: layers[i % len(layers)].experts(*layers[i % len(layers)].inputs(33)))
        del rubbish
        for made, batch, _, _, _ in made_with:  # other inputs in the same places
            for held_tensor, new in zip(batch, made.inputs(len(batch[0]), seed=99), strict=True):
                held_tensor.copy_(new)
        made_with = [(m, b, o, m.right(b), g) for m, b, o, _, g in made_with]
        replay(made_with, lambda i: None)


def test_one_graph_of_all_layers_captured_on_a_stream_of_its_own(layers):
    """As the documents show it: warm on the current stream, captured on torch's."""
    batches = [made.inputs(8, seed=3) for made in layers]
    outs = [torch.empty_like(x) for x, _, _ in batches]
    for made, batch, out in zip(layers, batches, outs, strict=True):
        made.experts(*batch, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for made, batch, out in zip(layers, batches, outs, strict=True):
            made.experts(*batch, out=out)
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        for made in layers:  # on the current stream, whose scratch is another
            made.experts(*made.inputs(64, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        for made, batch, out in zip(layers, batches, outs, strict=True):
            made.check(out, made.right(batch), "one graph")


def test_two_streams_compute_at_once(layers):
    """Each has its own scratch and counters: the bits are those of one stream alone."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    jobs = [[(made, made.inputs(tokens, seed=n)) for made in layers for tokens in (3, 130, 700)] for n in range(2)]
    right = [[made.experts(*batch).clone() for made, batch in job] for job in jobs]
    torch.cuda.synchronize()
    for _ in range(10):
        outs = [[torch.full_like(batch[0], float("nan")) for _, batch in job] for job in jobs]
        torch.cuda.synchronize()
        for pair in zip(*(zip(job, out, strict=True) for job, out in zip(jobs, outs, strict=True)), strict=True):
            for stream, ((made, batch), out) in zip(streams, pair, strict=True):
                with torch.cuda.stream(stream):
                    made.experts(*batch, out=out)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for x, y in zip(outs, right, strict=True) for a, b in zip(x, y, strict=True))


def test_scratch_is_what_the_largest_call_needs_and_no_more_for_many_layers():
    """What was kept for each layer and power of two of tokens before."""
    s = Shape("gluon_sm90", "int4_g128", 32, 4, 1024, 512)
    layers = [Made(s) for _ in range(4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers[0].experts(*layers[0].inputs(2048))
        stream.synchronize()
        torch.cuda.empty_cache()
        held, allocated = held_bytes(CUDA), torch.cuda.memory_allocated()
        for made, tokens in itertools.product(layers, (1, 8, 100, 512, 1024, 2048)):
            batch = made.inputs(tokens)
            made.experts(*batch, out=batch[0])
            del batch
        stream.synchronize()
        assert held_bytes(CUDA) == held
        assert torch.cuda.memory_allocated() - allocated < 1 << 20
