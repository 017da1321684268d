"""The rules of the core's queue on a clock of the test's: rules.cpp, compiled on first use, through ctypes."""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from expertd.cxx import E4M3, ENGINE, SHM, Library, build
from expertd_server.engine.abi import REASONS, Forward
from expertd_server.engine.admission import QueueLimits

ROOT = Path(__file__).resolve().parents[3]
SECOND, MS = 1_000_000_000, 1_000_000
_MOST = 1 << 16


@cache
def _library() -> C.CDLL:
    """Compiled into build/, where it is not there or made of other sources."""
    rules = Library("librules.so", "tests/server/engine", [ENGINE, SHM, E4M3])
    lib = C.CDLL(str(build(rules, ROOT, ROOT / "build" / "tests" / rules.name)))
    u32, u64, f64, p = C.c_uint32, C.c_uint64, C.c_double, C.c_void_p
    for name, result, arguments in (
        ("rules", p, (u32, u32, u64, u64, u64, C.c_int)),
        ("rules_free", None, (p,)),
        ("rules_layer", None, (p, u32, u32)),
        ("rules_saw", None, (p, u32, u64, u64, u64)),
        ("rules_expect", f64, (p, u32, u64, u64)),
        ("rules_come", u32, (p, u64, u64, p, p)),
        ("rules_cancel", None, (p, u64)),
        ("rules_cut", C.c_int64, (p, u64, p, p)),
        ("rules_ended", None, (p, u64, u32, u64, u64, u64, u64, f64)),
        ("rules_foreseen", u64, (p, u64)),
        ("rules_urgency", u64, (p,)),
        ("rules_batch_ended", None, (p, u64, u64, u64)),
        ("rules_until", u64, (p, C.c_float, u64)),
        ("rules_waited", None, (p, u64)),
        ("forecast_enter", None, (p, u32, u32, u64, u64)),
        ("forecast_leave", None, (p, u32, u32, u64, u64)),
        ("forecast_begin", None, (p, u64, u32, u64, u64)),
        ("forecast_end", None, (p, u64)),
        ("forecast_computed", None, (p, u64, u32, u64, u64, u64, f64)),
        ("forecast_dropped", None, (p, u64, u32, u64, u64, u64)),
        ("forecast_went_out", None, (p, u64, f64)),
        ("forecast_running", f64, (p, u64)),
        ("forecast_waiting", f64, (p,)),
        ("forecast_foresee", None, (p, u64, u32, u32, u64, u64, u64, u64, u64, u64, p)),
    ):
        function = getattr(lib, f"expertd_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


@dataclass(eq=False)
class Asked:
    """A request of which the rules see no more than this."""

    layer: int = 0
    tokens: int = 1
    top_k: int = 1
    arrival: int = 0
    deadline: int = 0
    caller: str = ""
    on_input: bool = False
    nbytes: int = 0
    cancelled: bool = False

    @property
    def routes(self) -> int:
        return self.tokens * self.top_k

    def forward(self, caller: int = 0) -> Forward:
        return Forward(
            layer=self.layer,
            tokens=self.tokens,
            top_k=self.top_k,
            arrival_ns=self.arrival,
            deadline_ns=self.deadline,
            caller=caller,
            router_weight_on_input=self.on_input,
            bytes=self.nbytes,
        )


class Cut(NamedTuple):
    layer: int
    run: list[Asked]
    dead: list[Asked]


class Foreseen(NamedTuple):
    in_ns: float
    late_ns: float
    less_ns: float


def urgency(r: Asked) -> int:
    return int(_library().expertd_rules_urgency(C.byref(r.forward())))


class Rules:
    """layers: (number, top_k) of each."""

    def __init__(self, max_tokens: int = 64, limits: QueueLimits | None = None, layers: Any = ((0, 2),)) -> None:
        q = limits or QueueLimits(refuse_late=False)
        self._lib = _library()
        self._r = self._lib.expertd_rules(max_tokens, q.requests, q.tokens, q.routes, q.nbytes, q.refuse_late)
        self._tags: dict[int, Asked] = {}
        self._callers: dict[str, int] = {}
        self._room, self._counts = (C.c_uint64 * _MOST)(), (C.c_uint32 * 2)()
        for number, top_k in layers:
            self._lib.expertd_rules_layer(self._r, number, top_k)

    def __del__(self) -> None:
        self._lib.expertd_rules_free(self._r)

    def __getattr__(self, name: str) -> Any:
        """A function of rules.cpp: r.rules_saw(...), r.forecast_enter(...)."""
        if not name.startswith(("rules_", "forecast_")):
            raise AttributeError(name)
        return lambda *args: getattr(self._lib, f"expertd_{name}")(self._r, *args)

    def come(self, r: Asked, now: int | None = None) -> tuple[str, int]:
        """(reason of a refusal or "", nanoseconds that it would be late)."""
        caller = self._callers.setdefault(r.caller, len(self._callers) + 1)
        late = C.c_uint64()
        forward = r.forward(caller)
        when = r.arrival if now is None else now
        reason = REASONS[self._lib.expertd_rules_come(self._r, when, id(r), C.byref(forward), C.byref(late))]
        if not reason:
            self._tags[id(r)] = r
            if r.cancelled:
                self._lib.expertd_rules_cancel(self._r, id(r))
        return reason, late.value

    def cut(self, now: int) -> Cut | None:
        layer = self._lib.expertd_rules_cut(self._r, now, self._room, self._counts)
        if layer < 0:
            return None
        run, dead = self._counts
        tags = [self._tags.pop(tag) for tag in self._room[: run + dead]]
        return Cut(layer, tags[:run], tags[run:])

    def ended(self, now: int, run: list[Asked], ns: int, behind_ns: float = 0.0) -> None:
        """The batch of `run` took `ns`."""
        rows, top_k = sum(r.tokens for r in run), max(r.top_k for r in run)
        routes = sum(r.routes for r in run)
        self._lib.expertd_rules_ended(self._r, now, run[0].layer, rows, top_k, routes, ns, behind_ns)

    def foreseen(self, r: Asked) -> int:
        """When it was expected to be computed; 0 = not known."""
        return int(self._lib.expertd_rules_foreseen(self._r, id(r)))

    def foresee(self, *asked: int) -> Foreseen:
        out = (C.c_double * 3)()
        self._lib.expertd_forecast_foresee(self._r, *asked, out)
        return Foreseen(*out)
