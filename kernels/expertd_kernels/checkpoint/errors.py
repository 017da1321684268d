"""The one error of this package."""

from __future__ import annotations

__all__ = ["CheckpointError"]

_MOST = 2000
"""Characters: names of tensors stand in texts, and a file may say any."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read as it is.  The text names the tensor or file, what it has and what is wanted; on one
    line, cut, and with what a terminal or a log would obey escaped: most of it may be the checkpoint's own."""

    def __init__(self, text: str = "") -> None:
        if len(text) > _MOST:
            text = f"{text[: _MOST * 3 // 4]} [{len(text) - _MOST} characters left out] {text[-_MOST // 4 :]}"
        if not text.isprintable():
            text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
        super().__init__(text)
