"""Lines of the log: what a person reads, and what a program reads."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings

import pytest

from expertd_server.config import logs

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def configured():
    """configured(level, form): what is logged from then on."""
    stream = io.StringIO()

    def configure(level: str, form: str) -> io.StringIO:
        logs.configure(level, form, stream)
        return stream

    return configure


def test_lines_go_to_what_is_standard_error_then(monkeypatch):
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure("info", "text")
    log = logging.getLogger("expertd_server.x")
    log.info("one")
    assert re.fullmatch(rf"{TIME} INFO expertd_server\.x: one\n", first.getvalue())
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    log.info("two")
    assert re.fullmatch(rf"{TIME} INFO expertd_server\.x: two\n", second.getvalue())


def test_a_line_has_its_time_and_is_one_line_whatever_stands_in_it(configured):
    out = configured("info", "text")
    logging.getLogger("expertd_server.x").info("a\nERROR forged: b\x1b[31m\u2028c")
    text = out.getvalue()
    assert re.fullmatch(rf"{TIME} INFO expertd_server\.x: a\\nERROR forged: b\\x1b\[31m\\u2028c\n", text), text


def test_a_trace_stands_below_its_line(configured):
    out = configured("info", "text")
    try:
        raise ValueError("here")
    except ValueError:
        logging.getLogger("expertd_server.x").exception("it failed")
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("ERROR expertd_server.x: it failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: here"


def test_each_line_of_json_is_an_object_with_its_fields(configured):
    out = configured("info", "json")
    log = logging.getLogger("expertd_server.x")
    log.info("layer %d\n", 3, extra=logs.fields(layer=3, error=1e-3, message="not this", other=object))
    try:
        raise ValueError("here")
    except ValueError:
        log.exception("it failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [t["level"] for t in told] == ["INFO", "ERROR", "WARNING"]
    assert all(re.fullmatch(TIME, t["time"]) for t in told)
    assert (told[0]["message"], told[0]["layer"], told[0]["error"]) == ("layer 3\n", 3, 1e-3)
    assert told[1]["trace"].endswith("ValueError: here")
    assert told[2]["logger"] == "py.warnings"


def test_the_level_is_that_of_our_modules(configured):
    out = configured("debug", "text")
    logging.getLogger("expertd_server.x").debug("ours")
    logging.getLogger("asyncio").debug("theirs")
    assert "ours" in out.getvalue()
    assert "theirs" not in out.getvalue()
    out = configured("error", "text")
    logging.getLogger("expertd_server.x").warning("too little")
    logging.getLogger("asyncio").warning("of others, too")
    assert "too" not in out.getvalue()


@pytest.mark.timeout(120)
def test_a_server_that_logs_json_says_nothing_else():
    """Its whole life, as a process: every fact of the boot is an object, and standard output stays empty."""
    command = [
        sys.executable,
        "-m",
        "expertd_server.commands.cli",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--log-format",
        "json",
    ]
    options = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--backend", "reference", "--threads", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as p:
        told = []
        assert p.stderr is not None
        for line in p.stderr:
            told.append(json.loads(line))
            if told[-1]["message"].startswith("serving on"):
                p.send_signal(signal.SIGTERM)
        assert p.wait(30) == 0
        assert p.stdout is not None
        assert p.stdout.read() == ""
    assert all(t["time"] and t["level"] and t["logger"].startswith("expertd") for t in told)
    assert next(t["address"] for t in told if "address" in t).startswith("127.0.0.1:")
    chosen = [t for t in told if "chosen_by" in t]
    assert [(t["layer"], t["backend"], t["chosen_by"]) for t in chosen] == [
        (0, "reference", "pin"),
        (1, "reference", "pin"),
    ]
    assert sorted(t["layer"] for t in told if "seconds" in t and "layer" in t) == [0, 1]
    assert told[-1]["message"].startswith("stopped: all")
