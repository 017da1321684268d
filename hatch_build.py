"""Build hook: compiles the CPU kernel and the small libraries of cxx.py when a wheel or an editable install is made.

Where the machine has no compiler, the build gets one from PyPI (ziglang, 100 MB, for the build alone), unless it runs
with --no-build-isolation.  Where a library cannot be compiled the install goes on: the server then says at its start
that its core is missing, and a client has no shared memory.

EXPERTD_WHEEL=x86_64 or aarch64 (`make wheel` sets it) makes a wheel to give away: for that architecture and for every
Linux with the glibc that native/csrc/build.py names.  There a failure is an error.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
ZIG = "ziglang>=0.13"
CSRC = ROOT / "kernels" / "expertd_kernels" / "native" / "csrc"


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
    """Adds the shared objects to the wheel, and tags the wheel for the machines that it runs on."""

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling: a compiler where this machine has none."""
        cxx = _module("expertd_cxx", ROOT / "proto" / "expertd" / "cxx.py")
        try:
            cxx.find_compiler(os.environ.get("EXPERTD_WHEEL", ""))
        except cxx.BuildError:
            return [ZIG]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("EXPERTD_WHEEL", "")
        builder = _module("expertd_csrc_build", CSRC / "build.py")
        self._small_libraries(build_data, machine)
        if machine:
            self._put(build_data, builder.build(self._place(machine, builder.LIBRARY), machine=machine), CSRC)
            platform = f"manylinux_{builder.GLIBC.replace('.', '_')}_{machine}"
        else:
            try:
                library: Path = builder.build(only_if_stale=True)
            except builder.BuildError as e:
                self.app.display_warning(f"expertd: the CPU kernel was not built, CPU layers will be slower: {e}")
                return
            build_data["artifacts"].append(str(library.relative_to(self.root)))
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # C ABI through ctypes: any Python of this platform

    def _small_libraries(self, build_data: dict[str, Any], machine: str) -> None:
        """Those of cxx.LIBRARIES; without them expertd does with less, a server without its core not at all."""
        cxx = _module("expertd_cxx", ROOT / "proto" / "expertd" / "cxx.py")
        for library in cxx.LIBRARIES:
            if machine:
                made = cxx.build(library, ROOT, self._place(machine, library.name), machine=machine)
                self._put(build_data, made, ROOT / library.folder)
                continue
            try:
                made = cxx.build(library, ROOT)
            except cxx.BuildError as e:
                self.app.display_warning(f"expertd: {library.name} was not built, expertd does without it: {e}")
                continue
            build_data["artifacts"].append(str(made.relative_to(self.root)))

    def _place(self, machine: str, name: str) -> Path:
        """Where a library for others is made: the tree keeps those of this machine."""
        return Path(self.root) / "build" / "wheel" / machine / name

    def _put(self, build_data: dict[str, Any], library: Path, folder: Path) -> None:
        """`library` goes into the wheel where those of `folder` lie: packages stand one folder below the tree's."""
        inside = Path(*(folder / library.name).relative_to(ROOT).parts[1:])
        build_data["force_include"][str(library)] = str(inside)
