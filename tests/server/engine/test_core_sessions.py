"""The core's sessions in shared memory."""

import ctypes as C
import random
import threading
import time

import pytest
import torch
from core_kit import E4M3, F32, I32, MOST, Caller, E, H, bench, expected, inputs
from core_library import needs_core
from waiting import until

from expertd.shm import layout
from expertd.shm.in_flight import SessionEndedError
from expertd.shm.layout import Submission
from expertd_server.engine import core as module

pytestmark = [needs_core, pytest.mark.timeout(60)]


def test_a_session_in_shared_memory_gives_the_same_answers():
    with bench() as b:
        c = Caller(b)
        for seed in range(30):
            t = inputs(1 + seed % 7, seed=seed)
            assert c.call(c.request(*t)) == ""
            assert torch.equal(c.output(t[0]), expected(*t))
            assert c.answer.batch_requests == 1
            c.client.give(c.out)
        c.close()


FORGED = {
    "no such layer": ({"layer": 9}, "LAYER_NOT_HELD"),
    "more tokens than a batch": ({"tokens": MOST + 1}, "TOO_MANY_TOKENS"),
    "tokens that overflow": ({"tokens": 2**32 - 1}, "TOO_MANY_TOKENS"),
    "no routes": ({"top_k": 0}, "BAD_SHAPE"),
    "too many routes": ({"top_k": E + 1}, "BAD_SHAPE"),
    "hidden states of integers": ({"hidden_dtype": I32}, "BAD_DTYPE"),
    "ids of floats": ({"ids_dtype": F32}, "BAD_DTYPE"),
    "a type that is none": ({"out_dtype": 200}, "OUTPUT_DTYPE_UNSUPPORTED"),
    "an output of ids": ({"out_dtype": I32}, "OUTPUT_DTYPE_UNSUPPORTED"),
    "scales of the output beyond the arena": ({"out_dtype": E4M3, "out": (1 << 20) - 3 * H}, "MALFORMED_MESSAGE"),
    "beyond the arena": ({"hidden": 1 << 20}, "MALFORMED_MESSAGE"),
    "far beyond the arena": ({"out": 2**64 - 16}, "MALFORMED_MESSAGE"),
    "between two elements": ({"out": 8}, "MALFORMED_MESSAGE"),
    "scales beyond the arena": ({"hidden_dtype": E4M3, "scales": 1 << 20}, "MALFORMED_MESSAGE"),
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
    """A sleep is rung for once: whoever keeps the listener says again that he sleeps, else the next caller waits for
    his next look, 5 ms."""
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
    """Batches long enough that another thread keeps the listener, short enough that it comes and goes."""
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


def test_who_interrupts_sees_what_came_before():
    """He drops a layer for which nothing waits: a request that came before its successor stands in its queue by
    then."""
    with bench() as b:
        b.add_layer(layer=5, generation=9, measured=[(1, 3, 1000)])  # so brief that nobody looks at the rings meanwhile
        b.add_layer(layer=7, generation=3, hidden_size=2048)
        c = Caller(b, entries=256)
        s = Submission(
            kind=layout.ECHO, layer=7, tokens=MOST, top_k=1, hidden_dtype=F32, ids_dtype=I32, weights_dtype=F32,
            out_dtype=F32, out=1 << 19,
        )  # fmt: skip
        for n in range(10):
            before = b.hold(*inputs(1), layer=5)
            tickets = [c.client.submit(s) for _ in range(256)]
            b.may_run.set()
            assert c.client.wait(tickets[0], c.answer, 10**10)  # for milliseconds it looks at nothing but the others
            b.batches.clear()
            request = b.forward(*inputs(2))
            b.add_layer(generation=2 - n % 2)
            b.turn()
            assert b.waited[n % 2] or b.batches
            for handle, reason, _ in (before, request):
                assert not reason
                assert b.outcome(handle)[0] == ""
            for ticket in tickets:
                assert c.client.wait(ticket, c.answer, 10**10)
                assert not c.answer.refused, c.answer.text
                c.client.release(ticket)
        c.close()


def test_what_waits_of_a_session_that_leaves_counts_no_more():
    """Neither for its caller nor for all: the queue would be full of what nobody will compute."""
    with bench() as b:
        c = Caller(b, caller=9)
        first = b.hold(*inputs(4), caller=1)
        for _ in range(3):
            assert c.client.submit(c.request(*inputs(2)))
        b.until_taken(4)
        assert [w.requests for w in b.core.waiting(9)] == [3, 3]
        b.core.remove_session(c.handle)
        until(lambda: b.core.load().queued_requests == 1)
        assert [(w.requests, w.tokens, w.routes) for w in b.core.waiting(9)] == [(0, 0, 0)] * 2
        b.may_run.set()
        assert b.outcome(first[0])[0] == ""
        assert b.outcome(c.handle)[3] == 1
        c.client.end()
        c.client.close()
        c.bell.close()


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


def test_a_cancel_takes_back_no_other_request_of_its_session():
    with bench() as b:
        c = Caller(b)
        first = b.hold(*inputs(1))
        t = inputs(2)
        stays, out = c.client.submit(c.request(*t)), c.out
        goes = c.client.submit(c.request(*inputs(3)))
        b.until_taken(3)
        c.client.abandon(goes)
        b.may_run.set()
        b.outcome(first[0])
        assert c.client.wait(stays, c.answer, 10**10)
        assert not c.answer.refused, c.answer.text
        c.out = out
        assert torch.equal(c.output(t[0]), expected(*t))
        assert [rows for _, _, rows, *_ in b.batches] == [1, 2]
        c.client.release(stays)
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
        b.core.remove_session(1000)  # its thread is in the batch: who is told now is told by this call
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
        c.bell.close()


def test_a_submission_that_is_rewritten_once_it_is_taken_is_computed_as_it_was():
    with bench() as b:
        c = Caller(b)
        first = b.hold(*inputs(1))
        t = inputs(2)
        ticket = c.client.submit(c.request(*t))
        b.until_taken(2)
        entry = Submission.from_address(c.region.address + layout.PAGE)
        assert entry.tokens == 2
        entry.tokens, entry.hidden, entry.ids, entry.out = 1 << 20, 1 << 40, 1 << 41, 0
        entry.layer = entry.kind = entry.hidden_dtype = 99
        b.may_run.set()
        b.outcome(first[0])
        assert c.client.wait(ticket, c.answer, 10**10)
        assert not c.answer.refused, c.answer.text
        assert torch.equal(c.output(t[0]), expected(*t))
        c.client.release(ticket)
        c.close()


def test_a_server_that_drains_refuses_what_comes_and_answers_what_came():
    with bench() as b:
        c = Caller(b)
        b.may_run.clear()
        t = inputs(2)
        came, out = c.client.submit(c.request(*t)), c.out
        until(lambda: b.begun == 1)
        b.core.drain()
        assert c.call(c.request(*inputs(3))) == "DRAINING"
        b.may_run.set()
        assert c.client.wait(came, c.answer, 10**10)
        c.out = out
        assert torch.equal(c.output(t[0]), expected(*t))
        c.client.release(came)
        c.close()


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
        bad.close()
        b.core.remove_session(1000)
        assert b.outcome(1000)[3] == 1
        assert b.core.load().queued_requests == 0


def test_a_core_whose_requests_come_soon_spins_for_the_next_and_else_sleeps_at_once():
    """Of those looks that came in time: this thread may be kept from running, too."""
    spin_s = 0.04
    with bench(spin_ns=int(spin_s * 1e9)) as b:
        c, t = Caller(b), inputs(2)

        def sleeps_at_once(rest_s, rounds):
            """After each of the last answers; the first ones are to learn from."""
            found = []
            for n in range(rounds):
                time.sleep(rest_s)
                assert c.call(c.request(*t)) == ""
                end_s = time.monotonic() + spin_s / 2
                while n >= rounds - 5 and time.monotonic() < end_s and not c.would_ring():
                    time.sleep(0.001)
                if n >= rounds - 5 and time.monotonic() < end_s + spin_s / 4:
                    found.append(c.would_ring())
                c.client.give(c.out)
            return found

        assert not any(sleeps_at_once(0, 20)), "they come sooner than it would be awake"
        assert any(sleeps_at_once(3.2 * spin_s, 16)), "it spins, though nothing will come"
        assert not all(sleeps_at_once(0, 30)), "it never spins again"
        c.close()


def test_a_core_that_is_rung_for_spins_for_the_request_unless_the_last_ring_was_in_vain():
    """What it does awake cannot be seen but by its time: each look is judged where it came early enough."""
    spin_s = 0.05
    with bench(spin_ns=int(spin_s * 1e9)) as b:
        c, t = Caller(b), inputs(2)

        def seen(after_s):
            """Whether it sleeps that long after a ring; None: the look came late."""
            while not c.would_ring():
                time.sleep(0.001)
            begin_s = time.monotonic()
            c.client.expect()
            while time.monotonic() < begin_s + after_s:
                time.sleep(0.001)
            found, late_s = c.would_ring(), time.monotonic() - begin_s - after_s
            return found if late_s < spin_s / 2 else None

        def request():
            assert c.call(c.request(*t)) == ""
            c.client.give(c.out)

        for _ in range(20):  # they come seldom: else it spins in any case
            request()
            time.sleep(3.2 * spin_s)
        spins, again = [], []
        for _ in range(10):
            spins.append(seen(2.5 * spin_s))
            again.append(seen(2.5 * spin_s))
            request()
            time.sleep(3.2 * spin_s)
        assert False in spins, "it slept at once"
        assert True in again, "it spins for one who rings in vain"
        c.close()
