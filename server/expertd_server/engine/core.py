"""The engine's core in C++ (csrc/core.cpp), through ctypes: a thin wrapper, with its structs (abi.py).

Every call but `run` takes microseconds; `run` waits without the interpreter's lock.  Calls that are made often are few,
one for a request, one for all outcomes that came together, and keep the lock.
"""

from __future__ import annotations

import ctypes as C
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from expertd.cxx import stale
from expertd.errors import TABLE, ExpertdError, LayerNotHeldError
from expertd_kernels.common.protocol import Direct
from expertd_server.engine.abi import (
    CHECK,
    COLLECT,
    COLLECT_E4M3,
    COLLECT_ROUTES,
    COLLECT_STAGED,
    DELIVER,
    EXPERTS,
    INTERRUPTED,
    MOST_OUTCOMES,
    REASONS,
    RUN,
    STOPPED,
    WHOLE,
    BatchRecord,
    BatchSlotMemory,
    Config,
    Forward,
    InlineMessage,
    LayerFacts,
    Load,
    Measured,
    Outcome,
    RequestFacts,
    Run,
    TcpBoundsStruct,
    TensorFacts,
    TraceRecord,
    Waiting,
)

# Why it is so: decisions 90, 113 and 154 in DECISIONS.md.
__all__ = [
    "BatchRecord",
    "CHECK",
    "COLLECT",
    "COLLECT_E4M3",
    "COLLECT_ROUTES",
    "COLLECT_STAGED",
    "Config",
    "Core",
    "CoreMissingError",
    "DELIVER",
    "EXPERTS",
    "Forward",
    "INTERRUPTED",
    "InlineMessage",
    "BatchSlotMemory",
    "LayerFacts",
    "Load",
    "MOST_OUTCOMES",
    "Measured",
    "Outcome",
    "TcpBoundsStruct",
    "REASONS",
    "RUN",
    "RequestFacts",
    "Run",
    "STOPPED",
    "TensorFacts",
    "TraceRecord",
    "WHOLE",
    "Waiting",
    "copying",
    "library",
]


class CoreMissingError(ImportError):
    """The library is not there or does not load."""


_QUICK = (
    *("_outcomes", "_records", "_traces", "_load", "_waiting", "_cancel", "_admits", "_went_out"),
    *("_check", "_not_held"),
)
"""Calls that keep the interpreter's lock: they wait for nobody who could want it, and are over sooner than it would be
had back from the engine's thread (46 us a request under load)."""


_TEXT_BYTES = 1024
"""Of the text of a refusal."""


@cache
def library() -> C.CDLL:
    """Raises CoreMissingError."""
    path = Path(__file__).parent / "csrc" / "libexpertd_engine.so"
    if why := stale(path.name):
        raise CoreMissingError(f"the engine's core: {why}")
    try:
        lib, quick = C.CDLL(str(path)), C.PyDLL(str(path))
    except OSError as e:
        remedy = "pip install ziglang && python -m expertd.cxx"
        raise CoreMissingError(f"the engine's core is not built: {e}; {remedy}") from e
    p, u32, u64 = C.c_void_p, C.c_uint32, C.c_uint64
    for name, result, arguments in (
        ("_sizes", None, (p,)),
        ("", p, (p,)),
        ("_free", None, (p,)),
        ("_batch_slot", None, (p, u32, p)),
        ("_device", C.c_int, (p, p, p, p)),
        ("_run", u32, (p, p)),
        ("_done", None, (p, u32, u64, C.c_char_p)),
        ("_launched", None, (p, u32)),
        ("_fail_all", None, (p, u32, C.c_char_p)),
        ("_submit", u32, (p, p, p, p)),
        ("_admits", u32, (p, p, p)),
        ("_went_out", None, (p, u64)),
        ("_check", u32, (p, p, p, u32)),
        ("_not_held", None, (p, u32, p, u32)),
        ("_drain", None, (p,)),
        ("_interrupt", None, (p,)),
        ("_forget_graphs", None, (p,)),
        ("_waited_for", C.c_int, (p, u32)),
        ("_computing", C.c_int, (p, p, p)),
        ("_stop", None, (p,)),
        ("_outcomes", u32, (p, p, u32)),
        ("_records", u32, (p, p, u32)),
        ("_traces", u32, (p, p, u32)),
        ("_bell", C.c_int, (p,)),
        ("_answered", None, (p, p)),
        ("_wait_bounds", None, (p,)),
        ("_load", None, (p, p)),
        ("_waiting", None, (p, u32, p, p)),
        ("_cancel", None, (p, u64)),
        ("_add_layer", None, (p, p, p, p, u32, p, u32, C.c_int)),
        ("_drop_kept", None, (p,)),
        ("_remove_layer", None, (p, u32)),
        ("_add_graph", None, (p, u32, u32, u32, u32, u32, u32, u32, p)),
        ("_add_session", None, (p, u64, p, u64, u32, C.c_int, u32, u64, u64)),
        ("_remove_session", None, (p, u64)),
    ):
        function = getattr(quick if name in _QUICK else lib, "expertd_core" + name)
        function.restype, function.argtypes = result, arguments
        setattr(lib, "expertd_core" + name, function)
    quick.expertd_message_look.argtypes = (p, C.c_char_p, u64, p)
    quick.expertd_message_answer.restype = None
    quick.expertd_message_answer.argtypes = (p, C.c_char_p, u64, p)
    lib.expertd_message_submit.restype = u32
    lib.expertd_message_submit.argtypes = (p, p, C.c_char_p, C.c_char_p, u32, u64, u64, p, p)
    for name in ("expertd_message_look", "expertd_message_answer"):
        setattr(lib, name, getattr(quick, name))
    connections: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("", p, (p, p)),
        ("_free", None, (p,)),
        ("_add", None, (p, u64, C.c_int, u32)),
        ("_remove", None, (p, u64)),
        ("_gone", u32, (p, p, u32)),
        ("_bell", C.c_int, (p,)),
        ("_unwritten", u64, (p,)),
        ("_stop", C.c_int, (p, u64)),
    )
    for suffix, returns, takes in connections:
        function = getattr(lib, "expertd_tcp_connections" + suffix)
        function.restype, function.argtypes = returns, takes
    return lib


def copying(batch_us: int = 0, row_us: int = 0) -> Direct:
    """Experts that answer with what they get, after so long."""
    return Direct(C.cast(library().expertd_core_copy, C.c_void_p).value or 0, batch_us << 32 | row_us, 0)


class Core:
    """A core and what it must not outlive."""

    def __init__(self, config: Config) -> None:
        self._lib = library()
        self._core = self._lib.expertd_core(C.byref(config))
        self.address: int = self._core
        self._outcomes = (Outcome * MOST_OUTCOMES)()
        self._records = (BatchRecord * 256)()
        self._traces = (TraceRecord * 256)()
        self._load = Load()
        self.bell: int = self._lib.expertd_core_bell(self._core)
        # Calls of one that has stopped are right as long as anybody can make them.
        self._end = weakref.finalize(self, self._lib.expertd_core_free, self._core)
        self._end.atexit = False

    def batch_slot(self, index: int, memory: BatchSlotMemory) -> None:
        self._lib.expertd_core_batch_slot(self._core, index, C.byref(memory))

    def device(self, compute: int, copy_in: int = 0, copy_out: int = 0) -> bool:
        """The streams, as the driver's handles.  False: the CUDA driver lacks something."""
        return bool(self._lib.expertd_core_device(self._core, compute, copy_in, copy_out))

    def run(self, out: Run) -> int:
        return int(self._lib.expertd_core_run(self._core, C.byref(out)))

    def done(self, batch_slot: int, kernel_ns: int, error: str | None = None) -> None:
        self._lib.expertd_core_done(self._core, batch_slot, kernel_ns, None if error is None else error.encode())

    def launched(self, batch_slot: int) -> None:
        self._lib.expertd_core_launched(self._core, batch_slot)

    def fail_all(self, reason: str, text: str) -> None:
        self._lib.expertd_core_fail_all(self._core, REASONS.index(reason), text.encode())

    def submit(self, request: Forward) -> int:
        """Its handle.  Raises the error that refuses it."""
        handle, why = C.c_uint64(), Outcome()
        if self._lib.expertd_core_submit(self._core, C.byref(request), C.byref(handle), C.byref(why)):
            raise why.error()
        return handle.value

    def answer_message(self, answer: bytes, outcome: Outcome) -> None:
        """Write what `answer` lacks of a request that is computed."""
        self._lib.expertd_message_answer(self._core, answer, len(answer), C.addressof(outcome))

    def admits(self, request: Forward) -> ExpertdError | None:
        """What submit() would raise now; addresses are of no interest."""
        why = Outcome()
        return why.error() if self._lib.expertd_core_admits(self._core, C.byref(request), C.byref(why)) else None

    def check(self, request: RequestFacts) -> None:
        """Raises the error that refuses it, for its layer as it is held now."""
        text = C.create_string_buffer(_TEXT_BYTES)
        reason = self._lib.expertd_core_check(self._core, C.byref(request), text, _TEXT_BYTES)
        if reason:
            raise TABLE[REASONS[reason]](text.value.decode())

    def not_held(self, layer: int) -> ExpertdError:
        """The refusal of a request for a layer that is not held."""
        text = C.create_string_buffer(_TEXT_BYTES)
        self._lib.expertd_core_not_held(self._core, layer, text, _TEXT_BYTES)
        return LayerNotHeldError(text.value.decode())

    def went_out(self, ns: int) -> None:
        """So long answers took from their outcome to their connections."""
        self._lib.expertd_core_went_out(self._core, ns)

    def cancel(self, handle: int) -> None:
        self._lib.expertd_core_cancel(self._core, handle)

    def drain(self) -> None:
        self._lib.expertd_core_drain(self._core)

    def interrupt(self) -> None:
        """run() returns INTERRUPTED as soon as no batch is under way and what was said before is taken."""
        self._lib.expertd_core_interrupt(self._core)

    def forget_graphs(self) -> None:
        """Launch none of those added so far.  On the core's thread, while no batch is under way."""
        self._lib.expertd_core_forget_graphs(self._core)

    def waited_for(self, generation: int) -> bool:
        """Whether a request waits for that generation of a layer.  On the core's thread."""
        return bool(self._lib.expertd_core_waited_for(self._core, generation))

    def stop(self) -> None:
        self._lib.expertd_core_stop(self._core)

    def free(self) -> None:
        """Now, and not when nobody has it any more."""
        self._end()

    def outcomes(self) -> Sequence[Outcome]:
        """Valid until the next call; MOST_OUTCOMES: there may be more."""
        n = self._lib.expertd_core_outcomes(self._core, self._outcomes, len(self._outcomes))
        return self._outcomes[:n]

    def answered(self) -> Sequence[int]:
        """Requests of sessions in shared memory and over TCP answered since the last call, by index into REASONS."""
        counts = (C.c_uint64 * len(REASONS))()
        self._lib.expertd_core_answered(self._core, counts)
        return list(counts)

    def records(self) -> Sequence[BatchRecord]:
        """Valid until the next call."""
        n = self._lib.expertd_core_records(self._core, self._records, len(self._records))
        return self._records[:n]

    def traces(self) -> Sequence[TraceRecord]:
        """Valid until the next call."""
        n = self._lib.expertd_core_traces(self._core, self._traces, len(self._traces))
        return self._traces[:n]

    def load(self) -> Load:
        self._lib.expertd_core_load(self._core, C.byref(self._load))
        return self._load

    def computing(self) -> tuple[int, int] | None:
        """Layer and rows of the batch that was begun last; None: none is under way."""
        layer, rows = C.c_uint32(), C.c_uint32()
        if not self._lib.expertd_core_computing(self._core, C.byref(layer), C.byref(rows)):
            return None
        return layer.value, rows.value

    def waiting(self, caller: int) -> tuple[Waiting, Waiting]:
        """What waits: of all callers, and of one."""
        all_, own = Waiting(), Waiting()
        self._lib.expertd_core_waiting(self._core, caller, C.byref(all_), C.byref(own))
        return all_, own

    def add_layer(
        self,
        facts: LayerFacts,
        backends: Sequence[tuple[int, int, str]],
        measured: Sequence[tuple[int, int, int]] = (),
        keeps: bool = False,
    ) -> None:
        """backends: (largest batch, 0 = any; number in outcomes and records; name in answers), ascending.  measured:
        (rows, top_k, ns) of batches that were run before.  keeps: the layer that it replaces is still computed for
        requests that ask for its version, until another one is kept, or drop_kept()."""
        numbers = (C.c_uint32 * (2 * len(backends)))(*(n for most, number, _ in backends for n in (most, number)))
        names = (C.c_char_p * len(backends))(*(name.encode() for _, _, name in backends))
        took = (Measured * len(measured))(*(Measured(*m) for m in measured))
        self._lib.expertd_core_add_layer(
            self._core, C.byref(facts), numbers, names, len(backends), took, len(took), keeps
        )

    def drop_kept(self) -> None:
        """What add_layer() kept is computed for nobody any more."""
        self._lib.expertd_core_drop_kept(self._core)

    def remove_layer(self, layer: int) -> None:
        self._lib.expertd_core_remove_layer(self._core, layer)

    def add_graph(
        self,
        layer: int,
        generation: int,
        part: int,
        batch_slot: int,
        rows: int,
        top_k: int,
        last: int,
        exec_: int,
    ) -> None:
        """last: router weight on input of WHOLE and EXPERTS, the hidden size of parts that all layers share."""
        self._lib.expertd_core_add_graph(self._core, layer, generation, part, batch_slot, rows, top_k, last, exec_)

    def add_session(
        self,
        handle: int,
        address: int,
        size: int,
        entries: int,
        bell: int,
        caller: int,
        pool: tuple[int, int] = (0, 0),
    ) -> None:
        """bell: a socket, whose other end is the client's.  pool: address and size of memory on the device that both
        sides share."""
        self._lib.expertd_core_add_session(self._core, handle, address, size, entries, bell, caller, *pool)

    def remove_session(self, handle: int) -> None:
        self._lib.expertd_core_remove_session(self._core, handle)
