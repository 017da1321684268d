"""Delta folders as slime's trainers write them (UpdateWeightFromDiskDelta): sent to servers without being applied here.

    <dir>/weight_v000007/model.safetensors.index.json    metadata: version, base_version, delta_encoding ("xor" or
                                                         "overwrite"), compression_format "zstd", checksum_format
    <dir>/weight_v000007/model-00000-of-00002.safetensors   a u8 tensor for each tensor that changed: its difference;
                                                         in the header's metadata the checksum of each new tensor

The difference says neither dtype nor shape, so those come from the checkpoint that the first version was made of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from expertd.errors import ChangeRefusedError
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights.updater import Updater

__all__ = ["Delta", "DeltaFolder", "publish_delta_folder"]

_KINDS = {"xor": pb.WEIGHT_DELTA_XOR, "overwrite": pb.WEIGHT_DELTA_OVERWRITE}
_CHECKSUMS = ("xxh3-128", "adler32")
"""Of those that slime writes, what servers check; blake3 is refused."""


class Delta(NamedTuple):
    """What changed of a tensor.  data: a zstd frame; kind: WeightDelta; checksum: as WeightPart.checksum."""

    name: str
    data: bytes
    kind: int
    checksum: str


class DeltaFolder:
    """One version.  Raises ChangeRefusedError where the folder is no such one, or OSError.

    version, base   its number, and the number of the version that it changes
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = json.loads((self.folder / "model.safetensors.index.json").read_bytes())
        facts = index.get("metadata", {})
        try:
            self.version, self.base = int(facts["version"]), int(facts["base_version"])
            self._kind = _KINDS[facts["delta_encoding"]]
        except (KeyError, ValueError) as e:
            raise ChangeRefusedError(
                f"{self.folder}: index metadata {facts}, want version, base_version and delta_encoding xor or overwrite"
            ) from e
        if facts.get("compression_format") != "zstd" or facts.get("checksum_format") not in _CHECKSUMS:
            raise ChangeRefusedError.about(
                f"{self.folder}: compression and checksums",
                got=f"{facts.get('compression_format')}, {facts.get('checksum_format')}",
                want=f"zstd, {' or '.join(_CHECKSUMS)}",
            )
        self._algorithm = facts["checksum_format"]
        self._files: dict[str, list[str]] = {}
        for name, file in index.get("weight_map", {}).items():
            if Path(file).name != file:
                raise ChangeRefusedError(f"{self.folder}: file {file!r}, want one in the folder")
            self._files.setdefault(file, []).append(name)

    def __iter__(self) -> Iterator[Delta]:
        """Tensors that changed, a file after another."""
        for file, names in self._files.items():
            with safe_open(str(self.folder / file), "numpy") as opened:
                checksums = opened.metadata() or {}
                for name in names:
                    if name not in checksums:
                        raise ChangeRefusedError(f"{self.folder / file}: {name} has no checksum, want one for each")
                    data = opened.get_tensor(name).tobytes()
                    yield Delta(name, data, self._kind, f"{self._algorithm}:{checksums[name]}")


def publish_delta_folder(updater: Updater, folder: str | Path, checkpoint: str | Path, first: int = 1) -> int:
    """Sends a delta folder to every server, and has them serve it.  Returns the number of the version there.

    checkpoint   folder of the model that version 0 of the deltas is, for dtypes and shapes
    first        number of the servers' version that is the deltas' version 0: delta v is version first + v.  A server
                 that serves another version than the delta's base refuses it
    """
    delta, headers = DeltaFolder(folder), _headers(Path(checkpoint))
    number = first + delta.version
    with updater.version(number, label=f"delta {delta.version}", base=first + delta.base, delta=True) as update:
        for one in delta:
            if one.name not in headers:
                raise ChangeRefusedError(f"{folder}: {one.name} is not in {checkpoint}")
            dtype, shape = headers[one.name]
            update.put_delta(one.name, dtype, shape, one.data, one.kind, one.checksum)
    return number


def _headers(checkpoint: Path) -> Mapping[str, tuple[str, list[int]]]:
    """(dtype, shape) of every tensor."""
    out = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(str(file), "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                out[name] = (part.get_dtype(), list(part.get_shape()))
    return out
