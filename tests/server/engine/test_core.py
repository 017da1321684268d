"""The engine's core on a CPU, with experts of one line: y = x * sum(weight * (slot + 1)), exact for small numbers."""

import ctypes as C
import random
import threading
import time

import numpy as np
import pytest
import torch
from core_kit import (
    BF16,
    BUILT,
    E4M3,
    F32,
    HELD,
    I32,
    MOST,
    NUMBER,
    TORCH,
    Bench,
    E,
    H,
    bench,
    expected,
    inputs,
    slot_table,
    until,
)  # fmt: skip

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region
from expertd.shm.tickets import SessionEndedError
from expertd_server.engine import core as module
from expertd_server.engine.core import Config, Forward, LaneMemory, LayerFacts, Run, library
from expertd_server.engine.report import WAIT_BOUNDS_NS

pytestmark = [pytest.mark.skipif(bool(BUILT), reason=BUILT or "built"), pytest.mark.timeout(60)]


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


def test_what_is_not_held_is_refused():
    with bench() as b:
        handle, _, _ = b.forward(*inputs(1), layer=4)
        assert b.outcome(handle)[0] == "LAYER_NOT_HELD"


def test_deadlines_are_looked_at_when_it_comes_and_when_its_turn_comes():
    with bench() as b:
        assert b.forward(*inputs(1), deadline_ns=time.monotonic_ns() - 1)[1] == "DEADLINE_EXCEEDED"
        first = b.hold(*inputs(1))
        late = b.forward(*inputs(1), deadline_ns=(deadline_ns := time.monotonic_ns() + 500_000_000))
        until(lambda: time.monotonic_ns() > deadline_ns)
        b.may_run.set()
        assert b.outcome(first[0])[0] == ""
        assert b.outcome(late[0])[0] == "DEADLINE_EXCEEDED"
        assert len(b.batches) == 1


def test_a_cancelled_request_is_not_computed():
    with bench() as b:
        first = b.hold(*inputs(1))
        gone, stays = b.forward(*inputs(2)), b.forward(*inputs(3))
        b.core.cancel(gone[0])
        b.may_run.set()
        assert b.outcome(gone[0])[0] == "CANCELLED"
        assert b.outcome(stays[0])[0] == ""
        assert b.outcome(first[0])[0] == ""
        assert [rows for _, _, rows, *_ in b.batches] == [1, 3]
        assert b.core.load().queued_tokens == 0


def test_a_full_queue_refuses_with_advice_and_takes_again():
    with bench(max_queue_requests=3, max_queue_tokens=10) as b:
        first = b.hold(*inputs(9))
        several = [b.forward(*inputs(4)), b.forward(*inputs(4))]
        assert b.forward(*inputs(4))[1] == "QUEUE_FULL"  # 12 tokens
        several.append(b.forward(*inputs(1)))
        assert b.forward(*inputs(1))[1] == "QUEUE_FULL"  # 4 requests
        b.may_run.set()
        for handle, *_ in (first, *several):
            assert b.outcome(handle)[0] == ""
        assert b.forward(*inputs(MOST))[1] == "", "an empty queue takes any request"


@pytest.mark.parametrize(
    ("limits", "most", "more"),
    [({"max_queue_routes": 20}, 3, {}), ({"max_queue_bytes": 1000}, 2, {"bytes": 400})],
    ids=["routes", "bytes"],
)
def test_a_queue_is_full_of_routes_or_bytes_too(limits, most, more):
    with bench(**limits) as b:
        first = b.hold(*inputs(1))
        taken = [b.forward(*inputs(2, k=3), **more) for _ in range(most)]
        assert [reason for _, reason, _ in taken] == [""] * most
        assert b.forward(*inputs(2, k=3), **more)[1] == "QUEUE_FULL"
        assert b.forward(*inputs(1, k=1), caller=2)[1] == "", "room is left for others"
        b.may_run.set()
        for handle, *_ in (first, *taken):
            assert b.outcome(handle)[0] == ""
        assert b.forward(*inputs(2, k=3), **more)[1] == ""


def test_wide_requests_are_not_one_batch_with_all_the_others():
    """Every row of a batch is as wide as its widest: more routes than so many of the model's tokens have is two
    batches, and one request that has more is refused in shared memory, as it is inline (service/intake.py)."""
    with bench() as b:
        b.add_layer(layer=5, generation=9, top_k=2)
        b.hold(*inputs(1), layer=5)
        several = [b.forward(*inputs(8, k=8), layer=5), b.forward(*inputs(40, k=2), layer=5)]  # 48 x 8 > 64 x 2
        b.may_run.set()
        for handle, *_ in several:
            assert b.outcome(handle)[0] == ""
        assert [rows for layer, _, rows, *_ in b.batches if layer == 5] == [1, 8, 40]
        c = Caller(b)
        t = inputs(40, k=4)
        assert c.call(c.request(*t, layer=5)) == "TOO_MANY_TOKENS"
        assert b"got 40 tokens x 4 routes" in c.answer.text
        t = inputs(32, k=4)
        assert c.call(c.request(*t, layer=5)) == ""
        c.close()


def test_a_failed_batch_answers_all_and_the_next_one_runs():
    with bench() as b:
        b.fails = "backend x: it broke"
        handle, _, _ = b.forward(*inputs(2))
        assert b.outcome(handle)[:3] == ("BACKEND_FAILED", 0, "backend x: it broke")
        b.fails = ""
        handle, _, _ = b.forward(*inputs(2))
        assert b.outcome(handle)[0] == ""
        assert [r.failed for r in b.core.records()] == [1, 0]


def test_draining_refuses_what_is_new_and_answers_what_was_taken():
    with bench() as b:
        b.may_run.clear()
        taken = [b.forward(*inputs(1))[0] for _ in range(3)]
        b.core.drain()
        assert b.forward(*inputs(1))[1] == "DRAINING"
        b.may_run.set()
        assert [b.outcome(h)[0] for h in taken] == [""] * 3
        assert b.core.load().admitted == 3


def test_layers_come_and_go_while_requests_wait():
    with bench() as b:
        b.add_layer(layer=5, generation=11)
        first = b.hold(*inputs(1))
        stays, given = b.forward(*inputs(2)), b.forward(*inputs(3), layer=5)
        b.until_taken(3)
        b.add_layer(layer=3, generation=2)
        b.core.remove_layer(5)
        later = b.forward(*inputs(2)), b.forward(*inputs(1), layer=5)
        b.may_run.set()
        for handle, *_ in (first, stays, given, later[0]):
            assert b.outcome(handle)[0] == "", "a request is computed by what was held when it came"
        assert b.outcome(later[1][0])[0] == "LAYER_NOT_HELD"
        assert sorted((layer, generation) for layer, generation, *_ in b.batches) == [(3, 1), (3, 1), (3, 2), (5, 11)]
        b.turn()
        assert b.waited == [False, False, False]


def test_records_say_which_backend_ran():
    with bench() as b:
        for M in (4, 5):
            b.outcome(b.forward(*inputs(M))[0])
        assert [(r.tokens, r.backend, r.requests) for r in b.core.records()] == [(4, 7, 1), (5, 8, 1)]


def test_the_least_served_caller_goes_first_when_not_all_fit():
    with bench() as b:
        b.hold(*inputs(1))
        greedy = [b.forward(*inputs(16), caller=1) for _ in range(8)]
        modest = b.forward(*inputs(16), caller=2)
        b.may_run.set()
        for handle, *_ in (*greedy, modest):
            b.outcome(handle)
        order = list(b.answered)
        assert order.index(modest[0]) < order.index(greedy[3][0]), "it does not wait for all that was there before it"


def test_fail_all_answers_what_waits():
    b = Bench()
    b.add_layer()
    taken = [b.forward(*inputs(1))[0] for _ in range(3)]
    b.core.fail_all("DRAINING", "server: the device is lost")
    assert {b.outcome(h)[:3] for h in taken} == {("DRAINING", 0, "server: the device is lost")}
    assert b.core.load().queued_requests == 0
    b.start()
    b.close()


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
        LaneMemory,
        Run,
        module.BatchRecord,
        module.Load,
        module.Waiting,
        module.Measured,
        module.PeerBoundsStruct,
        module.TraceRecord,
    )
    assert [size for size in sizes if size] == [C.sizeof(k) for k in kinds]
    bounds = (C.c_uint64 * len(WAIT_BOUNDS_NS))()
    library().expertd_core_wait_bounds(bounds)
    assert tuple(bounds) == WAIT_BOUNDS_NS


# ---- sessions in shared memory ---------------------------------------------------------------------------------------


class Caller:
    """A client's session and the tensors of one request in it."""

    def __init__(self, b, handle=1000, entries=16, caller=9):
        self.region = Region.create(1 << 20, entries)
        b.core.add_session(
            handle, self.region.address, self.region.bytes, entries, self.region.server_bell, self.region.client_bell,
            caller,
        )  # fmt: skip
        self.client = Client(self.region)
        self.b, self.handle = b, handle
        self.answer = Completion()

    def would_ring(self):
        """Whether the server's side says that it sleeps: who submits then rings, and takes that back."""
        return C.c_uint32.from_address(self.region.address + 128).value == 1

    def put(self, t):
        block = self.client.take(t.numel() * t.element_size())
        raw = t.contiguous().view(torch.uint8).reshape(-1).numpy()
        np.frombuffer(self.region.view(block, raw.nbytes), np.uint8)[:] = raw
        return block

    def request(self, x, ids, w, layer=3, kind=layout.FORWARD, **more):
        self.out = self.client.take(x.numel() * 4)
        s = Submission(
            kind=kind, layer=layer, tokens=len(x), top_k=ids.shape[1], hidden=self.put(x), ids=self.put(ids),
            weights=self.put(w), out=self.out, hidden_dtype=NUMBER[x.dtype], ids_dtype=NUMBER[ids.dtype],
            weights_dtype=NUMBER[w.dtype], out_dtype=NUMBER[x.dtype],
        )  # fmt: skip
        for name, value in more.items():
            setattr(s, name, value)
        return s

    def output(self, like):
        raw = bytes(self.region.view(self.out, like.numel() * like.element_size()))
        return torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape)

    def call(self, s, within_s=10):
        ticket = self.client.submit(s)
        assert ticket
        assert self.client.wait(ticket, self.answer, int(within_s * 1e9)), "no answer"
        self.client.release(ticket)
        return self.answer.name.decode() if self.answer.refused else ""

    def close(self):
        self.b.core.remove_session(self.handle)
        assert self.b.outcome(self.handle)[3] == 1
        self.client.end()
        self.client.close()


def test_a_session_in_shared_memory_gives_the_same_answers():
    with bench() as b:
        c = Caller(b)
        for seed in range(30):
            t = inputs(1 + seed % 7, seed=seed)
            assert c.call(c.request(*t)) == ""
            assert torch.equal(c.output(t[0]), expected(*t))
            assert c.answer.batch_requests == 1
            for block in (0,):
                c.client.give(block)
        c.close()


FORGED = {
    "no such layer": ({"layer": 9}, "LAYER_NOT_HELD"),
    "more tokens than a batch": ({"tokens": MOST + 1}, "TOO_MANY_TOKENS"),
    "tokens that overflow": ({"tokens": 2**32 - 1}, "TOO_MANY_TOKENS"),
    "no routes": ({"top_k": 0}, "BAD_SHAPE"),
    "too many routes": ({"top_k": E + 1}, "BAD_SHAPE"),
    "hidden states of integers": ({"hidden_dtype": I32}, "BAD_DTYPE"),
    "ids of floats": ({"ids_dtype": F32}, "BAD_DTYPE"),
    "a type that is none": ({"out_dtype": 200}, "BAD_DTYPE"),
    "an output of ids": ({"out_dtype": I32}, "BAD_DTYPE"),
    "scales of the output beyond the arena": ({"out_dtype": E4M3, "out": (1 << 20) - 3 * H}, "MALFORMED_MESSAGE"),
    "beyond the arena": ({"hidden": 1 << 20}, "MALFORMED_MESSAGE"),
    "far beyond the arena": ({"out": 2**64 - 16}, "MALFORMED_MESSAGE"),
    "between two elements": ({"out": 8}, "MALFORMED_MESSAGE"),
    "an end beyond the arena": ({"weights": (1 << 20) - 16}, "MALFORMED_MESSAGE"),
    "weights on the inputs of several": ({"flags": 1}, "UNSUPPORTED_COMBINATION"),
    "a deadline that has passed": ({"deadline_ns": 1}, "DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_submission_is_refused_and_the_next_one_served(name):
    forged, reason = FORGED[name]
    with bench() as b:
        c = Caller(b)
        t = inputs(3)
        assert c.call(c.request(*t, **forged)) == reason
        assert c.answer.text
        assert c.call(c.request(*t)) == ""
        assert torch.equal(c.output(t[0]), expected(*t))
        c.close()


def test_what_cannot_be_in_time_is_refused_at_once_in_shared_memory():
    with bench(refuse_late=1) as b:
        b.add_layer(layer=5, generation=9, measured=[(1, 3, 5_000_000_000)])
        c = Caller(b)
        first = b.hold(*inputs(4), layer=5)  # as if it took 20 s
        s = c.request(*inputs(2), layer=5, deadline_ns=time.monotonic_ns() + 15_000_000_000)
        assert c.call(s) == "OVERLOADED", "while the batch before it is held"
        assert b"left of its time, want" in c.answer.text
        assert 5_000_000 < c.answer.retry_after_us < 50_000_000
        later = c.client.submit(c.request(*inputs(2), layer=5, deadline_ns=time.monotonic_ns() + 900_000_000_000))
        b.until_taken(2)
        b.may_run.set()
        assert c.client.wait(later, c.answer, 10**10)
        assert not c.answer.refused
        b.outcome(first[0])
        c.client.release(later)
        c.close()
        counts = dict(zip(module.REASONS, b.core.answered(), strict=True))
        assert (counts["OVERLOADED"], counts[""]) == (1, 1), "they are counted by reason"


def test_every_call_during_a_long_batch_is_heard_not_the_first_alone():
    """A sleep is rung for once: whoever keeps the door says again that he sleeps, else the next caller waits for his
    next look, 5 ms."""
    with bench(refuse_late=1) as b:
        b.add_layer(layer=5, generation=9, measured=[(1, 3, 50_000_000)])
        c = Caller(b)
        first = b.hold(*inputs(4), layer=5)
        for _ in range(40):
            until(c.would_ring)
            assert c.call(c.request(*inputs(2), layer=5, deadline_ns=1)) == "DEADLINE_EXCEEDED"
        b.may_run.set()
        b.outcome(first[0])
        c.close()


def test_rings_are_looked_at_while_it_computes_and_everybody_gets_his_own():
    """Batches long enough that another thread keeps the door, short enough that it comes and goes."""
    with bench(refuse_late=1) as b:
        b.add_layer(layer=5, generation=9, measured=[(1, 3, 2_000_000)])
        b.takes_s = 0.002
        callers = [Caller(b, handle=1000 + n, caller=n) for n in range(3)]
        wrong, seen = [], []

        def call(n):
            for i in range(60):
                t = inputs(1 + (n + i) % 4, seed=100 * n + i)
                s = callers[n].request(*t, layer=5, deadline_ns=time.monotonic_ns() + (10_000_000_000 if i % 3 else 1))
                reason = callers[n].call(s)
                seen.append(reason)
                if not reason and not torch.equal(callers[n].output(t[0]), expected(*t)):
                    wrong.append((n, i))
                for block in (s.hidden, s.ids, s.weights, s.out):
                    callers[n].client.give(block)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):  # inline, meanwhile
            b.outcome(b.forward(*inputs(2), layer=5)[0])
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert seen.count("") == 120
        assert seen.count("DEADLINE_EXCEEDED") == 60
        for c in callers:
            c.close()
        assert b.core.load().queued_requests == 0


@pytest.mark.parametrize("policy", [0, 1, 2])
def test_numbers_that_are_none_in_shared_memory(policy):
    """A request alone, of the compute dtype: where nothing is looked at it is read in place."""
    with bench(nonfinite=policy) as b:
        c = Caller(b)
        x, ids, w = inputs(3)
        x[2, 7] = float("nan")
        reason = c.call(c.request(x, ids, w))
        assert reason == ("NON_FINITE_HIDDEN_STATES" if policy == 1 else "")
        if policy == 1:
            assert b"hidden_states[2, 7]: got nan" in c.answer.text
        else:
            want = expected(x if policy == 0 else x.nan_to_num(0), ids, w)
            assert torch.equal(c.output(x).nan_to_num(1e9), want.nan_to_num(1e9))
        assert c.call(c.request(*inputs(2))) == ""
        c.close()


def test_a_bad_id_in_shared_memory_fails_alone():
    with bench() as b:
        c = Caller(b)
        x, ids, w = inputs(3)
        ids[1, 1] = 77
        assert c.call(c.request(x, ids, w)) == "EXPERT_ID_OUT_OF_RANGE"
        assert b"[1, 1]" in c.answer.text
        c.close()


def test_echo_and_no_tokens():
    with bench() as b:
        c = Caller(b)
        t = inputs(4)
        assert c.call(c.request(*t, kind=layout.ECHO)) == ""
        assert torch.equal(c.output(t[0]), t[0])
        assert c.call(c.request(*inputs(0))) == ""
        assert not b.batches
        c.close()


def test_inline_and_shared_requests_share_a_batch():
    with bench() as b:
        c = Caller(b)
        first = b.hold(*inputs(1))
        mine, theirs = inputs(2, seed=1), inputs(3, seed=2)
        inline = b.forward(*mine)
        ticket = c.client.submit(c.request(*theirs))
        b.may_run.set()
        assert c.client.wait(ticket, c.answer, 10**10)
        b.outcome(first[0])
        b.outcome(inline[0])
        assert (c.answer.batch_requests, c.answer.batch_tokens) == (2, 5)
        assert torch.equal(inline[2], expected(*mine))
        assert torch.equal(c.output(theirs[0]), expected(*theirs))
        c.client.release(ticket)
        c.close()


def test_a_cancel_takes_back_what_waits():
    with bench() as b:
        c = Caller(b)
        first = b.hold(*inputs(1))
        ticket = c.client.submit(c.request(*inputs(2)))
        b.until_taken(2)
        c.client.abandon(ticket)
        b.may_run.set()
        b.outcome(first[0])
        assert c.call(c.request(*inputs(3))) == ""
        assert [rows for _, _, rows, *_ in b.batches] == [1, 3]
        c.close()


def test_a_session_that_goes_while_its_requests_wait_and_run():
    """Its memory is used until the batch under way is over, and not a moment longer."""
    with bench() as b:
        c, other = Caller(b), Caller(b, handle=1001)
        b.may_run.clear()
        running = c.client.submit(c.request(*inputs(2)))
        until(lambda: b.begun == 1)
        waits = c.client.submit(c.request(*inputs(3)))
        ticket = other.client.submit(other.request(*(t := inputs(4))))
        b.until_taken(3)
        b.core.remove_session(1000)
        time.sleep(0.05)
        assert 1000 not in {o.handle for o in b.core.outcomes()}
        b.may_run.set()
        assert b.outcome(1000)[3] == 1
        assert other.client.wait(ticket, other.answer, 10**10)
        assert torch.equal(other.output(t[0]), expected(*t))
        other.client.release(ticket)
        assert [rows for _, _, rows, *_ in b.batches] == [2, 4]
        assert b.core.load().queued_requests == 0
        assert c.client.wait(running, c.answer, 10**9), "what was under way is answered"
        with pytest.raises(SessionEndedError):
            c.client.wait(waits, c.answer, 10**9)
        other.close()
        c.client.end()
        c.client.close()


def test_random_bytes_in_the_rings_hurt_nobody_else():
    """10,000 submissions of noise, some with a right seq: every one answered or passed over, the neighbour served."""
    rng = random.Random(4)
    with bench() as b:
        bad, good = Caller(b), Caller(b, handle=1001)
        ring = (Submission * 16).from_address(bad.region.address + layout.PAGE)
        size = C.sizeof(Submission)
        for n in range(10_000):
            noise = bytearray(rng.randbytes(size))
            if rng.random() < 0.9:  # fields near what is right
                s = Submission.from_buffer(noise)
                s.kind, s.layer, s.tokens, s.top_k = (
                    rng.choice([0, 1, 1, 1, 2, 3, 9]),
                    3,
                    rng.choice([0, 1, 5]),
                    rng.choice([1, 3]),
                )
                s.hidden_dtype, s.ids_dtype, s.weights_dtype, s.out_dtype = 1, 5, 1, 1
                s.flags = s.deadline_ns = 0
                for field in ("hidden", "ids", "weights", "out"):
                    setattr(s, field, rng.choice([0, 16, 4096, 1 << 19, rng.getrandbits(64)]))
                del s
            slot = n % 16
            C.memmove(C.addressof(ring[slot]) + 8, bytes(noise[8:]), size - 8)
            ring[slot].seq = n + 1
            if n % 2500 == 0:
                t = inputs(2, seed=n)
                assert good.call(good.request(*t)) == ""
                assert torch.equal(good.output(t[0]), expected(*t))
        ring[0].seq = 2**64 - 1
        t = inputs(2)
        assert good.call(good.request(*t)) == ""
        good.close()
        b.core.remove_session(1000)
        assert b.outcome(1000)[3] == 1
        assert b.core.load().queued_requests == 0
