"""Requests that a device starts by a word: prepared once, called again and again.  The device is a thread here, its
memory the host's, the core one of a CPU."""

import ctypes as C
import threading
import time

import pytest
import torch
from core_kit import E4M3, NUMBER, bench, expected, inputs
from core_library import needs_core
from waiting import until

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, DeviceCalls, Submission
from expertd.shm.region import Region

pytestmark = [needs_core, pytest.mark.timeout(60)]

POOL = 1 << 16


class Device:
    """A session with a pool, and a stream's side of it."""

    def __init__(self, b, handle=2000, pool=POOL):
        self.b, self.handle = b, handle
        self.region = Region.create(4096, 16)
        self.bell = self.region.ring_here()
        self.pool = torch.zeros(POOL, dtype=torch.uint8)
        b.core.add_session(
            handle, self.region.address, self.region.bytes, 16, self.bell.fileno(), 9,
            (self.pool.data_ptr(), pool),
        )  # fmt: skip
        self.client = Client(self.region)
        self.words = DeviceCalls.from_address(self.region.address + layout.CALLS_OFFSET)
        self.tensors = {}

    def prepare(self, which, x, ids, w, **more):
        """Reason of a refusal, or ""."""
        at, offsets, views = 0, [], []
        for t in (x, ids, w, x):
            offsets.append(at)
            n = t.numel() * t.element_size()
            views.append(self.pool[at : at + n].view(t.dtype).view(t.shape))
            at += -(-n // 256) * 256
        self.tensors[which] = views
        s = Submission(
            kind=layout.PREPARE, flags=layout.ON_DEVICE, number=which, layer=3, tokens=len(x), top_k=ids.shape[1],
            hidden=offsets[0], ids=offsets[1], weights=offsets[2], out=offsets[3], hidden_dtype=NUMBER[x.dtype],
            ids_dtype=NUMBER[ids.dtype], weights_dtype=NUMBER[w.dtype], out_dtype=NUMBER[x.dtype],
        )  # fmt: skip
        for name, value in more.items():
            setattr(s, name, value)
        ticket, answer = self.client.submit(s), Completion()
        assert self.client.wait(ticket, answer, 10**10)
        self.client.release(ticket)
        return answer.name.decode() if answer.refused else ""

    def start(self, number, x=None, ids=None, w=None):
        """What the stream does before the experts: copies, words."""
        if x is not None:
            for to, t in zip(self.tensors[number], (x, ids, w, torch.full_like(x, float("nan"))), strict=True):
                to.copy_(t)
        self.words.answered = 0
        self.words.called = number

    def end(self, within_s=20.0):
        """What the stream waits for."""
        until(lambda: self.words.answered, within_s)
        return self.words.answered

    def failure(self):
        return self.words.failure.name.decode()

    def close(self):
        self.b.core.remove_session(self.handle)
        assert self.b.outcome(self.handle)[3] == 1
        self.client.end()
        self.client.close()
        self.bell.close()


def test_a_prepared_request_is_computed_at_each_call_and_not_before():
    with bench() as b:
        d = Device(b)
        assert d.prepare(1, *inputs(3)) == ""
        assert d.prepare(2, *inputs(5)) == ""
        b.outcome(b.forward(*inputs(1))[0])  # the core has had turns since
        assert [rows for _, _, rows, *_ in b.batches] == [1]
        b.batches.clear()
        for n in range(100):
            number, t = 1 + n % 2, inputs((3, 5)[n % 2], seed=n)
            d.start(number, *t)
            assert d.end() == layout.GOOD
            assert d.words.called == 0
            assert torch.equal(d.tensors[number][3], expected(*t))
            assert d.words.last.batch_requests == 1
        assert (d.words.calls, d.words.refusals, len(b.batches)) == (100, 0, 100)
        d.close()


def test_a_later_request_takes_the_number():
    with bench() as b:
        d = Device(b)
        for tokens in (3, 6):
            t = inputs(tokens)
            assert d.prepare(layout.MOST_PREPARED, *t) == ""
            d.start(layout.MOST_PREPARED, *t)
            assert d.end() == layout.GOOD
            assert torch.equal(d.tensors[layout.MOST_PREPARED][3], expected(*t))
        d.close()


def test_callers_on_devices_and_on_the_host_share_a_batch():
    with bench() as b:
        devices = [Device(b, handle=2000 + n) for n in range(3)]
        tensors = [inputs(2 + n, seed=n) for n in range(3)]
        for d, t in zip(devices, tensors, strict=True):
            assert d.prepare(1, *t) == ""
        first = b.hold(*inputs(1))
        inline = b.forward(*(mine := inputs(2, seed=9)))
        for d, t in zip(devices, tensors, strict=True):
            d.start(1, *t)
        b.may_run.set()
        for d, t in zip(devices, tensors, strict=True):
            assert d.end() == layout.GOOD, (d.words.failure.name, d.words.failure.text)
            assert torch.equal(d.tensors[1][3], expected(*t))
            assert (d.words.last.batch_requests, d.words.last.batch_tokens) == (4, 11)
        b.outcome(first[0])
        b.outcome(inline[0])
        assert torch.equal(inline[2], expected(*mine))
        for d in devices:
            d.close()


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        ({"hidden": POOL}, "MALFORMED_MESSAGE"),
        ({"out": 2**64 - 16}, "MALFORMED_MESSAGE"),
        ({"weights": 8}, "MALFORMED_MESSAGE"),
        ({"number": 0}, "MALFORMED_MESSAGE"),
        ({"number": layout.MOST_PREPARED + 1}, "MALFORMED_MESSAGE"),
        ({"kind": layout.ECHO}, "MALFORMED_MESSAGE"),
        ({"layer": 9}, "LAYER_NOT_HELD"),
        ({"out_dtype": E4M3}, "OUTPUT_DTYPE_UNSUPPORTED"),
    ],
)
def test_what_cannot_be_prepared_is_refused_at_once_and_at_a_call(forged, reason):
    with bench() as b:
        d = Device(b)
        assert d.prepare(1, *inputs(3), **forged) == reason
        d.start(1)
        assert d.end() == layout.REFUSED
        assert d.failure() == "MALFORMED_MESSAGE"
        assert b"nothing was prepared" in d.words.failure.text
        t = inputs(3)
        assert d.prepare(1, *t) == ""
        d.start(1, *t)
        assert d.end() == layout.GOOD
        assert (d.words.calls, d.words.refusals) == (2, 1)
        d.close()


def test_a_session_without_a_pool_has_no_device():
    with bench() as b:
        d = Device(b, pool=0)
        assert d.prepare(1, *inputs(1)) == "MALFORMED_MESSAGE"
        assert d.prepare(1, *inputs(1), flags=0) == ""  # and nobody looks at its word
        d.start(1)
        for _ in range(2):
            b.outcome(b.forward(*inputs(1))[0])  # the core has had turns since
        assert d.words.answered == 0
        d.close()


def test_a_bad_id_a_passed_deadline_and_a_layer_that_went_are_refused_at_the_call():
    with bench() as b:
        d = Device(b)
        x, ids, w = inputs(3)
        assert d.prepare(1, x, ids, w) == ""
        assert d.prepare(2, x, ids, w, deadline_ns=10**10) == ""
        bad = ids.clone()
        bad[1, 1] = 77
        d.start(1, x, bad, w)
        assert (d.end(), d.failure()) == (layout.REFUSED, "EXPERT_ID_OUT_OF_RANGE")
        d.start(2, x, ids, w)
        assert d.end() == layout.GOOD, "its time counts from the call"
        assert d.prepare(3, x, ids, w, deadline_ns=1) == ""
        d.start(3, x, ids, w)
        assert (d.end(), d.failure()) == (layout.REFUSED, "DEADLINE_EXCEEDED")
        b.core.remove_layer(3)
        b.turn()
        d.start(1, x, ids, w)
        assert (d.end(), d.failure()) == (layout.REFUSED, "LAYER_NOT_HELD")
        b.add_layer(generation=2)
        b.turn()
        d.start(1, x, ids, w)
        assert d.end() == layout.GOOD
        assert torch.equal(d.tensors[1][3], expected(x, ids, w))
        assert b.core.load().queued_requests == 0
        d.close()


def test_a_call_while_the_core_sleeps_is_seen_and_the_sleep_costs_little():
    with bench() as b:
        d = Device(b)
        t = inputs(2)
        assert d.prepare(1, *t) == ""
        d.start(1, *t)
        assert d.end() == layout.GOOD
        time.sleep(0.05)  # it goes to sleep
        clock = time.pthread_getcpuclockid(b._thread.ident)
        own_s, core_s = time.thread_time(), time.clock_gettime(clock)
        while time.thread_time() - own_s < 0.3:
            pass  # one thread that spins beside it is the control
        assert time.clock_gettime(clock) - core_s < 0.15, "it watches all the time"
        d.start(1, *t)
        assert d.end() == layout.GOOD
        assert torch.equal(d.tensors[1][3], expected(*t))
        time.sleep(0.05)  # it goes to sleep again
        d.client.wake()  # the core watches without sleep again
        d.start(1, *t)
        assert d.end() == layout.GOOD
        d.close()


def test_draining_and_failing_answer_calls():
    with bench() as b:
        d = Device(b)
        t = inputs(2)
        assert d.prepare(1, *t) == ""
        b.fails = "the device burns"
        d.start(1, *t)
        assert (d.end(), d.failure()) == (layout.REFUSED, "BACKEND_FAILED")
        b.fails = ""
        b.core.drain()
        b.turn()
        d.start(1, *t)
        assert (d.end(), d.failure()) == (layout.REFUSED, "DRAINING")
        d.close()


def test_a_session_that_goes_under_a_call():
    with bench() as b:
        d, other = Device(b), Device(b, handle=2001)
        t = inputs(2)
        for each in (d, other):
            assert each.prepare(1, *t) == ""
        b.may_run.clear()
        d.start(1, *t)
        until(lambda: b.begun == 1)
        other.start(1, *t)
        until(lambda: other.words.called == 0)  # it is taken, and waits
        b.core.remove_session(2000)
        b.core.remove_session(2001)
        b.may_run.set()
        assert b.outcome(2000)[3] == b.outcome(2001)[3] == 1
        assert d.end() == layout.GOOD
        assert other.words.answered == 0
        assert len(b.batches) == 1
        assert b.core.load().queued_requests == 0
        for each in (d, other):
            each.client.end()
            each.client.close()
            each.bell.close()


def test_noise_in_the_words_hurts_nobody_else():
    with bench() as b:
        bad, good = Device(b), Device(b, handle=2001)
        t = inputs(2)
        for d in (bad, good):
            assert d.prepare(1, *t) == ""
        stop = threading.Event()

        def noise():
            n = 0
            while not stop.is_set():
                n += 1
                bad.words.called, bad.words.answered = n * 2654435761 & 0xFFFFFFFF, n & 3
                C.memset(C.addressof(bad.words.last), n & 255, C.sizeof(Completion) * 2)
                time.sleep(1e-6)

        thread = threading.Thread(target=noise)
        thread.start()
        try:
            for n in range(300):
                t = inputs(2, seed=n)
                good.start(1, *t)
                assert good.end() == layout.GOOD
                assert torch.equal(good.tensors[1][3], expected(*t))
        finally:
            stop.set()
            thread.join()
        assert good.words.calls == 300
        for d in (bad, good):
            d.close()
        assert b.core.load().queued_requests == 0
