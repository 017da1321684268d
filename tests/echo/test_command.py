"""expertd-echo: a wrong option, and a port in use, are one sentence each; help needs no extra."""

import socket
import subprocess
import sys

import pytest

from expertd_echo.command import main


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "expertd_echo", "--listen", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    said = f"expertd-echo: --listen {address}: cannot listen there: Address already in use\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--hidden-size", "-5"], "argument --hidden-size: got '-5', want a whole number from 1"),
        (["--experts", "0"], "argument --experts: got '0', want a whole number from 1"),
        (["--listen", "here"], "argument --listen: got 'here', want HOST:PORT"),
        (["--shard", "3/2"], "argument --shard: got '3/2', want RANK/COUNT"),
    ],
)
def test_an_option_that_is_none(words, want, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert want in capsys.readouterr().err
