"""Tasks in processes of their own, so that one that crashes, hangs or breaks its GPU context takes no other with it."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

__all__ = ["NoResult", "run_tasks"]

T = TypeVar("T")
R = TypeVar("R")
STOP_S = 5.0


@dataclass(frozen=True)
class NoResult:
    """A task without a result.  ran: False where time was short, so that nothing is known of it: it was not begun, or
    it was stopped; True where its process ended by itself."""

    reason: str
    ran: bool


@dataclass
class _Worker(Generic[T]):
    process: BaseProcess
    pipe: Connection
    task: T
    begun: float


def _serve(pipe: Connection, target: Callable[[Any], Any], usable: Callable[[], bool]) -> None:
    """Takes tasks until the pipe closes, or until a task left this process unusable."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(target(task))
        if not usable():
            return


def always() -> bool:
    return True


def run_tasks(
    target: Callable[[T], R],
    tasks: Sequence[T],
    *,
    jobs: int,
    budget_s: float,
    limit_s: float,
    usable: Callable[[], bool] = always,
) -> Iterator[tuple[T, R | NoResult]]:
    """target(task) for each task in up to `jobs` spawned processes, as they finish.

    budget_s: for all of them together: then what runs is stopped and the rest is not begun.  limit_s: for one task.
    usable: asked in the process after each task; False: it ends and the next task gets a new one.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(tasks)
    busy: dict[Connection[Any, Any], _Worker[T]] = {}
    idle: list[tuple[BaseProcess, Connection[Any, Any]]] = []
    end = time.monotonic() + budget_s
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs and time.monotonic() < end:
                process, pipe = idle.pop() if idle else _start(context, target, usable)
                task = waiting.popleft()
                try:
                    pipe.send(task)
                except OSError:  # an idle process that was not usable has ended
                    waiting.appendleft(task)
                    _stop((process, pipe))
                    continue
                busy[pipe] = _Worker(process, pipe, task, time.monotonic())
            ready = wait(list(busy), timeout=0.2)
            for worker in [w for pipe, w in busy.items() if pipe in ready]:
                del busy[worker.pipe]
                result = _receive(worker)
                if isinstance(result, NoResult):
                    _stop((worker.process, worker.pipe))
                else:
                    idle.append((worker.process, worker.pipe))
                yield worker.task, result
            now = time.monotonic()
            late_ones = [w for w in busy.values() if now >= min(end, w.begun + limit_s)]
            _stop(*((w.process, w.pipe) for w in late_ones))
            for worker in late_ones:
                del busy[worker.pipe]
                why = "the budget was spent" if now >= end else "the limit of a task"
                late = f"not run: stopped after {now - worker.begun:.0f} s, {why}"
                yield worker.task, NoResult(late, ran=False)
            if now >= end and not busy:
                while waiting:
                    yield waiting.popleft(), NoResult("not run: the budget was spent", ran=False)
    finally:
        _stop(*((w.process, w.pipe) for w in busy.values()), *idle)


def _start(
    context: multiprocessing.context.SpawnContext, target: Callable[[Any], Any], usable: Callable[[], bool]
) -> tuple[BaseProcess, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, target, usable), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _receive(worker: _Worker[Any]) -> Any:
    """The result, or NoResult where the process ended without one."""
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(STOP_S)
        return NoResult(f"its process ended with exit code {worker.process.exitcode}", ran=True)


def _stop(*workers: tuple[BaseProcess, Connection]) -> None:
    """All at once: a process takes a second to give its GPU context back.  Idle ones end by themselves when their pipe
    closes, but not in time: what they hold is not worth waiting for."""
    for process, pipe in workers:
        pipe.close()
        process.terminate()
    end = time.monotonic() + STOP_S
    for process, _ in workers:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    for process, _ in workers:
        process.join(STOP_S)
