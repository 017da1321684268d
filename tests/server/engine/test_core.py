"""The engine's core on a CPU, with experts of one line: y = x * sum(weight * (slot + 1)), exact for small numbers."""

import ctypes as C
import threading

import pytest
import torch
from core_kit import BF16, F32, HELD, MOST, TORCH, Bench, Caller, E, H, bench, expected, inputs, slot_table
from core_library import needs_core

from expertd_server.engine import core as module
from expertd_server.engine.core import BatchSlotMemory, Config, Forward, LayerFacts, Run, library
from expertd_server.engine.report import WAIT_BOUNDS_NS

pytestmark = [needs_core, pytest.mark.timeout(60)]


@pytest.mark.parametrize("compute", [F32, BF16])
@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.float16, torch.bfloat16])
def test_types_go_in_and_out_as_torch_converts_them(compute, x, out):
    with bench(compute=compute) as b:
        for ids, w in ((torch.int32, torch.float32), (torch.int64, torch.bfloat16), (torch.int32, torch.float16)):
            t = inputs(5, x=x, ids=ids, w=w)
            t = ((t[0].float() + 0.3).to(x), *t[1:])
            handle, _, got = b.forward(*t, out_dtype=out)
            assert b.outcome(handle)[0] == ""
            want = expected(t[0].to(TORCH[compute]), *t[1:]).to(TORCH[compute]).to(out)
            assert torch.equal(got, want)


def test_every_number_of_f16_and_e4m3_is_read_as_torch_reads_it():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[~every.isnan()]
    with bench() as b:
        one = torch.ones(MOST, 1)
        ids = torch.full((MOST, 1), 2, dtype=torch.int32)
        for start in range(0, len(every) // H // MOST * H * MOST, H * MOST):
            x = every[start : start + H * MOST].view(MOST, H)
            handle, _, got = b.forward(x, ids, one, out_dtype=torch.float32)
            b.outcome(handle)
            assert torch.equal(got, x.float())
            handle, _, back = b.forward(x.float(), ids, one, out_dtype=torch.float16)
            b.outcome(handle)
            assert torch.equal(back, x)
        codes = torch.arange(6 * H, dtype=torch.int32).to(torch.uint8).view(6, H)
        scales = torch.tensor([0.5, 2.0, -1.0, 0.1, 7.0, 1e-3]).view(6, 1)
        handle, _, got = b.forward(codes, ids[:6], one[:6], out_dtype=torch.float32, scales=scales)
        assert b.outcome(handle)[0] == ""
        want = codes.view(torch.float8_e4m3fn).float() * scales
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_rounding_to_f16_and_bf16_is_torchs():
    g = torch.Generator().manual_seed(3)
    odd = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, 6e-8, 2.9e-8, 3.1e-8, float("inf"), 1.0000001])
    x = torch.cat(
        [
            odd,
            torch.randn(MOST * H - len(odd), generator=g)
            * 10.0 ** torch.randint(-9, 6, (MOST * H - len(odd),), generator=g),
        ]
    )
    x = x.view(MOST, H).contiguous()
    ids, one = torch.full((MOST, 1), 2, dtype=torch.int32), torch.ones(MOST, 1)
    with bench() as b:
        for dtype in (torch.float16, torch.bfloat16):
            handle, _, got = b.forward(x, ids, one, out_dtype=dtype)
            b.outcome(handle)
            assert torch.equal(got.view(torch.int16), x.to(dtype).view(torch.int16))


def test_requests_that_wait_are_one_batch_and_each_gets_its_own():
    with bench() as b:
        first = b.hold(*inputs(1))
        several = [(b.forward(*(t := inputs(1 + i, k=1 + i % 4, seed=i)), caller=i), t) for i in range(6)]
        b.may_run.set()
        b.outcome(first[0])
        for (handle, _, out), t in several:
            reason, routes, _, _ = b.outcome(handle)
            assert (reason, routes) == ("", int((torch.from_numpy(slot_table())[t[1].long()] >= 0).sum()))
            assert torch.equal(out, expected(*t))
        assert [(rows, requests) for _, _, rows, requests, *_ in b.batches] == [(1, 1), (21, 6)]
        everything = torch.cat([inputs(1)[1].flatten(), *(t[1].flatten() for _, t in several)])
        held = torch.from_numpy(slot_table())[everything.long()]
        assert b.counts.tolist() == torch.bincount(held[held >= 0], minlength=HELD).tolist()


def test_a_request_alone_is_read_and_written_in_place():
    with bench() as b:
        x, ids, w = inputs(4)
        handle, _, out = b.forward(x, ids, w)
        b.outcome(handle)
        assert b.batches[0][4:] == (x.data_ptr(), out.data_ptr())
        odd = torch.zeros(4 * H + 1)[1:].view(4, H)  # 4 bytes off: copied
        odd[:] = x
        handle, _, out2 = b.forward(odd, ids, w)
        b.outcome(handle)
        assert b.batches[1][4] != odd.data_ptr()
        assert torch.equal(out, out2)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [(1, E, "EXPERT_ID_OUT_OF_RANGE"), (0, -2, "EXPERT_ID_OUT_OF_RANGE"), (2, 2**40 + 2, "EXPERT_ID_OUT_OF_RANGE"),
     (1, float("nan"), "NON_FINITE_WEIGHTS"), (2, float("-inf"), "NON_FINITE_WEIGHTS")],
)  # fmt: skip
def test_a_bad_request_fails_alone(column, value, reason):
    with bench() as b:
        first = b.hold(*inputs(1))
        x, ids, w = inputs(3, ids=torch.int64)
        ids, w = ids.clone(), w.clone()
        (ids if isinstance(value, int) else w)[2, column] = value
        t = inputs(2, seed=5)
        bad, good = b.forward(x, ids, w), b.forward(*t)
        b.may_run.set()
        b.outcome(first[0])
        got, routes, text, _ = b.outcome(bad[0])
        assert (got, routes) == (reason, 0)
        assert f"[2, {column}]" in text
        assert bad[2].isnan().all(), "a refused request's output is not written"
        assert b.outcome(good[0])[0] == ""
        assert torch.equal(good[2], expected(*t))
        assert b.batches[1][3] == 2


def test_rows_grouped_by_expert_have_weight_one():
    with bench() as b:
        x, ids, _ = inputs(4, k=1)
        handle, _, out = b.forward(x, ids, None)
        b.outcome(handle)
        assert torch.equal(out, expected(x, ids, torch.ones(4, 1)))


def test_a_failed_batch_answers_all_and_the_next_one_runs():
    with bench() as b:
        b.fails = "backend x: it broke"
        handle, _, _ = b.forward(*inputs(2))
        assert b.outcome(handle)[:3] == ("BACKEND_FAILED", 0, "backend x: it broke")
        b.fails = ""
        handle, _, _ = b.forward(*inputs(2))
        assert b.outcome(handle)[0] == ""
        assert [r.failed for r in b.core.records()] == [1, 0]


def test_records_say_which_backend_ran():
    with bench() as b:
        for M in (4, 5):
            b.outcome(b.forward(*inputs(M))[0])
        assert [(r.tokens, r.backend, r.requests) for r in b.core.records()] == [(4, 7, 1), (5, 8, 1)]


def test_batches_that_nobody_asked_for_are_added_up():
    with bench() as b:
        for n in range(700):
            handle, _, _ = b.forward(*inputs(1 + n % 2))
            b.outcome(handle)
        records = []
        while more := b.core.records():
            records += [module.BatchRecord.from_buffer_copy(r) for r in more]
        assert len(records) < 400
        assert sum(r.batches for r in records) == 700
        assert sum(r.batches * r.tokens for r in records) == 1050
        assert sum(sum(r.waits) for r in records) == 700
        assert {r.batches for r in records[:256]} == {1}


def test_structs_are_the_same_in_python_and_in_cpp():
    sizes = (C.c_uint64 * 64)()  # more than there are: a struct that this list lacks is not written beyond it
    library().expertd_core_sizes(sizes)
    kinds = (
        Config,
        Forward,
        module.Outcome,
        LayerFacts,
        BatchSlotMemory,
        Run,
        module.BatchRecord,
        module.Load,
        module.Waiting,
        module.Measured,
        module.TcpBoundsStruct,
        module.TraceRecord,
        module.InlineMessage,
        module.RequestFacts,
    )
    assert [size for size in sizes if size] == [C.sizeof(k) for k in kinds]
    bounds = (C.c_uint64 * len(WAIT_BOUNDS_NS))()
    library().expertd_core_wait_bounds(bounds)
    assert tuple(bounds) == WAIT_BOUNDS_NS


def test_a_core_that_is_dropped_within_a_batch_ends():
    """Nobody says done() any more where the thread that computes ended on a fault of its own."""
    b = Bench()
    b.add_layer()
    caller = Caller(b)  # so that somebody looks after the rings while a batch is computed
    _, reason, _ = b.forward(*inputs(2))
    assert not reason
    assert b.core.run(Run()) == module.RUN
    ends = threading.Thread(target=b.core.free, daemon=True)
    ends.start()
    ends.join(20)
    assert not ends.is_alive()
    caller.bell.close()
    caller.region.close()
