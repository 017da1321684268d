"""Log lines of a server's process: for people, or one JSON object each for programs.  Standard library only.

    2026-11-22T14:03:07.412Z INFO expertd_server.host.host: text
    {"time": "2026-11-22T14:03:07.412Z", "level": "INFO", "logger": "expertd_server.host.host", "message": "text", ...}

Time is UTC.  What a program may want by itself stands in the record's `fields` (log.info(text, extra=fields(layer=3)))
and becomes keys of the object; the text says it, too.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timezone
from typing import Any, TextIO

__all__ = ["FORMATS", "LEVELS", "JsonFormatter", "TextFormatter", "configure", "fields"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_OURS = ("expertd", "expertd_kernels", "expertd_server")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def fields(**values: Any) -> dict[str, Any]:
    """`extra` of a log call.  values: what json writes."""
    return {"fields": values}


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send everything that is logged in this process to `stream`, or to what is standard error then.  level: of our own
    modules; others tell nothing below info."""
    number = getattr(logging, level.upper())
    handler = _ToStandardError() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 knows no argument
    """As it is when a line comes: a process that a server is part of may replace it, and close what it was."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """What the base class found."""


class TextFormatter(logging.Formatter):
    """One line, and the trace of an exception below it.  What a caller could have written makes no line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {_CONTROL.sub(_escaped, record.getMessage())}"
        return "\n".join([text, *_trace(self, record)])


class JsonFormatter(logging.Formatter):
    """One object, and nothing but it, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in getattr(record, "fields", {}).items():
            told.setdefault(key, value)
        if trace := _trace(self, record):
            told["trace"] = "\n".join(trace)
        return json.dumps(told, default=str)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return parts


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
