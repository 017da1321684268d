"""Files that are there whole or not at all.  Ground floor: the standard library alone."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path, keep: bool = False) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the body ends well, and is gone when it does not.  Its folder is made;
    its mode is what the umask leaves, so that servers of other users may share it.  keep: one that is there by then
    stays, and this one is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as f:
            yield f
        if keep:
            _keeping(part, path)
        else:
            os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _keeping(part: Path, path: Path) -> None:
    """Give `part` the name `path`, unless there is such a file."""
    try:
        os.link(part, path)
    except FileExistsError:
        part.unlink()
    except OSError:  # a file system without links: the last one wins
        os.replace(part, path)
    else:
        part.unlink()
