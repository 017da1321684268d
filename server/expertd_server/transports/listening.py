"""Addresses that an option names and that cannot be listened on."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from expertd_server.boot.assignment import BootError, WrongOptionError
from expertd_server.config.values import Address
from expertd_server.service.reloading import FileError

__all__ = ["listening"]


@contextlib.contextmanager
def listening(option: str, where: Address) -> Iterator[None]:
    """OSError and FileError become BootError, whose text names `option`.  WrongOptionError: an address that this host
    does not have, or may not listen on; a port that is in use may be free later."""
    try:
        yield
    except FileError as e:
        raise WrongOptionError(str(e)) from None
    except OSError as e:
        wrong = isinstance(e, socket.gaierror) or e.errno in (errno.EADDRNOTAVAIL, errno.EACCES)
        error = WrongOptionError if wrong else BootError
        raise error(f"{option} {where}: cannot listen there: {e.strerror or e}") from e
