"""Whether the packages that backends need can be imported.  Importing all of them takes seconds (6.6 s beside an H200:
compilers, kernels, their dependencies), so what went well is remembered in the folder of --cache."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import sys
from pathlib import Path

from expertd_kernels.common.atomic_file import replacing

__all__ = ["IMPORT_NAME", "OTHER_NAMES", "ImportHealth", "installed_as"]

log = logging.getLogger(__name__)

IMPORT_NAME = {
    "flashinfer-python": "flashinfer",
    "vllm-xpu-kernels": "vllm_xpu_kernels",
    "amd-aiter": "aiter",
    "humming-kernels": "humming",
    "sgl-deep-gemm": "deep_gemm",
}
"""Distribution -> module, where the names differ."""

OTHER_NAMES = {
    "triton": ("triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton"),
}
"""Distribution -> those that bring the same module: torch's builds for AMD and Intel GPUs come with a Triton of their
own name."""


def installed_as(name: str) -> importlib.metadata.Distribution | None:
    """Distribution `name` as it is installed here, perhaps by another of its names; None where it is not."""
    for known in (name, *OTHER_NAMES.get(name, ())):
        try:
            return importlib.metadata.distribution(known)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class ImportHealth:
    """Imports distributions by name and says why one is broken.

    folder: where successes are kept for the next process; None: nowhere.  A failure is never kept: it may be mended.
    A distribution that was installed anew, another Python or another torch is asked again.  A remembered success is no
    promise: the backend that is chosen imports its package for real, and a failure then is its refusal.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / "imports.json"
        self._known = self._remembered()
        self._new: dict[str, str] = {}

    def error(self, name: str) -> str:
        """ "" where distribution `name`, which is installed, imports."""
        state = "" if self._path is None else _state(name)
        if state and self._known.get(name) == state:
            return ""
        try:
            importlib.import_module(IMPORT_NAME.get(name, name.replace("-", "_")))
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        self._new[name] = state
        return ""

    def keep(self) -> None:
        """Write down what was found; a folder that cannot be written costs the next start the time again."""
        if self._path is None or not self._new:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as f:
                f.write(json.dumps({**self._known, **self._new}, indent=1).encode())
        except OSError as e:
            log.warning("which packages import cannot be kept in %s: %s", self._path, e)

    def _remembered(self) -> dict[str, str]:
        """Distribution -> the state in which it imported; empty where nothing readable is there."""
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _state(name: str) -> str:
    """What an import depends on, as far as it can be told without one: the installation, Python and torch."""
    dist = installed_as(name)
    if dist is None:
        return ""
    files = [p for f in dist.files or () if f.name == "RECORD" and (p := Path(str(dist.locate_file(f)))).exists()]
    times = [str(p.stat().st_mtime_ns) for p in files]
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return " ".join(
        [dist.version, *times, str(dist.locate_file("")), f"python {sys.version.split()[0]}", f"torch {torch}"]
    )
