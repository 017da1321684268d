"""A core on a CPU with its thread, callers in shared memory, and experts of one line: y = x * sum(weight * (slot + 1)),
exact for small numbers."""

import contextlib
import ctypes as C
import threading
import time

import numpy as np
import torch
from waiting import until

from expertd.errors import ExpertdError
from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Completion, Submission
from expertd.shm.region import Region
from expertd_server.engine import core as module
from expertd_server.engine.core import BatchSlotMemory, Config, Core, Forward, LayerFacts, Run

E, HELD, H, MOST = 10, 6, 48, 64
F32, F16, BF16, E4M3, I32, I64 = 1, 2, 3, 4, 5, 6
TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, I32: torch.int32, I64: torch.int64}
NUMBER = {dtype: number for number, dtype in TORCH.items()}


def slot_table():
    """Experts 2..7 are here."""
    table = np.full(E + 1, -1, np.int32)
    table[2 : 2 + HELD] = np.arange(HELD)
    return table


def expected(x, ids, w):
    """[M, H] f32"""
    slots = torch.from_numpy(slot_table())[ids.long()]
    factor = torch.where(slots >= 0, w.float() * (slots + 1), 0.0).sum(1, keepdim=True)
    return x.float() * factor


def tensor(address, shape, dtype):
    n = int(np.prod(shape))
    kind = {torch.float32: C.c_float, torch.bfloat16: C.c_int16, torch.int32: C.c_int32}[dtype]
    return torch.from_numpy(np.ctypeslib.as_array((kind * n).from_address(address))).view(dtype).view(shape)


class Bench:
    """A core with its thread."""

    def __init__(self, compute=F32, **config):
        config = {
            "batch_slots": 1, "max_tokens": MOST, "max_queue_requests": 100, "max_queue_tokens": 1000,
            "max_queue_routes": 10_000, "max_queue_bytes": 1 << 30, "spin_ns": 20_000,
        } | config  # fmt: skip
        self.core = Core(Config(compute_dtype=compute, device=0, **config))
        self.dtype = TORCH[compute]
        self.memory = [torch.empty(n, dtype=d) for n, d in ((MOST * H, self.dtype), (MOST * E, torch.int32),
                       (MOST * E, torch.float32), (MOST * H, self.dtype))]  # fmt: skip
        self.core.batch_slot(0, BatchSlotMemory(**dict(zip(("hidden", "slots", "weights", "out"),
                       (t.data_ptr() for t in self.memory), strict=True))))  # fmt: skip
        self.counts = np.zeros(HELD, np.uint64)
        self.batches = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.begun = 0  # batches that its thread has taken up
        self.interrupted = threading.Event()
        self.fails = ""
        self.takes_s = 0.0
        self.answered = {}
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._keep = []

    def add_layer(self, layer=3, generation=1, hidden_size=H, top_k=0, measured=()):
        table = slot_table()
        self.core.add_layer(
            LayerFacts(
                layer=layer, generation=generation, hidden_size=hidden_size, num_experts=E, held=HELD,
                slots=table.ctypes.data, expert_tokens=self.counts.ctypes.data, top_k=top_k,
            ),
            [(4, 7, "few"), (0, 8, "many")],
            measured,
        )  # fmt: skip

    def start(self):
        self._thread.start()
        return self

    def _run(self):
        run = Run()
        while (code := self.core.run(run)) != module.STOPPED:
            if code == module.INTERRUPTED:
                self.waited = [self.core.waited_for(n) for n in (1, 2, 11)]
                self.interrupted.set()
                continue
            assert code == module.RUN
            self.begun += 1
            assert self.may_run.wait(20)
            if self.takes_s:
                time.sleep(self.takes_s)
            x = tensor(run.hidden, (run.rows, H), self.dtype)
            slots = tensor(run.slots, (run.rows, run.top_k), torch.int32)
            w = tensor(run.weights, (run.rows, run.top_k), torch.float32)
            out = tensor(run.out, (run.rows, H), self.dtype)
            self.batches.append((run.layer, run.generation, run.rows, run.requests, run.hidden, run.out))
            out[:] = (x.float() * torch.where(slots >= 0, w * (slots + 1), 0.0).sum(1, keepdim=True)).to(self.dtype)
            self.core.done(run.batch_slot, 1000, self.fails or None)

    def forward(self, x, ids, w, out_dtype=None, layer=3, caller=1, scales=None, **more):
        """(handle, reason, output)"""
        out_dtype = x.dtype if out_dtype is None else out_dtype
        M = len(x)
        out = torch.full((M, H), float("nan")).to(out_dtype)
        f = Forward(
            hidden=x.data_ptr(), ids=ids.data_ptr(), weights=0 if w is None else w.data_ptr(), out=out.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(), arrival_ns=time.monotonic_ns(), layer=layer, tokens=M,
            top_k=ids.shape[1], caller=caller, hidden_dtype=E4M3 if scales is not None else NUMBER[x.dtype],
            ids_dtype=NUMBER[ids.dtype], weights_dtype=F32 if w is None else NUMBER[w.dtype],
            out_dtype=NUMBER[out_dtype], **more,
        )  # fmt: skip
        self._keep.append((x, ids, w, out, scales))
        try:
            return self.core.submit(f), "", out
        except ExpertdError as refused:
            return 0, refused.reason, out

    def hold(self, *request, **more):
        """forward(), whose batch has begun and ends when may_run is set: what comes after it waits."""
        self.may_run.clear()
        before = self.begun
        taken = self.forward(*request, **more)
        until(lambda: self.begun > before)
        return taken

    def turn(self):
        """Waits until the core has taken what was said to it before."""
        self.interrupted.clear()
        self.core.interrupt()
        assert self.interrupted.wait(20)

    def until_taken(self, requests):
        """So many wait or are under way."""
        until(lambda: self.core.load().queued_requests == requests)

    def outcome(self, handle):
        """(reason, routes, text) of a request; waits."""

        def came():
            for o in self.core.outcomes():
                self.answered[o.handle] = (module.REASONS[o.reason], o.routes_computed, o.text.decode(), o.session_gone)
            return handle in self.answered

        if handle not in self.answered:
            until(came)
        return self.answered[handle]

    def close(self):
        self.may_run.set()
        self.core.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.core.free()


@contextlib.contextmanager
def bench(**how):
    b = Bench(**how)
    b.add_layer()
    b.start()
    try:
        yield b
    finally:
        b.close()


def inputs(M, k=3, x=torch.float32, ids=torch.int32, w=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-8, 8, (M, H), generator=g).to(x),
        torch.randint(-1, E, (M, k), generator=g).to(ids),
        (torch.randint(0, 8, (M, k), generator=g) / 8).to(w),
    )


class Caller:
    """A client's session and the tensors of one request in it."""

    def __init__(self, b, handle=1000, entries=16, caller=9):
        self.region = Region.create(1 << 20, entries)
        self.bell = self.region.ring_here()
        b.core.add_session(
            handle, self.region.address, self.region.bytes, entries, self.bell.fileno(),
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
        self.bell.close()
