"""`expertd serve` as a process: a signal that comes before there is a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

_SIGNALLED_BEFORE_ITS_IMPORTS = """
    import os, sys
    from expertd.common import hostmem
    from expertd_server.commands.cli import main

    hostmem.tune_allocator = lambda: os.kill(os.getpid(), {number})
    sys.exit(main(["serve", "--synthetic", "tiny:int4_g128", "--device", "cpu", "--listen", "127.0.0.1:0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_torch_and_grpc_are_imported_ends_it_as_while_loading(number):
    code = textwrap.dedent(_SIGNALLED_BEFORE_ITS_IMPORTS.format(number=number.value))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "stopped while loading\n"
