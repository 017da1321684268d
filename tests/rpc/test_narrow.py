"""What commands print in a terminal of 80 columns: every table whole, no cell cut."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertctl.load.recording import Recording
from expertd.common.tables import VerdictRow, console, duration, print_sentence, print_table, print_verdicts

WIDTH = 80
SHARDED = str(Path(__file__).parents[1] / "fixtures" / "bf16-sharded-qwen3moe1l")


def on_a_terminal(*words, module="expertctl.cli"):
    """What a command shows on a terminal of WIDTH columns, less its colours; it must exit with 0."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.pop("COLUMNS", None)
        os.environ.update(TERM="xterm", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-m", module, *map(str, words)])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    shown = b""
    while True:
        try:
            piece = os.read(fd, 1 << 16)
        except OSError:  # the other side is gone
            break
        if not piece:
            break
        shown += piece
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (
            ["describe", "A"],
            ["experts held", "int4_g128", "silu_and_mul, activations none, backend chosen by --oracle order"],
        ),
        (["describe", "A", "--decisions"], ["error"]),
        (["forward", "A"], ["crc32"]),
        (["load", "A", "--requests", "50"], ["p99.9"]),
        (["load", "A", "--requests", "20", "--rate", "200"], ["lateness", "p99.9"]),
        (["load", "A", "--generate", "2"], ["slowest layer"]),
        (["bench", "path", "--tokens", "1", "--callers", "1", "--seconds", "0.05", "A"], ["bare p50", "of bare"]),
        (["simulate", "--calls", "500", "--experts", "32", "--servers", "64"], ["p99 ms ┃ extra work ┃ took s"]),
        (["strip", SHARDED, "TMP"], ["left out: 24 tensors of experts, "]),
        (["--help"], ["completion"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_nothing_is_cut(tiny_server, words, want, tmp_path):
    text = on_a_terminal(*({"A": tiny_server, "TMP": tmp_path / "out"}.get(word, word) for word in words))
    assert "…" not in text, text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH, text
    for part in want:
        assert part in text, text


@pytest.mark.parametrize(
    ("words", "want"),
    [(["explain"], ["deepgemm, humming, marlin"]), (["explain", "--all"], ["deepgemm"]),
     (["verify"], ["int4_g128", "tolerance"])],
    ids=lambda x: " ".join(x),
)  # fmt: skip
def test_nothing_is_cut_of_what_servers_say(words, want):
    text = on_a_terminal(
        *words, "--synthetic", "tiny:int4_g128", "--device", "cpu", module="expertd_server.commands.cli"
    )
    assert "…" not in text, text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH, text
    for part in want:
        assert part in text, text


def test_nothing_is_cut_of_what_quantize_says(tmp_path):
    text = on_a_terminal(
        "quantize", SHARDED, tmp_path / "out", "--scheme", "int4_g128", module="expertd_server.commands.cli"
    )
    assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH, text
    assert "8 experts of 1 layer in int4_g128" in " ".join(text.split())


def test_nothing_is_cut_of_what_is_recorded_and_sent_again(tiny_server, tmp_path):
    file = tmp_path / "r.npz"
    made(file)
    text = on_a_terminal("replay", file, tiny_server, "--speed", "10")
    assert max(len(line.rstrip()) for line in text.splitlines() if "\r" not in line) <= WIDTH, text
    assert re.search(r"^lateness │", text, re.M), text
    assert "answered  2 in" in text


def made(file):
    arrays = {"at_us": np.array([0, 1], np.int64), "layer": np.array([0, 1], np.int32)}
    sizes = {name: np.array([1, 1], np.int32) for name in ("tokens", "top_k")}
    Recording(**arrays, **sizes, topk_ids=np.array([3, 4], np.int32), fingerprint="", hidden_size=256,
              num_experts={0: 8, 1: 8}).save(file)  # fmt: skip


def test_sentences_leave_numbers_their_room(capsys):
    why = "runs on cuda, this is cpu:x86_64; package flashinfer-python>=0.7.2,<0.8 is not installed"
    rows = [
        VerdictRow(Text("cpu"), Text("chosen"), ["7", "25", "187", "2,868", "2.0e-03"]),
        VerdictRow(Text("flashinfer_cutlass"), Text(why), [""] * 5),
    ]
    columns = ["us at 1", "us at 8", "us at 64", "us at 512", "error"]
    print_verdicts(Console(width=200), rows, columns)
    assert re.search(r"flashinfer_cutlass │ runs .* installed +│", capsys.readouterr().out)
    print_verdicts(Console(width=WIDTH), rows, columns)
    text = capsys.readouterr().out
    assert "…" not in text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert re.search(r"cpu +│ chosen +│ +7 │ +25 │ +187 │ +2,868 │ 2.0e-03", text)
    assert "flashinfer_cutlass │ runs on cuda, this is cpu:x86_64; package" in text
    print_verdicts(Console(width=WIDTH), rows[1:], ())
    assert "verdict" in capsys.readouterr().out


def test_sentences_are_broken_between_words_on_a_terminal_alone(capsys):
    text = "word " * 40 + "end"
    print_sentence(Console(width=WIDTH, force_terminal=True), text)
    assert all(line.endswith(("word", "end")) for line in re.sub(r" +\n", "\n", capsys.readouterr().out).splitlines())
    print_sentence(Console(width=WIDTH), text)
    assert capsys.readouterr().out == text + "\n"


def test_a_title_that_is_wider_than_its_table_is_one_line_in_a_file(capsys):
    for width, terminal, want in ((80, True, 2), (80, False, 1), (200, True, 1)):
        table = Table("one", title="word " * 20 + "end", show_edge=False, pad_edge=False)
        print_table(Console(width=width, force_terminal=terminal, no_color=True), table)
        lines = [line for line in capsys.readouterr().out.splitlines() if "word" in line]
        assert len(lines) == want, lines


def test_a_table_that_does_not_fit_is_turned(capsys):
    table = Table(title="many", show_edge=False, pad_edge=False)
    for n in range(12):
        table.add_column(f"column {n}")
    for row in "abcdefghijkl":
        table.add_row(*(f"{row * 5}-{n}" for n in range(12)))
    print_table(Console(width=240), table)
    assert re.search(r"column 0 +┃ column 1 +┃", capsys.readouterr().out)
    print_table(Console(width=60), table)
    text = capsys.readouterr().out
    assert text.startswith("many")
    assert all(len(line) <= 60 for line in text.splitlines())
    for n in range(12):
        assert len(re.findall(rf"^column {n} +│ ", text, re.M)) == 3, text
        assert all(f"{row * 5}-{n}" in text for row in "abcdefghijkl")


def test_an_address_is_no_markup(capsys):
    address = "[fd00:1234:5678::17]:39311"
    table = Table("server", show_edge=False)
    table.add_row(address)
    print_table(console(), table)
    console().print(address)
    assert capsys.readouterr().out.count(address) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (412e-6, "412 us"), (999.6e-6, "1.00 ms"), (3.214e-3, "3.21 ms"), (9.996e-3, "10.0 ms"),
     (0.0442, "44.2 ms"), (0.1302, "130 ms"), (0.99961, "1.00 s"), (1.04, "1.04 s"), (123.4, "123 s")],
)  # fmt: skip
def test_durations_have_three_digits(seconds, text):
    assert duration(seconds) == text
