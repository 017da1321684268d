"""The row `triton` in Triton's interpreter: every scheme and feature at tiny sizes, against the float32 reference.

TRITON_INTERPRET has to stand in the environment before triton is imported and holds for the whole process, so the cases
run in a process of their own (triton_cases.py), and nothing changes for other tests in this one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import SMALL


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> the case's answer, from one process for all cases."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning", str(Path(__file__).parent / "triton_cases.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:

        def ask(name):
            process.stdin.write(name + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("name", SMALL)
def test_a_layer_agrees_with_the_reference(interpreter, name):
    answer = interpreter(name)
    assert "failed" not in answer, answer["failed"]
    assert answer["unpacked"] == "", f"unpack(pack(w)) differs in {answer['unpacked']}"
    assert answer["relative_error"] <= answer["tolerance"]
    assert answer["own_error"] <= 1e-2
    assert answer["repeated"], "a second call gave other bits"
