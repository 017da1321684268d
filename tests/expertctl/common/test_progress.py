"""A line that says how far a run is: on a terminal, and nowhere else."""

import io
import os
import pty
import subprocess
import sys

from expertctl.common.progress import Progress, told


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_calls_and_the_time_that_is_left():
    out, now_s = Terminal(), [100.0]
    with Progress("simulated", 4000, out, lambda: now_s[0]) as progress:
        progress(1)
        now_s[0] += 10
        for done in (1000, 1001):  # the second one comes too soon
            progress(done)
    shown = out.getvalue().split("\r")
    assert shown == [
        "",
        "simulated: 0 of 4,000 calls, 0 s\x1b[K",
        "simulated: 1,000 of 4,000 calls, 10 s, about 30 s left\x1b[K",
        "\x1b[K",
    ]


def test_a_pipe_sees_nothing():
    out = io.StringIO()
    with Progress("simulated", 4000, out) as progress:
        progress(1000)
    assert out.getvalue() == ""


def simulated(stderr):
    """Standard output of the command, which is the same wherever its progress goes."""
    words = ["simulate", "--servers", "4", "--experts", "8", "--calls", "200", "--json"]
    command = [sys.executable, "-m", "expertctl.cli", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=200, check=True)


def test_the_command_shows_it_on_a_terminal_alone():
    ours, its = pty.openpty()
    try:
        done = simulated(its)
        os.close(its)
        shown = b""
        while b"\x1b[K\r\x1b[K" not in shown:
            shown += os.read(ours, 4096)
    finally:
        os.close(ours)
    assert b"simulated: 0 of 200 calls" in shown
    assert done.stdout.startswith("{")
    assert simulated(subprocess.PIPE).stderr == ""


def test_parts_are_told_on_standard_error_as_they_are_done(capsys, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    found = told(iter((1, 2)), "two parts", lambda n: f"part {n}")
    assert next(found) == 1
    assert capsys.readouterr().err == "two parts\npart 1: done after 0 s\n"
    assert list(found) == [2]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "part 2: done after 0 s\n")
