"""One change at a time of what a server holds, by name, in two phases: what AdminService does, without gRPC.

    job = changes.prepare("x", {3: range(8)})     a thread of its own reads, packs, checks and warms up
    job.done, job.layers, job.ended.is_set()      how far it is; job.error: why it failed
    changes.commit("x", epoch=4, linger_s=3)      or changes.abort("x")

The same name again is the same change: a caller that lost its connection asks again.  A change that nobody commits is
let go of after a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from expertd.errors import (
    ChangePendingError,
    ChangeRefusedError,
    ChangeUnknownError,
    ExpertdError,
    RequestCancelledError,
)
from expertd.v1 import admin_service_pb2 as admin_pb
from expertd_server.boot.assignment import BootError
from expertd_server.boot.layers import Stopped
from expertd_server.boot.memory import MemoryPlan
from expertd_server.residence.background import stand_back
from expertd_server.residence.residence import Change, Residence
from expertd_server.service.response import error_of

__all__ = ["Changes", "Job"]

_RELEASE_S = 60.0
"""How long a commit waits until no request uses any more what is held no more."""


@dataclass(eq=False)
class Job:
    """A change under way.

    layers, done   to be made, and made
    ended          set when it is ready, or failed with `error`
    memory         what the server takes with it beside what it serves
    """

    name: str
    wanted: Mapping[int, frozenset[int]]
    state: admin_pb.ChangeState = admin_pb.CHANGE_STATE_PREPARING
    layers: int = 0
    done: int = 0
    memory: MemoryPlan | None = None
    error: ExpertdError | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _change: Change | None = None
    _unwanted: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _timer: threading.Timer | None = None


class Changes:
    """From any thread.  epoch: of the last commit; committed: told it, before the change is held."""

    def __init__(self, residence: Residence, committed: Callable[[int], None] = lambda epoch: None) -> None:
        self._residence, self._committed = residence, committed
        self._lock = threading.RLock()
        self._job: Job | None = None
        self._last = ""
        self.epoch = 0
        self._closed = threading.Event()
        self._idle = threading.Condition(self._lock)

    @property
    def job(self) -> Job | None:
        """The change under way."""
        return self._job

    def room_for(self, wanted: Mapping[int, Collection[int]]) -> MemoryPlan | None:
        """The plan of memory with that change beside what is served.  Raises ChangeRefusedError."""
        try:
            return self._residence.room_for(wanted)
        except BootError as e:
            raise ChangeRefusedError(str(e)) from e

    def prepare(self, name: str, wanted: Mapping[int, Collection[int]], keep_s: float = 600.0) -> Job:
        """Begins to make a change ready, or finds it under way.  Raises ChangePendingError where there is another."""
        asked = {layer: frozenset(experts) for layer, experts in wanted.items()}
        with self._lock:
            if self._closed.is_set():
                raise RequestCancelledError("change: this server closes")
            job = self._job
            if job is not None and (job.name != name or job.wanted != asked):
                state = admin_pb.ChangeState.Name(job.state).removeprefix("CHANGE_STATE_").lower()
                what = f"change {name!r}" + " with other experts" * (job.name == name)
                raise ChangePendingError.about(
                    what, got=f"change {job.name!r}, {state}", want="none", remedy="commit or abort that one first"
                )
            if job is None:
                job = self._job = Job(name, asked)
                job._thread = threading.Thread(
                    target=self._prepare, args=(job, keep_s), name="expertd-change", daemon=True
                )
                job._thread.start()
        return job

    def commit(self, name: str, epoch: int = 0, linger_s: float = 0.0) -> None:
        """Holds it.  Once more does nothing.  Raises ChangeUnknownError."""
        with self._lock:
            job = self._job
            if job is None or job.name != name:
                if name == self._last:
                    return
                got = "none" if job is None else f"change {job.name!r}"
                raise ChangeUnknownError.about(f"change {name!r}", got=got, want="it", remedy="prepare it again")
            if job.state != admin_pb.CHANGE_STATE_PREPARED or job._change is None:
                raise ChangePendingError(f"change {name!r}: is being prepared or committed; want that done first")
            job.state = admin_pb.CHANGE_STATE_COMMITTING
            if job._timer is not None:
                job._timer.cancel()
        try:
            self.epoch = epoch or self.epoch
            self._committed(self.epoch)
            self._residence.commit(job._change, linger_s, _RELEASE_S, self._closed.wait)
            self._last = name
        except TimeoutError as e:
            self._last = name  # it is held; what is left of the old memory goes with its last request
            raise ChangePendingError(str(e)) from e
        finally:
            with self._idle:
                self._job = None
                self._idle.notify_all()

    def abort(self, name: str) -> None:
        """Lets go of it; returns when its memory is free.  Raises ChangePendingError where it is being committed."""
        with self._lock:
            job = self._job
            if job is None or job.name != name:
                return
            if job.state == admin_pb.CHANGE_STATE_COMMITTING:
                raise ChangePendingError(f"change {name!r}: is being committed; want that done first")
            job._unwanted.set()
            if job._timer is not None:
                job._timer.cancel()
        if job._thread is not None:
            job._thread.join()
        if job._timer is not None and job._timer is not threading.current_thread():
            job._timer.cancel()
            job._timer.join()
        self._drop(job)

    def close(self) -> None:
        """Lets go of what is prepared, ends what is committed, and takes nothing more."""
        with self._idle:
            self._closed.set()
            job = self._job
            while self._job is not None and self._job.state == admin_pb.CHANGE_STATE_COMMITTING:
                self._idle.wait()
        if job is not None:
            self.abort(job.name)

    # ---- on the thread that prepares ---------------------------------------------------------------------------------

    def _prepare(self, job: Job, keep_s: float) -> None:
        stand_back()
        try:
            job.memory = self._residence.room_for(job.wanted)
            job._change = self._residence.prepare(job.wanted, lambda n, of: _count(job, n, of), job._unwanted.is_set)
        except (BootError, Stopped) as e:
            job.error = ChangeRefusedError(str(e) or f"change {job.name!r}: was aborted while it was prepared")
        except Exception as e:
            job.error = error_of(e, "preparing a change")
        with self._lock:
            if job.error is not None:
                self._job = None
            elif not job._unwanted.is_set():
                job.state = admin_pb.CHANGE_STATE_PREPARED
                job._timer = threading.Timer(keep_s, self.abort, (job.name,))
                job._timer.name, job._timer.daemon = "expertd-change-kept", True
                job._timer.start()
        job.ended.set()

    def _drop(self, job: Job) -> None:
        """Once, whoever asks for it."""
        with self._lock:
            change, job._change = job._change, None
            if self._job is job:
                self._job = None
        if change is not None:
            self._residence.abort(change)


def _count(job: Job, done: int, layers: int) -> None:
    job.done, job.layers = done, layers
