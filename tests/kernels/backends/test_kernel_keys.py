"""Keys of compiled kernels on disk: the same in every process, whichever kernels it asks for first."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

ASK = """
import importlib, json, sys
import triton
modules = ["expertd_kernels.backends." + m for m in sys.argv[1:]]
for name in modules:
    importlib.import_module(name)
def constants(kernel):
    found = {(name, repr(value)) for (name, _), (value, _) in kernel.used_global_vals.items()}
    return sorted(name for name, value in found)
keys = {}
order = -1 if len(modules) > 1 else 1
for name in sorted(n for n in sys.modules if n.startswith("expertd_kernels.backends"))[::order]:
    for what, value in vars(sys.modules[name]).items():
        if isinstance(value, triton.JITFunction) and value.__module__ == name:
            keys[f"{name}.{what}"] = (value.cache_key, constants(value))
print(json.dumps(keys))
"""


Kernels = dict[str, tuple[str, list[str]]]
"""By a kernel's name: its key, and the names of the constants that it and what it calls use, one for each value."""


def keys(*layers: str) -> Kernels:
    """Of the kernels in a process that imports these modules of layers, in this order."""
    out = subprocess.run([sys.executable, "-c", ASK, *layers], capture_output=True, text=True, check=True)
    return {kernel: (key, names) for kernel, (key, names) in json.loads(out.stdout).items()}


def test_no_kernel_uses_two_constants_of_one_name():
    """Triton puts them into the key in the order of their modules' addresses, which differs from process to process."""
    every = keys("glue", "portable.experts", "gluon.w8a8.experts", "gluon.weight_only.experts")
    assert any(names for _, names in every.values())
    assert {kernel: names for kernel, (_, names) in every.items() if len(set(names)) < len(names)} == {}


def test_a_kernel_has_one_key_whatever_its_process_imports_and_asks_first():
    every = keys("glue", "portable.experts", "gluon.w8a8.experts", "gluon.weight_only.experts")
    assert len(every) > 20
    for order in (("gluon.weight_only.experts",), ("gluon.weight_only.experts", "glue", "gluon.w8a8.experts")):
        found = keys(*order)
        assert len(found) > 5
        assert found == {k: every[k] for k in found}


def test_in_the_interpreter_there_is_nothing_to_ask():
    code = "import expertd_kernels.backends.glue as g; print(type(g.place_rows).__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={"TRITON_INTERPRET": "1", "PATH": ""})  # fmt: skip
    assert out.stdout.strip() == "InterpretedFunction"
