"""Lessons about routes, biases, zero points and padding, computed by every backend of the table that can run here."""

import pytest
from interpreted import interpreted
from lesson_cases import BUILD, CASES, GPU_ONLY, PACKAGES
from vendor import package_folder

from expertd_kernels.oracle.table import BACKENDS


@pytest.fixture(scope="module")
def interpreter():
    """ask(case name) -> what went wrong, "" = nothing."""
    with interpreted("lesson_cases.py") as ask:
        yield lambda name: ask(name)["failed"]


def test_every_backend_of_the_table_is_run_by_some_lesson():
    assert {b.name for b in BACKENDS} == set(BUILD) | GPU_ONLY
    assert {name.split()[0] for name in CASES} == set(BUILD)


@pytest.mark.parametrize("name", CASES)
def test_a_lesson_holds(interpreter, name):
    if needed := PACKAGES.get(name.split()[0]):
        package_folder(needed)
    failed = interpreter(name)
    assert not failed, failed
