"""Versions of the weights: their numbers, where they came from, the digest of what is held of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from expertd.v1 import expert_service_pb2 as pb
from expertd_server.boot.assignment import Assignment

__all__ = ["CHECKPOINT", "MOST_NUMBER", "START", "TENSORS", "Digested", "Version", "digest_of", "version_message"]

START, TENSORS, CHECKPOINT = "start", "tensors", "checkpoint"
MOST_NUMBER = (1 << 63) - 1
"""Of a version: each has one that follows it."""


@dataclass(frozen=True)
class Version:
    """number: grows; label: for people; source: START, TENSORS or CHECKPOINT; folder: of the checkpoint, "" = none;
    identity: of the weights of all experts (expertd.common.identity), "" = not known; rolling: it came layer by layer,
    which a restart does not know any more."""

    number: int
    label: str = ""
    source: str = START
    folder: str = ""
    ready_unix_ns: int = field(default_factory=time.time_ns)
    identity: str = ""
    rolling: bool = False


class Digested(Protocol):
    """A layer with the digests of its experts' weights, in the order of assignment.held."""

    @property
    def assignment(self) -> Assignment: ...

    @property
    def digests(self) -> tuple[int, ...]: ...


def digest_of(layers: Mapping[int, Digested]) -> str:
    """SHA-256 in hex over (layer, expert id, digest of its weights) of experts held, ascending, i64 little-endian."""
    out = hashlib.sha256()
    for n, b in sorted(layers.items()):
        for expert, digest in sorted(zip(b.assignment.held, b.digests, strict=True)):
            out.update(np.array([n, expert, digest], "<i8").tobytes())
    return out.hexdigest()


def version_message(
    version: Version, layers: Mapping[int, Digested], serving: bool, partly: bool = False
) -> pb.WeightVersion:
    """layers: of it; partly: other versions compute the others."""
    return pb.WeightVersion(
        number=version.number,
        label=version.label,
        digest=digest_of(layers),
        ready_unix_ns=version.ready_unix_ns,
        serving=serving,
        source=version.source,
        identity=version.identity,
        rolling=version.rolling,
        layers=sorted(layers) if partly else (),
    )
