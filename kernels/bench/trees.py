"""Processes that compute with the packages of one source tree each (side.py), asked by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["Process", "tree"]


class Process:
    """One tree's process, asked a line at a time.  RuntimeError for what it could not do, or if it died."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"  # noqa: PT018
        try:
            stdin.write(json.dumps({"do": do, **more}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name}: its process ended at {do} {more}, exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise RuntimeError(f"{self.name}: {do} {more}: {answer['fault']}")
        return answer

    def close(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"  # noqa: PT018
        with contextlib.suppress(OSError):  # of one that ended, a line may be left
            stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()


def tree(name: str, root: Path, commit: str) -> Callable[[], Process]:
    """How a process of the tree at `root` is started.  ValueError where there is no tree."""
    if not (root / "kernels" / "expertd_kernels" / "bench").is_dir():
        raise ValueError(f"{root}: want a tree with kernels/expertd_kernels/bench in it (and proto beside it)")
    path = [str(root / part) for part in ("kernels", "proto")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    if commit:
        environment["EXPERTD_COMMIT"] = commit
    return partial(Process, name, [sys.executable, str(Path(__file__).resolve().parent / "side.py")], environment)
