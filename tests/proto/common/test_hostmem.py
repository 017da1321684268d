"""The allocator keeps the pages of large messages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

PROGRAM = """
import resource, sys
from expertd.common.hostmem import tune_allocator
tuned = tune_allocator() if sys.argv[1] == "tuned" else None
def messages():
    blocks = [b"x" * (8 << 20) for _ in range(3)]
messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    messages()
print(tuned, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=clean | environment,
    )
    tuned, count = done.stdout.split()
    return tuned, int(count)


@glibc
def test_tuning_keeps_pages() -> None:
    _, plain = faults("plain")
    tuned, kept = faults("tuned")
    assert tuned == "True"
    assert kept < plain / 5, (kept, plain)


@glibc
@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_TRIM_THRESHOLD_": "1048576"},
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"},
    ],
    ids=lambda e: next(iter(e)),
)
def test_the_environment_counts_more(environment: dict[str, str]) -> None:
    assert faults("tuned", **environment)[0] == "False"
