"""What was skipped, by reason, and which of it is on the list of what may be.

A reason is allowed where it stands below and what it depends on is so on this machine.  Whatever else is skipped is
named at the end of a run; with --no-other-skips it fails the run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Allowed:
    """reason: matches from its beginning on.  where: the beginning of the test's path.  holds: whether this machine is
    one where it may be skipped.  most: tests."""

    reason: str
    where: str
    holds: Callable[[], bool]
    most: int = 10_000


def always() -> bool:
    return True


def one_core() -> bool:
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2


def gpu() -> bool:
    from torch import cuda  # seconds, which a run of few tests need not wait for

    return cuda.is_available()


def no_gpu() -> bool:
    return not gpu()


def without(program: str) -> Callable[[], bool]:
    return lambda: shutil.which(program) is None


def without_package(name: str) -> Callable[[], bool]:
    return lambda: find_spec(name) is None


def without_namespaces() -> bool:
    from as_printed import no_namespace  # imports the client

    return bool(no_namespace())


def no_buf() -> bool:
    return not (ROOT / "node_modules/.bin/buf").exists() and shutil.which("npm") is None


def no_shared_fixtures() -> bool:
    return not (ROOT.parent / "shared/fixtures").is_dir()


def no_vendor() -> bool:
    return not (ROOT / "build/vendor").is_dir()


def no_large_wheels() -> bool:
    return not any((ROOT / "build/engines").glob("vllm-*"))


GPU = r"runs on (cuda|rocm|xpu|an accelerator)|torch sees no GPU|needs (a|two) (NVIDIA )?GPU|the kernels wait for each"
ALLOWED: Sequence[Allowed] = (
    Allowed(GPU, "tests/gpu/", no_gpu),
    Allowed("torch sees no GPU here", "tests/kernels/sources/test_counted.py", no_gpu, 11),
    Allowed("torch sees no GPU here", "tests/server/engine/test_graphs.py", no_gpu, 4),
    Allowed("(this machine has|there is) a GPU", "tests/", gpu),
    Allowed("buf (curl )?is not installed", "tests/", no_buf),
    Allowed("promtool is not installed", "tests/deploy/test_alerts.py", without("promtool"), 4),
    Allowed("systemd-analyze is not", "tests/deploy/test_images.py", without("systemd-analyze"), 3),
    Allowed("perf_analyzer is not installed", "tests/", without("perf_analyzer")),
    Allowed("grpcurl is not installed", "tests/", without("grpcurl")),
    Allowed("ghz is not installed", "tests/", without("ghz")),
    Allowed("network namespaces", "tests/docs/test_commands.py", without_namespaces),
    Allowed("needs chromium", "tests/server/views/test_page.py", always),
    Allowed("needs two cores", "tests/server/", one_core),
    Allowed("no process may be traced here", "tests/proto/shm/test_shm.py", always, 1),
    Allowed("no SIMDe headers", "tests/kernels/native/test_levels.py", always, 1),
    Allowed("vLLM is not installed", "tests/engines/", without_package("vllm")),
    Allowed("SGLang is not installed", "tests/engines/", without_package("sglang")),
    Allowed("(vllm|kt-kernel) .* is not fetched: `make engines`", "tests/engines/", no_large_wheels, 4),
    Allowed("lm-eval is not installed", "tests/models/test_accuracy.py", without_package("lm_eval"), 1),
    Allowed("fixture .* is not in tests/fixtures", "tests/", no_shared_fixtures),
    Allowed("ziglang is not installed", "tests/deploy/test_wheel.py", without_package("ziglang"), 1),
    Allowed("ggml: not installed", "tests/kernels/bench/test_cpu.py", without_package("ggml"), 1),
    Allowed("onnxruntime_.*: not installed", "tests/kernels/bench/test_cpu.py", without_package("onnxruntime"), 2),
    Allowed("package .* is neither installed nor unpacked", "tests/kernels/", no_vendor, 120),
    Allowed("the kernels are as they were when `make triton`", "tests/kernels/backends/gluon/shared/", always, 1),
    Allowed("does not compute swigluoai with e4m3_block128", "tests/kernels/backends/test_xpu.py", always, 1),
)


@dataclass(frozen=True)
class Skip:
    nodeid: str
    reason: str


def reason_of(longrepr: object) -> str:
    """The sentence in a report of a skipped test."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ").partition("\n")[0]


def others(skips: Iterable[Skip], allowed: Sequence[Allowed] = ALLOWED) -> list[Skip]:
    """Those that no line allows, and those above a line's most."""
    used: Counter[Allowed] = Counter()
    found = []
    for skip in skips:
        for line in allowed:
            fits = skip.nodeid.startswith(line.where) and re.match(line.reason, skip.reason) and line.holds()
            if fits and used[line] < line.most:
                used[line] += 1
                break
        else:
            found.append(skip)
    return found


def by_reason(skips: Iterable[Skip]) -> list[str]:
    """A line for each reason, with how many tests it skipped, in how many files, and one of those."""
    groups: dict[str, list[str]] = {}
    for skip in skips:
        groups.setdefault(skip.reason, []).append(skip.nodeid.partition("::")[0])
    return [
        f"skipped {len(files)}: {reason[:160]} ({sorted(files)[0]}{', ...' if len(set(files)) > 1 else ''})"
        for reason, files in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
