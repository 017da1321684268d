"""What a restart serves: the version that was committed last, and where its weights are.

Beside the file of --held stands a folder `<file>.weights`: `served.json` says which version is served; tensors that
came over the network lie in a folder for each version, as they came.  A version from a checkpoint's folder stays there.
Without --held nothing is kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from expertd.common.files import read_file
from expertd.errors import printable
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.kept import open_kept, write_layer
from expertd_kernels.common.atomic_file import replacing
from expertd_server.boot.assignment import WrongOptionError
from expertd_server.updates.versions import CHECKPOINT, MOST_NUMBER, START, TENSORS, Version

__all__ = ["Served", "Store"]

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Served:
    """highest: number that a version was ever served under here; fingerprint: of the model."""

    version: Version
    highest: int
    fingerprint: str


def _served(found: Any) -> Served:
    """Of the JSON in the file, which others may have written.  Raises ValueError, TypeError."""
    facts = _fields(found, Served)
    served = Served(**{**facts, "version": Version(**_fields(facts.get("version"), Version))})
    version = served.version
    for name, number in (
        ("number", version.number),
        ("ready_unix_ns", version.ready_unix_ns),
        ("highest", served.highest),
    ):
        if not 0 <= number <= MOST_NUMBER:
            raise ValueError(f"{name}: got {number}, want 0 to {MOST_NUMBER}")
    if version.source not in (START, TENSORS, CHECKPOINT):
        raise ValueError(f"source: got {version.source!r}, want {START}, {TENSORS} or {CHECKPOINT}")
    if not version.folder.isprintable():
        raise ValueError(f"folder: got {version.folder!r}, want no control characters")
    return served


def _fields(found: Any, of: type[Served] | type[Version]) -> dict[str, Any]:
    """Those of the class that are there, each of its type.  Raises ValueError."""
    if not isinstance(found, dict) or not set(found) <= {f.name for f in fields(of)}:
        raise ValueError(f"got {found!r:.80}, want an object with {', '.join(f.name for f in fields(of))}")
    for f in (f for f in fields(of) if f.name in found):
        kind = {"int": int, "str": str}.get(str(f.type), dict)
        if type(found[f.name]) is not kind:
            raise ValueError(f"{f.name}: got {found[f.name]!r:.80}, want {kind.__name__}")
    return found


class Store:
    """held: the file of --held; None: nothing is kept."""

    def __init__(self, held: Path | None, layer_template: str | None = None) -> None:
        self._root = None if held is None else held.with_name(held.name + ".weights")
        self._template = layer_template

    def recall(self, fingerprint: str) -> Served | None:
        """What was served last; None: nothing was ever committed.  Raises WrongOptionError."""
        if self._root is None:
            return None
        path = self._root / "served.json"
        try:
            served = _served(json.loads(read_file(path, _MOST_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as e:
            raise WrongOptionError(
                f"--held: {path}: cannot be read: {printable(str(e), 300)}; delete {self._root} to serve the start"
            ) from e
        if served.fingerprint != fingerprint:
            got = printable(served.fingerprint, 128)
            raise WrongOptionError(
                f"--held: {path}: got an update of model {got}, want one of {fingerprint}, which"
                " --checkpoint is; give --checkpoint the folder from before the update, which stays after it, or delete"
                f" {self._root} to serve another model than the other servers"
            )
        return served

    def open(self, version: Version, like: Checkpoint | None, held: Mapping[int, Collection[int]]) -> Checkpoint | None:
        """The weights of a version that was committed; None: those of the start.  Raises WrongOptionError."""
        if version.source == START:
            return None
        try:
            if version.source == CHECKPOINT:
                return open_checkpoint(Path(version.folder), layer_template=self._template)
            if like is None:
                raise CheckpointError("the model is synthetic")
            return open_kept(self.folder(version.number), like, held)
        except (CheckpointError, OSError) as e:
            raise WrongOptionError(
                f"--held: version {version.number} was committed last, and its weights cannot be read: {e}; delete"
                f" {self._root} to serve what --checkpoint says"
            ) from e

    @property
    def keeps(self) -> bool:
        """Whether tensors are kept after they are packed."""
        return self._root is not None

    def folder(self, number: int) -> Path:
        """Of a version's tensors."""
        assert self._root is not None
        return self._root / str(number)

    def keep(self, number: int, layer: int, source: Checkpoint, experts: Collection[int]) -> None:
        """Tensors of a layer of a version that is not committed yet.  Raises OSError where they cannot be written."""
        if self._root is not None:
            write_layer(self.folder(number), source.tensors(layer), experts)

    def commit(self, served: Served) -> None:
        """A restart serves this from now on.  Raises OSError, and then it serves what it did."""
        if self._root is None:
            return
        with replacing(self._root / "served.json") as file:
            facts = asdict(served)
            del facts["version"]["rolling"]  # which older servers do not know, and a restart has no use for
            file.write(json.dumps(facts).encode())

    def drop_but(self, versions: Collection[Version]) -> None:
        """Delete the tensors of all other versions; what cannot be deleted stays."""
        if self._root is None or not self._root.is_dir():
            return
        keep = {str(v.number) for v in versions if v.source == TENSORS}
        for folder in self._root.iterdir():
            if folder.is_dir() and folder.name.isdecimal() and folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)
