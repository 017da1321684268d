"""The C++ of shared memory, TCP, the engine and clusters under sanitizers, in a copy of the tree, driven by tests.

    python tests/faults/sanitized.py address,undefined|thread TEST ...

Python is not instrumented: the sanitizer's run time is loaded before it (LD_PRELOAD), and sees what the libraries do,
and what of it happens in malloc, memcpy and pthread calls.  Its first report ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import plant

__all__ = ["SanitizerMissingError", "sanitized"]

_RUN_TIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
_CALLS = {"address,undefined": b"__asan_report", "thread": b"__tsan_read"}
"""A function that every library calls which is instrumented."""
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=66",  # Python leaves memory to the end of its process
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=66",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0:suppressions={suppressions}",
}
_LIBRARIES = ("_ctypes", "libffi", "ld-linux")  # not libpython: what orders its threads would be unseen
_SUPPRESSIONS = "".join(f"called_from_lib:{name}\n" for name in _LIBRARIES) + "race:PyBytes_FromStringAndSize\n"
"""Of ThreadSanitizer.  Tests use shared memory by ctypes, whose plain store of a sequence number orders nothing
for it; the loader gives back what a thread that ended had as thread_local, which nothing orders for it, either."""


class SanitizerMissingError(Exception):
    """The compiler comes without the sanitizer."""


def sanitized(sanitizer: str, tests: Sequence[str], root: Path, limit_s: float = 3000) -> tuple[int, str]:
    """(exit code, output) of tests in the copy at `root`.  Raises SanitizerMissingError; RuntimeError where what
    was compiled is not instrumented."""
    why = plant.compiled(
        root, [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g1", "-fno-omit-frame-pointer"]
    )
    if why:
        raise SanitizerMissingError(why) if "cannot find" in why else RuntimeError(why)
    for library in plant.cxx.LIBRARIES:
        if _CALLS[sanitizer] not in (library.place(root) / library.name).read_bytes():
            raise RuntimeError(f"{library.name} is not instrumented")
    found = [_where(name) for name in _RUN_TIMES[sanitizer]]
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", *tests]
    suppressions = root / "build" / "suppressions"
    suppressions.write_text(_SUPPRESSIONS)
    options = {name: text.format(suppressions=suppressions) for name, text in _OPTIONS.items()}
    env = {**plant.environment(root), **options, "LD_PRELOAD": ":".join(found)}
    done = subprocess.run(run, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    return done.returncode, done.stdout + done.stderr


def _where(name: str) -> str:
    path = subprocess.run(
        [*plant.cxx.find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(path):
        raise SanitizerMissingError(f"the compiler comes without {name}")
    return os.path.realpath(path)


def main() -> int:
    sanitizer, *tests = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="sanitized-") as folder:
        plant.copied(Path(folder))
        code, output = sanitized(sanitizer, tests, Path(folder))
    print(output[-8000:])
    return code


if __name__ == "__main__":
    sys.exit(main())
