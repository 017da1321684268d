"""Processes that time a layer in turns, so that none disturbs another: the threads of some implementations spin for
milliseconds after a call, and would take a core from whoever comes next.

Ours and the reads are in one process, each other implementation is in its own.  While one has its turn, all threads of
the others are at rest: a process answers when its own are (`settle`).  All are started anew for each generation,
because processes differ: where their pages lie is drawn once for all calls.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from expertd_kernels.bench.cpu_layer import OURS, READ, RUNS, Maker, Point, TimedLayer, ceilings, settle
from expertd_kernels.bench.faults import WorkerError

__all__ = ["Key", "TurnsPlan", "Sample", "generation", "samples"]

TURNS = 2
"""Of each process at a point, the second in the opposite order."""
STOP_S = 5.0
OURS_PROCESS = "ours and the reads"

Key = tuple[str, str, int, int]
"""shape, scheme, threads, M"""


@dataclass(frozen=True)
class Sample:
    """One row at one point in one process.  us: median; fractions: of the plain read of that process, and of the read
    of the same runs, that it reached; NaN without reads."""

    us: float
    gb_s: float
    gflop_s: float
    read_fraction: float
    runs_fraction: float
    relative_error: float
    eight_bits: bool


@dataclass(frozen=True)
class TurnsPlan:
    """What every generation times.  rows: of a scheme's name: those of OURS, and other backends; seconds: of a row at a
    point in a process."""

    layers: Sequence[tuple[str, str]]
    rows: Callable[[str], Sequence[str]]
    others: Mapping[str, Maker]
    threads: Sequence[int]
    tokens: Sequence[int]
    seconds: float
    clock: str


@dataclass(frozen=True)
class _Fault:
    text: str


def _serve(pipe: Connection[Any, Any]) -> None:
    """Does as it is told until the pipe closes; answers (result, whether its threads are at rest)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks closes the pipe
    layer: TimedLayer | None = None
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if do == "layer":
                layer = None  # what it holds is free while the next one is made
                layer = TimedLayer(*arguments)
                answer: Any = None
            else:
                answer = ceilings(*arguments) if do == "ceilings" else getattr(layer, do)(*arguments)
        except Exception as e:
            answer = _Fault(f"{type(e).__name__}: {e}")
        pipe.send((answer, settle()))


class _Worker:
    """A process that times; WorkerError for what it could not do, or if it ended."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.say = name, say
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, do: str, *arguments: Any) -> None:
        try:
            self._pipe.send((do, arguments))
        except OSError:
            raise WorkerError(f"{self.name}: its process has ended") from None

    def receive(self) -> Any:
        try:
            answer, rests = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(STOP_S)
            raise WorkerError(f"{self.name}: its process ended, exit code {self._process.exitcode}") from None
        if not rests:
            self.say(f"{self.name}: its threads compute between calls and may disturb the others")
        if isinstance(answer, _Fault):
            raise WorkerError(f"{self.name}: {answer.text}")
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _Crew:
    """One process of each kind, the first with ours and the reads.  Another one that fails is told and left out."""

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.workers, self.say = [_Worker(name, say) for name in names], say

    def ask(self, worker: _Worker, do: str, *arguments: Any) -> Any:
        """None from one that failed."""
        return self._each([(worker, arguments)], do).get(worker.name)

    def all(self, do: str, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """All at once, since nothing is timed: name -> answer."""
        return self._each([(w, arguments[w.name]) for w in self.workers], do)

    def _each(self, asked: Sequence[tuple[_Worker, Sequence[Any]]], do: str) -> dict[str, Any]:
        answers = {}
        for step in ("send", "receive"):
            for worker, arguments in [a for a in asked if a[0] in self.workers]:
                try:
                    if step == "send":
                        worker.send(do, *arguments)
                    else:
                        answers[worker.name] = worker.receive()
                except WorkerError as e:
                    if worker is self.workers[0]:
                        raise
                    self.say(f"{e}; left out from here on")
                    self.workers.remove(worker)
                    worker.close()
        return answers

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def samples(points: Sequence[Point], taken: Mapping[str, Sequence[float]]) -> dict[str, Sample]:
    """What the processes of a generation found at a point.  taken: row -> microseconds of its calls."""
    us = {name: statistics.median(calls) for name, calls in taken.items()}
    nbytes, flop = points[0].nbytes, points[0].flop
    errors = {name: e for p in points for name, e in p.errors.items()}
    gb_s = {name: (points[0].whole if name == READ else nbytes) / t / 1e3 for name, t in us.items()}
    nan = float("nan")
    return {
        name: Sample(
            us=t,
            gb_s=gb_s[name],
            gflop_s=0.0 if name in (READ, RUNS) else flop / t / 1e3,
            read_fraction=gb_s[name] / gb_s.get(READ, nan),
            runs_fraction=gb_s[name] / gb_s.get(RUNS, nan),
            relative_error=errors.get(name, 0.0),
            eight_bits=any(name in p.eight_bits for p in points),
        )
        for name, t in us.items()
    }


def _kinds(plan: TurnsPlan) -> dict[str, tuple[str, ...]]:
    """Process -> the rows of backends in it, of those that any scheme of the plan asks for; a peer's has none."""
    rows = list(dict.fromkeys(name for _, scheme in plan.layers for name in plan.rows(scheme)))
    apart = {name: (name,) for name in rows if name not in OURS}
    return {OURS_PROCESS: tuple(name for name in rows if name in OURS), **apart, **dict.fromkeys(plan.others, ())}


def _layer(plan: TurnsPlan, process: str, rows: Sequence[str], shape: str, scheme: str) -> tuple[Any, ...]:
    """Arguments of TimedLayer."""
    others = {process: plan.others[process]} if process in plan.others else {}
    wanted = [row for row in rows if row in plan.rows(scheme)]
    return shape, scheme, wanted, others, process == OURS_PROCESS, plan.clock


def generation(
    plan: TurnsPlan, over: Callable[[], bool], peaks: dict[str, dict[str, float]], say: Callable[[str], None]
) -> Iterator[tuple[Key, dict[str, Sample]]]:
    """Each point as it was timed by new processes; ends where over() is true before one.  peaks: filled with the
    ceilings of each number of threads where it is empty."""
    if over():
        return
    kinds = _kinds(plan)
    crew = _Crew(list(kinds), say)
    try:
        if not peaks:
            peaks.update({f"{t}": crew.ask(crew.workers[0], "ceilings", t) for t in plan.threads})
        for shape, scheme in plan.layers:
            crew.all("layer", {name: _layer(plan, name, rows, shape, scheme) for name, rows in kinds.items()})
            for threads in plan.threads:
                for refused in crew.all("use", dict.fromkeys(kinds, (threads,))).values():
                    for row, why in refused.items():
                        say(f"{row}: {why}")
                for tokens in plan.tokens:
                    if over():
                        return
                    yield (shape, scheme, threads, tokens), _point(crew, tokens, plan.seconds)
    finally:
        crew.close()


def _point(crew: _Crew, tokens: int, seconds: float) -> dict[str, Sample]:
    points = crew.all("point", {worker.name: (tokens,) for worker in crew.workers})
    taken: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for worker in list(crew.workers)[:: 1 if turn % 2 == 0 else -1]:
            for name, us in (crew.ask(worker, "turn", seconds / TURNS, turn) or {}).items():
                taken.setdefault(name, []).extend(us)
    return samples(list(points.values()), taken)
