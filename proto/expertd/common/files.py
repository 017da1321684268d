"""Files that others may have written: read whole, where they are files and not too large."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["named", "read_file"]


def read_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The bytes of a regular file.  Neither a pipe nor a device is waited for, and no more is read than may be there.
    Raises OSError, whose strerror says what is wrong."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(Path(path)))
        with open(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(Path(path)))
    return data


@contextlib.contextmanager
def named(data: bytes) -> Iterator[str]:
    """A path of these bytes, for a library that takes nothing else: what lies where they came from may be another file
    by now, or a pipe.  In memory, or where Linux is not, a file of this user's alone; gone after the body."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        handle = os.memfd_create("expertd", os.MFD_CLOEXEC)
        with open(handle, "wb") as memory:
            memory.write(data)
            memory.flush()
            yield f"/proc/self/fd/{handle}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name
