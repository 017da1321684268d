"""An update of the weights under way: what was asked for, what came of it, and how far it is."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor

from expertd.errors import ChangeRefusedError, ExpertdError, QueueFullError
from expertd.v1 import weights_service_pb2 as pb
from expertd_kernels.checkpoint import CheckpointError
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.received import Received
from expertd_server.boot.memory import MemoryPlan
from expertd_server.updates.memory import TrainerMemory
from expertd_server.updates.packing import Packing
from expertd_server.updates.rolling import Rollout
from expertd_server.updates.versions import Version

__all__ = ["Job", "UpdateRequest", "put_bytes", "put_memory", "word"]

_ENCODING = {
    pb.WEIGHT_DELTA_UNSPECIFIED: "",
    pb.WEIGHT_DELTA_XOR: "xor",
    pb.WEIGHT_DELTA_OVERWRITE: "overwrite",
}


@dataclass(frozen=True)
class UpdateRequest:
    """What an update is begun with, as in BeginUpdateRequest; version 0 = the next one, base 0 = not checked; delta:
    tensors are put as differences from the base, or not at all; rolling: whether layers may be switched one by one."""

    update: str
    version: int = 0
    label: str = ""
    base: int = 0
    checkpoint: str = ""
    lease_s: float = 60.0
    delta: bool = False
    rolling: pb.RollingUpdate = pb.ROLLING_UPDATE_UNSPECIFIED


@dataclass(eq=False)
class Job:
    """An update under way.

    received     tensors that are put; None: the server reads `folder`, whose files were as `files` says
    memories     of the trainer's GPU, that tensors are read from
    waiting_limit_bytes  of tensors that may wait to be packed; 0 = not known
    gives_up     the version that was let go of for it; 0 = none
    rolling      whether its layers are switched one after another; rollout: does that, None = it is not ready yet
    ended        set when every layer is ready, or with `error`
    """

    asked: UpdateRequest
    version: Version
    packing: Packing
    received: Received | None
    folder: Checkpoint | None
    files: str
    memory: MemoryPlan | None
    memories: TrainerMemory
    waiting_limit_bytes: int
    gives_up: int
    rolling: bool
    state: pb.UpdateState = pb.UPDATE_STATE_RECEIVING
    error: ExpertdError | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    lease: threading.Timer | None = None
    rollout: Rollout | None = None

    def end_lease(self) -> None:
        lease, self.lease = self.lease, None  # which has the job, and the job what was served when it began
        if lease is not None:
            lease.cancel()


def put_bytes(job: Job, p: pb.WeightPart) -> tuple[bool, int]:
    """(whether it is of an expert that is held, bytes).  Raises CheckpointError, OSError, QueueFullError."""
    assert job.received is not None
    data = p.data  # each time a copy
    _require_waiting_room(job, job.received, len(data))
    encoding = _ENCODING.get(p.delta, "unknown")
    shape = list(p.shape)
    mine = job.received.put(p.name, p.dtype, shape, p.offset, data, p.sha256, encoding, p.checksum)
    return mine, len(data)


def put_memory(job: Job, p: pb.WeightPart) -> tuple[bool, int]:
    """The same of a tensor that is read where it lies."""
    assert job.received is not None
    if p.data or p.offset or p.sha256 or p.delta or p.checksum:
        raise CheckpointError(f"{p.name}: lies in memory of a GPU: want no bytes, no hash and no difference of it")
    at, sizes = p.memory, [0]

    def where(nbytes: int) -> Tensor:
        sizes[0] = nbytes
        return job.memories.tensor(p.name, at.handle, at.offset, nbytes)

    return job.received.put_memory(p.name, p.dtype, list(p.shape), where), sizes[0]


def _require_waiting_room(job: Job, received: Received, nbytes: int) -> None:
    """Raises QueueFullError, or ChangeRefusedError where waiting would not help."""
    limit, waiting = job.waiting_limit_bytes, received.waiting_bytes
    if not limit or waiting + nbytes <= limit:
        return
    got = f"{waiting} bytes that wait for the rest of their layers, and {nbytes} more"
    if not received.ready and not job.packing.busy:
        raise ChangeRefusedError.about("tensors", got=got, want=f"at most {limit}", remedy="send layer after layer")
    raise QueueFullError.about(
        "tensors", got=got, want=f"at most {limit}", remedy="try again after retry_after_us", retry_after_us=200_000
    )


def word(state: pb.UpdateState) -> str:
    """For people."""
    return pb.UpdateState.Name(state).removeprefix("UPDATE_STATE_").lower()
