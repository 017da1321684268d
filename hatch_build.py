"""Build hook: compiles the CPU kernel into the package when a wheel or an editable install is made.

Without a compiler the install goes on: expertd then says so, and serves CPU layers with its slower fall-back.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "kernels" / "expertd_kernels" / "native" / "csrc"


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
    """Adds the shared object to the wheel, and tags the wheel for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._small_libraries(build_data)
        builder = _module("expertd_csrc_build", CSRC / "build.py")
        try:
            library: Path = builder.build(only_if_stale=True)
        except builder.BuildError as e:
            self.app.display_warning(f"expertd: the CPU kernel was not built, CPU layers will be slower: {e}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # C ABI through ctypes: any Python of this platform
        build_data["artifacts"].append(str(library.relative_to(self.root)))

    def _small_libraries(self, build_data: dict[str, Any]) -> None:
        """Those of shared memory and of the engine's core; without them messages travel inline."""
        cxx = _module("expertd_cxx", ROOT / "proto" / "expertd" / "cxx.py")
        for library in cxx.LIBRARIES:
            try:
                made: Path = cxx.build(library, ROOT)
            except cxx.BuildError as e:
                self.app.display_warning(f"expertd: {library.name} was not built, there is no shared memory: {e}")
                continue
            build_data["artifacts"].append(str(made.relative_to(self.root)))
