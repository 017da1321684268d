"""Cases in Triton's interpreter.  TRITON_INTERPRET has to stand in the environment before triton is imported and holds
for the whole process, so they run in a process of their own, and nothing changes for other tests in this one."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def interpreted(script: str) -> Iterator[Callable[[str], Any]]:
    """ask(case name) -> the line of JSON with which this folder's `script` answers, from one process for all cases."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning", str(Path(__file__).parent / script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(name: str) -> Any:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def _keep_masks() -> None:
    """Triton's interpreter spreads a scalar comparison over a block as numbers of the type that was compared; from 3.9
    on its own loads and stores refuse such a mask.  Compiled kernels do not know this."""
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        out = spread(self, kind, value)
        if kind.scalar == int1:
            out.data = out.data.astype(bool)
        return out

    InterpreterBuilder.create_splat = create_splat


def answer_cases(cases: Mapping[str, Callable[[], object]]) -> None:
    """The script's side: for each name that comes, {"failed": the traceback, or ""}."""
    _keep_masks()
    for line in sys.stdin:
        failed = ""
        try:
            cases[line.rstrip("\n")]()
        except Exception:
            failed = traceback.format_exc()
        print(json.dumps({"failed": failed}), flush=True)
