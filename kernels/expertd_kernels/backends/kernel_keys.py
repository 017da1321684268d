"""Triton finds a compiled kernel on disk by a key that, through an oversight, depends on which kernels of the process
were asked for theirs before: a function takes over the constants of the functions that it calls only if those have keys
already.  A second start that began with another batch size compiled everything again (15 s beside an H200).  So every
function gets its key when the kernels are imported: Triton's own first, then each module's after those it uses.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

import triton

# Why it is so: decision 56 in DECISIONS.md.
__all__ = ["settle"]

_OURS = "expertd_kernels."
_LIBRARIES = (
    "triton.language.standard",
    "triton.language.extra.cuda",
    "triton.experimental.gluon.language",
    "triton.experimental.gluon.language.nvidia.ampere",
    "triton.experimental.gluon.language.nvidia.hopper",
)
"""Where device functions of Triton's own are that kernels here use; not every version has each."""
_done: set[str] = set()


def settle(name: str) -> None:
    """Ask the device functions of module `name`, and of those of our modules that it uses, for their keys."""
    if name in _done or triton.knobs.runtime.interpret:
        return
    if not _done:
        _settle_libraries()
    _done.add(name)
    own = []
    for value in list(vars(sys.modules[name]).values()):
        found = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(value, (ModuleType, triton.JITFunction)) and found != name and str(found).startswith(_OURS):
            settle(str(found))
        elif isinstance(value, triton.JITFunction):
            own.append(value)
    for function in own:  # in the order of their definitions: what a function calls stands above it
        _ = function.cache_key


def _settle_libraries() -> None:
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    prefixes = ("triton.language.", "triton.experimental.gluon.language")
    for name in sorted(n for n in sys.modules if n.startswith(prefixes)):
        _done.add(name)
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, triton.JITFunction):
                _ = value.cache_key
