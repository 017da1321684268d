"""One update of the weights at a time, by name, in two phases: what WeightsService does, without gRPC.

    updates.begin("step-7", version=7)          its layers are made on a thread of their own, as they are complete
    updates.put("step-7", parts)                tensors, or parts of them
    job = updates.seal("step-7")                no tensor comes any more: job.ended is set when it is ready, or failed
    updates.commit("step-7")                    or updates.abort("step-7"); of a rolling update it only begins that
    updates.rollback()                          the version before again

Until commit() the version that was served goes on, whatever happens; what was made for an update that ends otherwise is
given back at once.  An update that nobody calls for the length of its lease is let go of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from expertd.errors import (
    ChangePendingError,
    ChangeRefusedError,
    ChangeUnknownError,
    ExpertdError,
    RequestCancelledError,
)
from expertd.v1 import expert_service_pb2 as expert_pb
from expertd.v1 import weights_service_pb2 as pb
from expertd_kernels.checkpoint import CheckpointError, open_checkpoint
from expertd_kernels.checkpoint.checkpoint import Checkpoint
from expertd_kernels.checkpoint.kept import open_kept
from expertd_kernels.checkpoint.received import Received
from expertd_kernels.native.memory import available_bytes
from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import Assignment, BootError, files_state
from expertd_server.boot.memory import MemoryPlan, free_bytes
from expertd_server.config.serve import ServeConfig
from expertd_server.engine.served import ServedLayer
from expertd_server.residence.residence import Residence, Room, Weights
from expertd_server.service.response import error_of
from expertd_server.updates.identity import identity_of, sampled_names
from expertd_server.updates.job import Job, UpdateRequest, put_bytes, put_memory, word
from expertd_server.updates.memory import TrainerMemory, memory_refusal, room_on
from expertd_server.updates.packing import Packing
from expertd_server.updates.rolling import LAST, Rollout
from expertd_server.updates.sources import GoneSource, alike, checkpoint_of
from expertd_server.updates.store import Served, Store
from expertd_server.updates.versions import CHECKPOINT, TENSORS, Version, version_message
from expertd_server.views.update_metrics import UpdateMetrics

# Why it is so: decision 168 in DECISIONS.md.
__all__ = ["Updates"]

log = logging.getLogger(__name__)

_ENDING_S = 10.0
"""How long a new update waits for the memory of one that has failed."""


class Updates:
    """From any thread.

    version      what is served; before: the version before it, None where it is not held
    last_error   why the last update that was not committed ended; "" = none since the last commit
    """

    def __init__(
        self,
        config: ServeConfig,
        residence: Residence,
        source: ExpertSource,
        store: Store,
        metrics: UpdateMetrics,
        served: Served,
    ) -> None:
        """source: of the start; served: at first."""
        self._config, self._residence, self._source = config, residence, source
        self._store, self._metrics = store, metrics
        self._checkpoint = checkpoint_of(source)
        self._lock = threading.RLock()
        self._job: Job | None = None
        self._committed = ""
        self._told_restart = False
        self._closed = False
        self._released = threading.Event()
        self._released.set()
        self.version, self._highest = served.version, served.highest
        self._before: Version | None = None
        self._others: dict[int, Version] = {}  # that layers are of while an update rolls, by number
        self.last_error = ""

    @property
    def job(self) -> Job | None:
        """The update under way."""
        return self._job

    @property
    def highest(self) -> int:
        """Number that a version was ever served under here."""
        return self._highest

    @property
    def before(self) -> Version | None:
        return None if self._residence.before is None else self._before

    def messages(self) -> list[expert_pb.WeightVersion]:
        """Versions held, the one that is served first."""
        known = {v.number: v for v in (*self._others.values(), self._before, self.version) if v is not None}
        booted, of = self._residence.booted, self._residence.version_of
        served = sorted({of(n) for n in booted} or {self.version.number}, reverse=True)
        out = []
        for number in served:
            layers = {n: b for n, b in booted.items() if of(n) == number}
            out.append(version_message(known[number], layers, serving=True, partly=len(served) > 1))
        weights, before = self._residence.before, self._before
        if weights is not None and before is not None:
            out.append(version_message(before, weights.booted, serving=False))
        return out

    # ---- one update --------------------------------------------------------------------------------------------------

    def room(self, rolling: pb.RollingUpdate = pb.ROLLING_UPDATE_UNSPECIFIED) -> tuple[Room, int]:
        """What there is for a new version beside those that are held, and the one that is let go of for it, 0 = none.
        Raises ChangeRefusedError."""
        try:
            room = self._residence.room_beside(rolling=rolling == pb.ROLLING_UPDATE_REQUIRED)
        except BootError as e:
            room = self._rolling_room(rolling, e)
        return room, 0 if room.before or self._before is None else self._before.number

    def _rolling_room(self, rolling: pb.RollingUpdate, whole: BootError) -> Room:
        """Where a whole version does not fit.  Raises ChangeRefusedError."""
        if rolling == pb.ROLLING_UPDATE_REQUIRED:
            raise ChangeRefusedError(f"one layer beside those that are served: {whole}") from whole
        why = f"a second version beside the one that is served: {whole}"
        try:
            room = self._residence.room_beside(rolling=True)
        except BootError as e:
            raise ChangeRefusedError(f"{why}; one layer beside those that are served: {e}") from e
        if rolling == pb.ROLLING_UPDATE_UNSPECIFIED:
            raise ChangeRefusedError(
                f"{why}; for one layer more there is room: allow a rolling update (expertctl update --rolling)"
            ) from whole
        return room

    def begin(self, asked: UpdateRequest) -> Job:
        """Raises ChangePendingError where another is under way, ChangeRefusedError where it cannot be."""
        ending = self._job
        if ending is not None and ending.error is not None:  # its clients know it, and its memory is not free yet
            ending.ended.wait(_ENDING_S)
        with self._lock:
            if self._closed:
                raise RequestCancelledError("update: this server closes")
            job = self._job
            if job is not None:
                if job.asked == asked:
                    self._renew(job)
                    return job
                raise ChangePendingError.about(
                    f"update {asked.update!r}",
                    got=f"update {job.asked.update!r}, {word(job.state)}",
                    want="none, or the same one with the same fields",
                    remedy="commit or abort that one first",
                )
            try:
                self._residence.claim(f"update {asked.update!r} of the weights is under way; commit or abort it first")
            except BootError as e:
                raise ChangePendingError(str(e)) from e
            try:
                self._check_numbers(asked)
                folder = self._folder(asked.checkpoint) if asked.checkpoint else None
                self._job = job = self._begun(asked, folder)
            except BaseException:
                self._residence.unclaim()
                raise
            self._renew(job)
            job.packing.start()
            if job.received is None:
                job.packing.wake()
        return job

    def _begun(self, asked: UpdateRequest, folder: Checkpoint | None) -> Job:
        booted = self._residence.booted
        if not booted:
            raise ChangeRefusedError("update: this server holds no layer; want some held first")
        self._released.wait()  # what the last commit replaced takes memory until then
        room, gives_up = self.room(asked.rolling)
        memory, rolling = room.plan, room.rolling
        received: Received | None = None
        files = ""
        version = Version(self._highest + 1, asked.label, TENSORS)
        if asked.version:
            version = replace(version, number=asked.version)
        version = replace(version, rolling=rolling)
        if folder is not None:
            files = files_state(replace(self._config, checkpoint=folder.root))
            take = _layers_of(folder, booted)
            version = replace(version, source=CHECKPOINT, folder=asked.checkpoint, identity=identity_of(folder))
        else:
            received = self._received(asked.delta, room)
            take = received.take
        if gives_up:
            self._residence.drop_before()  # which is what rollback() would serve: not before the update can be
        packing = Packing(self._residence, take, partial(self._keep, version), self._failed, rolling)
        memories = TrainerMemory(self._residence.weights.workshop.device)
        limit = self._waiting_limit(memory, rolling)
        return Job(asked, version, packing, received, folder, files, memory, memories, limit, gives_up, rolling)

    def _received(self, delta: bool, room: Room) -> Received:
        """Where tensors are put.  Raises ChangeRefusedError."""
        if self._checkpoint is None:
            raise ChangeRefusedError(
                "update: this server serves a synthetic model, which has no names of tensors; want --checkpoint, or"
                " a folder in BeginUpdateRequest.checkpoint"
            )
        if room.rolling:
            self._require_room_for_tensors(room.plan)
        booted = self._residence.booted
        base = self._base() if delta else None
        held = {n: b.assignment.held for n, b in booted.items()}
        exact = [n for n, b in booted.items() if not b.assignment.info.quantized]
        place = room_on(self._residence.weights.workshop.device)
        return Received(self._checkpoint, held, base, place, exact)

    def _require_room_for_tensors(self, plan: MemoryPlan | None) -> None:
        """Of a rolling update, for which nothing is given up.  Raises ChangeRefusedError."""
        if not self._store.keeps:
            raise ChangeRefusedError(
                "update: it has to roll, and this server has no --held, where tensors are kept until their layers are"
                " switched; want --held, or a folder (expertctl update --checkpoint DIR)"
            )
        limit = self._waiting_limit(plan, True)
        most = max(2 * _elements(b.assignment) for b in self._residence.booted.values())
        if 0 < limit < most:
            raise ChangeRefusedError.about(
                f"update: a layer's tensors take {most} bytes while they arrive",
                got=f"room for {limit}",
                want="room for them, or a folder (expertctl update --checkpoint DIR)",
            )

    def _keep(self, version: Version, layer: int, source: Checkpoint, held: Sequence[int]) -> None:
        """Write the tensors of a layer for a restart.  Raises BootError."""
        if version.source == TENSORS:
            try:
                self._store.keep(version.number, layer, source, held)
            except OSError as e:
                raise BootError(f"--held: tensors of layer {layer} cannot be kept for a restart: {e}") from e

    def _base(self) -> Checkpoint:
        """The tensors of the version that is served.  Raises ChangeRefusedError."""
        if self._residence.others:
            raise ChangeRefusedError("delta: layers are of several versions; want an update with all tensors")
        source = self._residence.weights.workshop.source
        found = None if isinstance(source, GoneSource) else checkpoint_of(source)
        if found is None:
            raise ChangeRefusedError(
                f"delta: version {self.version.number} came as tensors, which are not kept; want --held, which keeps"
                " them, or an update with all tensors"
            )
        return found

    def _check_numbers(self, asked: UpdateRequest) -> None:
        served = self.version.number
        if asked.delta and (asked.checkpoint or not asked.base):
            raise ChangeRefusedError(
                "delta: want `base`, and no checkpoint: differences are of the version that it names"
            )
        if asked.base and asked.base != served:
            raise ChangeRefusedError.about("base", got=asked.base, want=f"{served}, the version that is served")
        if asked.version and asked.version <= self._highest:
            want = f"more than {self._highest}, the highest here"
            raise ChangeRefusedError.about("version", got=asked.version, want=want)

    def _waiting_limit(self, memory: MemoryPlan | None, rolling: bool) -> int:
        """What is left beside two versions, or beside one and a layer; at least of a layer."""
        if memory is None:
            return 0
        if memory.kind != "cpu":  # pinned, so no more than a few layers where there is little
            most = max(4 * _elements(b.assignment) for b in self._residence.booted.values())
            return max(3 * most, available_bytes() // 2)
        free = free_bytes(self._residence.weights.workshop.device)
        held = self._residence.memory
        new = memory.weights - held.weights if rolling and held is not None else memory.weights // 2
        left = [free - new - memory.loading] if free else []
        left += [memory.limit - memory.peak] if memory.limit else []
        return max(1 << 20, min(left)) if left else 0

    def _folder(self, folder: str) -> Checkpoint:
        """A checkpoint with every layer that is held.  Raises ChangeRefusedError."""
        try:
            source = open_checkpoint(Path(folder), layer_template=self._config.layer_template)
        except (CheckpointError, OSError) as e:
            raise ChangeRefusedError(f"checkpoint: {e}") from e
        if source.family != self._source.family:
            raise ChangeRefusedError.about("checkpoint: family", got=source.family, want=self._source.family)
        lacks = sorted(set(self._residence.booted) - set(source.layers))
        if lacks:
            raise ChangeRefusedError(f"checkpoint: {folder}: layer {lacks[0]} has no experts there, and is served")
        return source

    def put(self, update: str, parts: Iterable[pb.WeightPart]) -> tuple[Job, int, int]:
        """(the update, bytes kept, bytes ignored).  Raises ChangeRefusedError for what is wrong with a tensor, and
        QueueFullError where too many wait to be packed."""
        job = self._of(update)
        received = job.received
        if received is None:
            raise ChangeRefusedError(f"update {update!r}: the server reads {job.asked.checkpoint}; want no tensors put")
        if job.state != pb.UPDATE_STATE_RECEIVING:
            raise ChangePendingError(f"update {update!r}: was prepared; want no tensors put any more")
        kept = ignored = 0
        for p in parts:
            try:
                mine, nbytes = put_memory(job, p) if p.HasField("memory") else put_bytes(job, p)
            except (CheckpointError, OSError) as e:  # also no memory for it
                raise ChangeRefusedError(f"update {update!r}: {e}") from e
            kept, ignored = (kept + nbytes, ignored) if mine else (kept, ignored + nbytes)
        if kept:
            self._metrics.put(kept)
            job.packing.wake()
        return job, kept, ignored

    def sampled(self) -> list[str]:
        """Names of the tensors that the identity of an update with tensors is made from."""
        return [] if self._checkpoint is None else sampled_names(self._checkpoint)

    def memory_refusal(self) -> str:
        """ "" where tensors may lie in memory of a GPU of this host, else why not."""
        return memory_refusal(self._residence.weights.workshop.device)

    def seal(self, update: str, identity: str = "") -> Job:
        """Nothing more is put.  job.ended is set when it is ready, or has failed.  identity: of the new version, where
        it comes as tensors.  Raises ChangeRefusedError where tensors are missing: the update is let go of."""
        job = self._of(update)
        with self._lock:
            if job.state != pb.UPDATE_STATE_RECEIVING:
                return job
            missing = [] if job.received is None else job.received.missing()
            if not missing:
                job.state = pb.UPDATE_STATE_PACKING
                if job.received is not None:
                    job.version = replace(job.version, identity=identity)
                if job.received is not None and job.asked.delta:
                    job.received.rest_of_base()
                    job.packing.wake()
                job.end_lease()
                threading.Thread(target=self._ready, args=(job,), name="expertd-update-ready", daemon=True).start()
                return job
        more = f" (and so for {len(missing) - 1} other layers)" if len(missing) > 1 else ""
        error = ChangeRefusedError(f"update {update!r}: {missing[0]}{more}")
        self._end(job, error)
        raise error

    def commit(self, update: str, through: int = LAST) -> Rollout | None:
        """Serves it.  Once more does nothing.  Of a rolling update: lets the layers up to the index `through` be
        served; the Rollout says when they are, None = all of them are.  Raises ChangeUnknownError."""
        with self._lock:
            if self._job is None and update == self._committed:
                return None
            job = self._of(update)
            if job.state not in (pb.UPDATE_STATE_READY, pb.UPDATE_STATE_COMMITTING):
                raise ChangePendingError(f"update {update!r}: is {word(job.state)}; want it ready: prepare it first")
            if job.rollout is not None:
                job.rollout.allow(through)
                job.rollout.start()  # where it stopped
                return job.rollout
            job.end_lease()
            weights = self._weights(job)
            try:
                self._remember(job.version)
            except OSError as e:
                self._renew(job)
                raise ChangeRefusedError(
                    f"--held: cannot be written, so a restart would serve the old version: {e}"
                ) from e
            self._job = None
            job.packing.booted = {}
            older = self._serve(job.version, weights)
            self._committed, self.last_error = update, ""
            self._residence.unclaim()
        self._release(older)
        self._tell_restart()
        self._metrics.ended("committed", job.packing.packing_s)
        return None

    def abort(self, update: str) -> None:
        """Lets go of it; returns when its memory is free.  Raises ChangePendingError where layers are being switched:
        what stopped in the middle can be let go of, and layers stay of the versions that they are of."""
        job = self._job
        if job is not None and job.asked.update == update:
            if job.state == pb.UPDATE_STATE_COMMITTING and job.rollout is not None and not job.rollout.failed:
                raise ChangePendingError(f"update {update!r}: is committing; it goes on, and cannot be let go of")
            self._end(job, ChangeRefusedError(f"update {update!r}: was aborted"), "aborted")

    def rollback(self, number: int = 0) -> Version:
        """Serves the version before again.  Raises ChangePendingError while an update is under way, ChangeUnknownError
        where the version is not held."""
        with self._lock:
            if number and number == self.version.number:
                return self.version
            weights, before = self._residence.before, self._before
            if weights is None or before is None or (number and number != before.number):
                got = "none" if weights is None or before is None else f"version {before.number}"
                if self.version.rolling:
                    got = f"version {self.version.number}, which came layer by layer and has left none before it"
                raise ChangeUnknownError.about(
                    f"version {number or 'before'}",
                    got=got,
                    want="one that is held",
                    remedy="publish the old checkpoint under a higher version: expertctl update --checkpoint DIR",
                )
            try:
                self._residence.claim("the version before is being served again")
            except BootError as e:
                raise ChangePendingError(str(e)) from e
            try:
                self._remember(before)
                self._serve(before, weights)
                self._committed = ""
            except OSError as e:
                raise ChangeRefusedError(
                    f"--held: cannot be written, so a restart would serve another version: {e}"
                ) from e
            finally:
                self._residence.unclaim()
        self._metrics.ended("rolled_back", 0.0)
        return self.version

    def close(self) -> None:
        """Lets go of what is under way, and takes nothing more."""
        with self._lock:
            self._closed = True
            job = self._job
        if job is not None:
            self._end(job, RequestCancelledError("update: this server closes"), "aborted")
        self._released.wait(1.0)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _of(self, update: str) -> Job:
        """The update under way, with its lease renewed.  Raises what became of it, or ChangeUnknownError."""
        with self._lock:
            job = self._job
            if job is not None and job.asked.update == update:
                if job.error is not None:
                    raise job.error
                self._renew(job)
                return job
            got = "none" if job is None else f"update {job.asked.update!r}"
            why = f" ({self.last_error})" if self.last_error and job is None else ""
            raise ChangeUnknownError.about(
                f"update {update!r}", got=got + why, want="it under way", remedy="begin it again"
            )

    def _renew(self, job: Job) -> None:
        job.end_lease()
        if job.state == pb.UPDATE_STATE_PACKING:
            return
        job.lease = threading.Timer(job.asked.lease_s, self._expired, (job,))
        job.lease.name, job.lease.daemon = "expertd-update-lease", True
        job.lease.start()

    def _expired(self, job: Job) -> None:
        """Nobody called about it.  What is half switched goes on, unless it cannot."""
        with self._lock:
            if job.lease is not threading.current_thread():
                return
            if job.state == pb.UPDATE_STATE_COMMITTING and job.rollout is not None and not job.rollout.failed:
                job.rollout.allow()
                return
        error = ChangeRefusedError(f"update {job.asked.update!r}: no call about it for {job.asked.lease_s:g} s")
        self._end(job, error)

    def _ready(self, job: Job) -> None:
        """Wait for the last layer.  On a thread of its own."""
        job.packing.ended.wait()
        job.memories.close()
        with self._lock:
            if self._job is not job or job.error is not None:
                return
            job.version = replace(job.version, ready_unix_ns=time.time_ns())
            try:
                job.rollout = self._rollout(job) if job.rolling else None
                job.state = pb.UPDATE_STATE_READY
                self._renew(job)
            except (CheckpointError, OSError) as e:
                unreadable: Exception | None = e
            else:
                unreadable = None
        if unreadable is not None:
            self._end(job, ChangeRefusedError(f"update {job.asked.update!r}: {unreadable}"))
            return
        if job.rollout is not None:
            job.rollout.start()  # the first layer is ready before somebody asks for it
        job.ended.set()

    def _failed(self, e: Exception) -> None:
        """On the thread that packs."""
        job = self._job
        if job is None:
            return
        why = f"update {job.asked.update!r}: {e}"
        self._end(job, ChangeRefusedError(why) if isinstance(e, BootError) else error_of(e, "an update of the weights"))

    def _end(self, job: Job, error: ExpertdError, outcome: str = "failed") -> None:
        """Without a commit, once."""
        with self._lock:
            if self._job is not job or job.error is not None:
                return
            job.error = error
            job.end_lease()
        job.packing.stop()
        if job.rollout is not None:
            job.rollout.stop()
        job.received = None
        job.memories.close()
        self._store.drop_but([self.version, *([] if self.before is None else [self.before])])
        with self._lock:
            if self._job is not job:  # its last layer was switched meanwhile
                return
            self._job = None
            self.last_error = error.message
            self._residence.unclaim()
        self._residence.give_back()
        log.warning("%s", error.message)
        self._metrics.ended(outcome, job.packing.packing_s)
        job.ended.set()

    def _weights(self, job: Job) -> Weights:
        """The new version as the residence holds it: with a source that later changes of experts read from."""
        served = self._residence.weights
        booted = MappingProxyType(dict(sorted(job.packing.booted.items())))
        first = next(iter(job.packing.done.values())).assignment.info
        source: ExpertSource
        workshop = served.workshop
        if job.folder is not None:
            source = alike(job.folder, first.layer, first)
            workshop = replace(workshop, source=source, files=job.files)
        else:
            why = (
                f"version {job.version.number} came as tensors, which are not kept after they are packed; after an"
                " update from a folder experts can be added and moved"
            )
            source = GoneSource(self._source, why)
            workshop = replace(workshop, source=source, cache=None)
            if self._store.keeps and self._checkpoint is not None:
                held = {n: m.assignment.held for n, m in job.packing.done.items()}
                kept = open_kept(self._store.folder(job.version.number), self._checkpoint, held)
                source = alike(kept, first.layer, first)
                workshop = replace(workshop, source=source)
        return Weights(served.assigner.of(source), workshop, booted, job.version.number)

    def _remember(self, version: Version) -> None:
        """A restart serves it from now on: so before anybody is answered by it.  Raises OSError."""
        highest = max(self._highest, version.number)
        self._store.commit(Served(version, highest, self._source.fingerprint))

    def _tell_restart(self) -> None:
        """Once, where a restart would serve other weights than those that were just committed."""
        if self._store.keeps or self._told_restart:
            return
        self._told_restart = True
        start = "the synthetic model" if self._config.checkpoint is None else f"--checkpoint {self._config.checkpoint}"
        log.warning(
            "version %d of the weights is served; without --held a restart serves %s again, as version 1",
            self.version.number,
            start,
        )

    def _serve(self, version: Version, weights: Weights) -> list[ServedLayer]:
        """Returns layers that nobody can ask for any more."""
        self.version, self._before = version, None if self._residence.others else self.version
        self._highest = max(self._highest, version.number)
        older = self._residence.switch(weights)
        self._others = {}
        self._store.drop_but([v for v in (self.version, self._before) if v is not None])
        return [] if older is None else [b.served for b in older.booted.values()]

    def _release(self, gone: list[ServedLayer]) -> None:
        """Of the version before the last: on a thread of its own, because requests may use it still, and whoever
        commits has other servers to commit."""
        if not gone:
            return
        self._released.clear()

        def release() -> None:
            try:
                self._residence.release(gone)
            finally:
                self._released.set()

        threading.Thread(target=release, name="expertd-update-release", daemon=True).start()

    # ---- a rolling update: on its thread -----------------------------------------------------------------------------

    def _rollout(self, job: Job) -> Rollout:
        """Raises CheckpointError, OSError."""
        return Rollout(
            self._residence,
            self._weights(job),
            job.packing.done,
            began=partial(self._began, job),
            failed=partial(self._stuck, job),
            ended=partial(self._rolled, job),
        )

    def _began(self, job: Job) -> None:
        """Before the first layer is switched: from now on a restart serves the new version, all layers of it.  Raises
        ChangeRefusedError, and then nothing has changed."""
        with self._lock:
            if job.folder is not None and job.files != files_state(replace(self._config, checkpoint=job.folder.root)):
                raise ChangeRefusedError(f"checkpoint: files in {job.asked.checkpoint} have changed; begin it again")
            try:
                self._remember(job.version)
            except OSError as e:
                raise ChangeRefusedError(
                    f"--held: cannot be written, so a restart would serve the old version: {e}"
                ) from e
            left = set(self._residence.others.values())
            self._others = {n: v for n, v in self._others.items() if n in left} | {self.version.number: self.version}
            self.version, self._before = job.version, None
            self._highest = max(self._highest, job.version.number)
            job.state = pb.UPDATE_STATE_COMMITTING

    def _stuck(self, job: Job, e: Exception) -> ExpertdError:
        """What a commit is told that stopped."""
        rollout = job.rollout
        assert rollout is not None
        why = f"update {job.asked.update!r}: {e}"
        if rollout.begun:
            why += f"; {rollout.switched} of {job.packing.layers} layers are switched: commit it again to go on"
        error = error_of(e, why) if not isinstance(e, (BootError, ChangeRefusedError, TimeoutError)) else None
        log.warning("%s", why)
        with self._lock:
            self.last_error = why
            self._renew(job)
        return error or ChangeRefusedError(why)

    def _rolled(self, job: Job) -> None:
        """Every layer is of the new version."""
        with self._lock:
            job.end_lease()
            self._job, self._others = None, {}
            self._committed, self.last_error = job.asked.update, ""
            self._store.drop_but([self.version])
            self._residence.unclaim()
        self._residence.give_back()
        self._tell_restart()
        seconds = 0.0 if job.rollout is None else job.rollout.seconds
        self._metrics.ended("committed", job.packing.packing_s + seconds)


def _layers_of(folder: Checkpoint, layers: Iterable[int]) -> Callable[[], tuple[int, Checkpoint] | None]:
    left = iter(list(layers))
    return lambda: next(((n, folder) for n in left), None)


def _elements(held: Assignment) -> int:
    """Weights of the experts that are held of a layer."""
    i = held.info
    return len(held.held) * (i.activation.segments + 1) * i.hidden_size * i.intermediate_size
