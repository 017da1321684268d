"""Mapped files that are cut, beside other handlers of SIGBUS, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from expertd_kernels.native.library import kernel_error

pytestmark = pytest.mark.skipif(bool(kernel_error()), reason=kernel_error() or "the library is there")

MAPPED = """
import ctypes, faulthandler, mmap, signal, sys
from expertd_kernels.native.guard import guard
libc = ctypes.CDLL(None)
file = open(sys.argv[1], "w+b")
def mapped():
    file.truncate(8192)
    return mmap.mmap(file.fileno(), 8192)
def cut():
    file.truncate(0)
"""


def ended(tmp_path, code):
    """(exit code, output, errors) of a program that begins with MAPPED."""
    run = [sys.executable, "-c", MAPPED + textwrap.dedent(code), str(tmp_path / "file")]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_guarded_mapping_turns_into_zeros(tmp_path):
    code = """
        ours, other = mapped(), mmap.mmap(-1, 4096)
        lost, sound = guard(ours), guard(other)
        cut()
        print(ours[5000], lost(), sound())
    """
    assert ended(tmp_path, code)[:2] == (0, "0 True False\n")


@pytest.mark.parametrize(
    "others",
    ["", "faulthandler.enable()", "faulthandler.enable(); guard(mmap.mmap(-1, 4096))"],
    ids=["none", "a handler over ours", "a handler between"],
)
def test_a_bus_error_elsewhere_ends_the_process_as_ever(tmp_path, others):
    """The guard takes the mappings it knows, and no other."""
    code = f"""
        ours, theirs = mmap.mmap(-1, 4096), mapped()
        lost = guard(ours)
        {others}
        assert not lost()
        cut()
        theirs[5000]
    """
    code, _, errors = ended(tmp_path, code)
    assert code == -7, errors
    assert errors.count("Bus error") == bool(others)


def test_a_handler_that_is_installed_later_leaves_the_guard_in_force(tmp_path):
    """faulthandler's, like LLVM's, restores the handler before it and raises the signal again, without an address."""
    code = """
        ours = mapped()
        lost = guard(ours)
        faulthandler.enable()
        cut()
        print(ours[5000], lost())
    """
    code, out, errors = ended(tmp_path, code)
    assert (code, out) == (0, "0 True\n"), errors


@pytest.mark.parametrize("look", ["guard(mmap.mmap(-1, 4096))", "lost()"])
def test_a_handler_that_is_taken_away_with_ours_is_replaced_at_the_next_look(tmp_path, look):
    """faulthandler.disable() restores what was in force before enable(), whoever came after."""
    code = f"""
        faulthandler.enable()
        ours = mapped()
        lost = guard(ours)
        faulthandler.disable()
        {look}
        cut()
        print(ours[5000], lost())
    """
    code, out, errors = ended(tmp_path, code)
    assert (code, out) == (0, "0 True\n"), errors


def test_a_handler_is_put_in_force_again_as_often_as_others_replace_it(tmp_path):
    code = """
        ours = mapped()
        lost = guard(ours)
        for n in range(100):
            faulthandler.enable() if n % 2 else faulthandler.disable()
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            assert not lost()
        cut()
        print(ours[5000], lost())
    """
    code, out, errors = ended(tmp_path, code)
    assert (code, out) == (0, "0 True\n"), errors


@pytest.mark.parametrize("sent", ["signal.raise_signal(7)", "import os; os.kill(os.getpid(), 7)"])
def test_a_signal_that_somebody_sends_ends_the_process(tmp_path, sent):
    code = f"""
        ours = mapped()
        lost = guard(ours)
        {sent}
    """
    assert ended(tmp_path, code)[0] == -7
