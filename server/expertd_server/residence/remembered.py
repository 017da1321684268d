"""What a server holds, over its restarts: a file that every change renews, and that goes before the options.

It is a placement of one server (expertd.placement), so it says which model it is about.  There is none until something
is changed: until then the options say what is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from expertd.common.files import read_file
from expertd.errors import PlacementError, printable
from expertd.placement import MOST_BYTES, Placement, Server
from expertd_kernels.common.atomic_file import replacing
from expertd_server.boot.assignment import WrongOptionError

__all__ = ["recall", "remember"]

_HERE = "here"


def recall(path: Path, fingerprint: str) -> tuple[int, Mapping[int, tuple[int, ...]]] | None:
    """(epoch, experts by layer); None: there is no such file.  Raises WrongOptionError where it is about another
    model, or is not what it should be."""
    try:
        found = Placement.from_json(read_file(path, MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, PlacementError) as e:
        raise WrongOptionError(
            f"--held {path}: cannot be read: {e}; delete it, and the other options say what is held"
        ) from e
    if found.fingerprint != fingerprint or len(found.servers) != 1:
        got = f"the fingerprint {printable(found.fingerprint or 'none', 128)} and {len(found.servers)} servers"
        raise WrongOptionError(
            f"--held {path}: got {got}, want {fingerprint} and one: it is another model's; delete it, and the other"
            " options say what is held"
        )
    return found.epoch, found.servers[0].layers


def remember(
    path: Path,
    fingerprint: str,
    epoch: int,
    layers: Mapping[int, tuple[int, ...]],
    num_experts: Mapping[int, int],
) -> None:
    """Raises OSError."""
    placement = Placement((Server(_HERE, layers),), num_experts, epoch, fingerprint)
    with replacing(path) as file:
        file.write(placement.to_json().encode())
