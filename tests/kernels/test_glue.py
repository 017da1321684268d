"""The kernels around other packages' GEMMs in Triton's interpreter, alone and in layers of the rows that use them.

TRITON_INTERPRET has to stand in the environment before triton is imported and holds for the whole process, so the cases
run in a process of their own (glue_cases.py), and nothing changes for other tests in this one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from glue_cases import CASES


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing; from one process for all cases."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning", str(Path(__file__).parent / "glue_cases.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:

        def ask(name):
            process.stdin.write(name + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())["failed"]

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("name", CASES)
def test_a_case_in_the_interpreter(interpreter, name):
    failed = interpreter(name)
    assert not failed, failed
