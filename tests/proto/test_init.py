"""The package itself: what it needs before anything of it is used."""

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).parents[2] / "proto"


def test_libraries_are_compiled_in_a_checkout_without_an_install():
    """-S: no site-packages, so neither grpcio nor expertd's own metadata."""
    code = f"import sys; sys.path.insert(0, {str(PROTO)!r}); import expertd.cxx; print(len(expertd.cxx.LIBRARIES))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


def test_a_checkout_that_is_not_installed_has_a_version():
    """`expertd serve` says it in Describe and in metrics."""
    code = f"import sys; sys.path.insert(0, {str(PROTO)!r}); import expertd; print(expertd.__version__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0+checkout\n")
