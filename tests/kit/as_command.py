"""expertctl as a user runs it: the first command of each name as a process, the others in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from expertctl import cli

__all__ = ["as_process", "expertctl", "run"]

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(sys.executable).parent), str(ROOT / "node_modules" / ".bin"), os.environ["PATH"]])
STARTED: set[str] = set()
"""Names of commands that ran as a process."""


def run(*words: object, code: object = 0) -> str:
    """Runs a command; its standard output, with the other one where code is not 0.  Warnings are errors in it, too."""
    env = {**os.environ, "PATH": PATH, "PYTHONWARNINGS": "error", "COLUMNS": "120"}
    done = subprocess.run(
        [str(w) for w in words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


def as_process(*words: object, code: object = 0) -> str:
    return run(sys.executable, "-m", "expertctl.cli", *words, code=code)


def expertctl(*words: object, code: object = 0) -> str:
    """What it prints, as run() has it."""
    if str(words[0]) not in STARTED:
        STARTED.add(str(words[0]))
        return as_process(*words, code=code)
    out, err, here = io.StringIO(), io.StringIO(), os.getcwd()
    ended: object = None
    os.chdir(ROOT)
    try:
        with (
            mock.patch.dict(os.environ, COLUMNS="120"),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            ended = cli.main([str(w) for w in words])
    except SystemExit as e:
        ended = e.code
    finally:
        os.chdir(here)
    assert ended == code, out.getvalue() + err.getvalue()
    return out.getvalue() if code == 0 else out.getvalue() + err.getvalue()
