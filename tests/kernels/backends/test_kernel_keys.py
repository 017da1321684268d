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
keys = {}
order = -1 if len(modules) > 1 else 1
for name in sorted(n for n in sys.modules if n.startswith("expertd_kernels.backends"))[::order]:
    for what, value in vars(sys.modules[name]).items():
        if isinstance(value, triton.JITFunction) and value.__module__ == name:
            keys[f"{name}.{what}"] = value.cache_key
print(json.dumps(keys))
"""


def keys(*layers: str) -> dict[str, str]:
    """Of the kernels in a process that imports these modules of layers, in this order."""
    out = subprocess.run([sys.executable, "-c", ASK, *layers], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


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
