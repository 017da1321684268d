"""What vLLM's model runner does around forward passes; imports no vLLM.

Dummy runs (profiling, warm-up, capture) have tokens that are nobody's.  Where full CUDA graphs contain the experts'
calls, a step's end asks what its replays met: a replay cannot raise, and answers NaN where its server has ended.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["RUNNERS", "check_steps", "in_dummy_run", "watch"]

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules whose GPUModelRunner has _dummy_run; the runners of other platforms inherit it."""
_STEPS = ("execute_model", "sample_tokens")
"""Its methods that return what a step gave: nothing yet, an output that is on the host, or one to be fetched later."""
_dummies = 0
_checks: dict[object, Callable[[], None]] = {}


def in_dummy_run() -> bool:
    return _dummies > 0


def watch() -> None:
    """Marks the dummy runs of the model runners that are loaded here.  vLLM does not say inside a forward pass that it
    is profiling: the rows are no padding then, and there is attention metadata."""
    for runner in _runners():
        _replace(runner, "_dummy_run", _marked)


def check_steps(of: object, check: Callable[[], None]) -> None:
    """check() before anybody sees a step's output; one for each `of`.  What it raises, the step raises."""
    _checks[of] = check
    for runner in _runners():
        for name in _STEPS:
            _replace(runner, name, _checked)


def _runners() -> Iterator[Any]:
    for name in RUNNERS:
        runner = getattr(sys.modules.get(name), "GPUModelRunner", None)
        if runner is not None:
            yield runner


def _replace(runner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Once."""
    method = getattr(runner, name)
    if not hasattr(method, "expertd"):
        ours = wrapped(method)
        ours.expertd = True
        setattr(runner, name, ours)


@contextmanager
def _dummy() -> Iterator[None]:
    global _dummies
    _dummies += 1
    try:
        yield
    finally:
        _dummies -= 1


def _marked(dummy_run: Any) -> Any:
    @functools.wraps(dummy_run)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _dummy():
            return dummy_run(*args, **kwargs)

    return run


def _checked(step: Any) -> Any:
    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        if hasattr(output, "get_output"):  # its tokens come to the host there, in another thread
            output.get_output = _checked(output.get_output)
        elif output is not None:
            for check in list(_checks.values()):
                check()
        return output

    return run
