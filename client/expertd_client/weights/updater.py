"""New weights for all servers of a model, in two phases: every one is ready before any serves them.

    with Updater(servers) as updater:
        with updater.version(7) as update:      begun on every server
            update.put(name, tensor)            sent in buckets, packed there as layers are complete
                                                the end of the block: every server ready, then every one switched
        updater.rollback()

Whatever goes wrong before the switch leaves every server with the version that it serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar, cast

from expertd.errors import ChangeUnknownError, ExpertdError, UnavailableError, UpdateFailedError
from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as expert_pb
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.transports.credentials import Credentials
from expertd_client.weights.memory import TrainerSession, on_gpu
from expertd_client.weights.sampled import Sampled
from expertd_client.weights.server import WeightsServer
from expertd_client.weights.tensors import parts_of, raw_of

__all__ = ["ROLLING", "Update", "Updater"]

_T = TypeVar("_T")

BUCKET_BYTES = 16 << 20
"""Of tensors in a message: below the 64 MiB that servers take, and large beside what a message costs."""
ROLLING = {
    "no": pb.ROLLING_UPDATE_UNSPECIFIED,
    "allowed": pb.ROLLING_UPDATE_ALLOWED,
    "always": pb.ROLLING_UPDATE_REQUIRED,
}
"""Whether layers are switched one by one; allowed: where no second version fits."""
_EXPERT = re.compile(r"layers\.(\d+)\..*?\.experts\.(\d+)\.")
_UNDER_WAY = 2
"""Messages to one server at once."""
_MEMORY_SHARE = 64
"""Bytes in a GPU's memory that are to a message as one that it has: so that layers are made while others are put."""


class Updater:
    """Servers of one model.  One update at a time; from one thread.

    bucket_bytes   of tensors in a message
    hashes         send a SHA-256 of each tensor, which servers check: what was damaged on its way is refused
    timeout_s      of each call to a server; packing takes as long as it takes
    lease_s        seconds without a call after which a server lets go of an update: a trainer that died
    rolling        of ROLLING: whether servers may switch layer after layer, where their memory holds no second version.
                   They do so together; afterwards there is no version to roll back to
    cuda_ipc       servers of this host read tensors in memory of an NVIDIA GPU where they lie, without hashes; those
                   may be overwritten when prepare() has returned, not before.  UnavailableError where a server does not
    """

    def __init__(
        self,
        servers: Sequence[str] | str,
        *,
        credentials: Credentials | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        hashes: bool = True,
        timeout_s: float = 60.0,
        lease_s: int = 60,
        cuda_ipc: bool = False,
        rolling: str = "no",
    ) -> None:
        addresses = [servers] if isinstance(servers, str) else list(servers)
        if not addresses or len(set(addresses)) < len(addresses):
            raise ValueError(f"servers: got {addresses}, want at least one address, each once")
        if rolling not in ROLLING:
            raise ValueError(f"rolling: got {rolling!r}, want {', '.join(ROLLING)}")
        self.servers = [WeightsServer(address, credentials, timeout_s) for address in addresses]
        self._bucket_bytes, self._hashes, self._lease_s, self._cuda_ipc = bucket_bytes, hashes, lease_s, cuda_ipc
        self._rolling = ROLLING[rolling]
        self._pool = ThreadPoolExecutor(_UNDER_WAY * len(addresses), "expertd-updater")

    def versions(self) -> dict[str, list[expert_pb.WeightVersion]]:
        """Held by each server, the one that it serves first.  Raises UpdateFailedError where one does not answer."""
        return {a: list(answer.versions) for a, answer in self._status().items()}

    def plan(self) -> dict[str, pb.BeginUpdateResponse]:
        """By server, what an update would take and give up there.  Raises UpdateFailedError where one has no room."""
        return self.each("begin", lambda s: s.begin("", dry_run=True, rolling=self._rolling))

    @contextlib.contextmanager
    def version(self, number: int = 0, *, label: str = "", base: int = 0, delta: bool = False) -> Iterator[Update]:
        """An update that is committed at the end of the block, and aborted where that raises.

        number   of the new version; 0 = one above the highest of all servers
        base     version that every server must serve now; 0 = not checked
        delta    tensors that are not put stay as they are in `base`, and Update.put_delta() may be called
        """
        update = self.begin(number, label=label, base=base, delta=delta)
        try:
            yield update
            update.prepare()
        except BaseException:
            update.abort()
            raise
        update.commit()

    def from_checkpoint(self, folder: str, number: int = 0, *, label: str = "") -> int:
        """Every server reads its experts from a folder on its own machine.  Returns the version's number."""
        update = self.begin(number, label=label, checkpoint=folder)
        try:
            update.prepare()
        except BaseException:
            update.abort()
            raise
        update.commit()
        return update.number

    def begin(
        self, number: int = 0, *, label: str = "", base: int = 0, checkpoint: str = "", delta: bool = False
    ) -> Update:
        """version() without the block: call prepare() and commit(), or abort()."""
        number = number or 1 + max(answer.highest_version for answer in self._status().values())
        name = f"update-{number}-{uuid.uuid4().hex[:12]}"
        update = Update(self, name, number)
        options: dict[str, Any] = {"label": label, "base": base, "checkpoint": checkpoint, "delta": delta}
        options["rolling"] = self._rolling
        try:
            host = host_id() if self._cuda_ipc and not checkpoint else ""
            begun = self.each("begin", lambda s: s.begin(name, number, lease_s=self._lease_s, host=host, **options))
            update.sampled = Sampled(begun.values(), delta)
            update.rolls = frozenset(address for address, answer in begun.items() if answer.rolling)
            if host:
                update.memory = TrainerSession(begun)
            update.held = self.each("describe", lambda s: s.held()) if not checkpoint else {}
        except BaseException:
            update.abort()
            raise
        return update

    def rollback(self, number: int = 0) -> int:
        """Every server serves the version before again, whose number this returns; number: it must be that one.  Raises
        UpdateFailedError where one does not hold it; then none has changed."""
        told = self.versions()
        held = {a: [v.number for v in versions] for a, versions in told.items()}
        wanted = number or next((v[1] for v in held.values() if len(v) > 1), 0)
        lacks = {
            a: ChangeUnknownError(
                f"{a}: got versions {v}, want {wanted or 'one before the served one'} among them"
                + "; the served one came layer by layer and has left none before it: publish the old checkpoint under a"
                " higher version" * told[a][0].rolling
            )
            for a, v in held.items()
            if not wanted or wanted not in v
        }
        if lacks:
            raise _failed("rollback", lacks)
        self.each("rollback", lambda s: s.rollback(wanted))
        return wanted

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for server in self.servers:
            server.close()

    def __enter__(self) -> Updater:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for updates -------------------------------------------------------------------------------------------------

    def each(
        self, what: str, work: Callable[[WeightsServer], _T], servers: Sequence[WeightsServer] | None = None
    ) -> dict[str, _T]:
        """work() for every server at once, by address.  Raises UpdateFailedError once all have ended, where one of them
        raised."""
        asked = self.servers if servers is None else servers
        begun = {s.address: self._pool.submit(work, s) for s in asked}
        done: dict[str, _T] = {}
        errors: dict[str, ExpertdError] = {}
        for address, future in begun.items():
            try:
                done[address] = future.result()
            except ExpertdError as error:
                errors[address] = error
        if errors:
            raise _failed(what, errors)
        return done

    def _status(self) -> dict[str, pb.GetUpdateResponse]:
        return self.each("status", lambda s: s.status())


class Update:
    """One update under way.

    name      of it at the servers; number: of the new version
    held      experts by layer that each server holds: tensors of others are not sent to it
    sent_bytes   of tensors, to all servers
    memory    where servers read a GPU's memory by themselves; None: they do not
    sampled   what the identity of the new version is made from
    rolls     addresses of servers that switch layer after layer
    """

    def __init__(self, updater: Updater, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.held: Mapping[str, Mapping[int, frozenset[int]]] = {}
        self.sent_bytes = 0
        self.memory: TrainerSession | None = None
        self.sampled = Sampled((), False)
        self.rolls: frozenset[str] = frozenset()
        self._updater = updater
        self._buckets: dict[str, list[pb.WeightPart]] = {s.address: [] for s in updater.servers}
        self._sizes = dict.fromkeys(self._buckets, 0)
        self._under_way: dict[str, list[Future[pb.PutWeightsResponse]]] = {s.address: [] for s in updater.servers}

    def put(self, name: str, tensor: Any) -> None:
        """A tensor under its name in the checkpoint: torch on any device, or numpy; one that is no expert's is left out
        by the servers.  Without cuda_ipc it may be overwritten when this returns.  Raises BadDtypeError, and
        UpdateFailedError where a server refused an earlier tensor."""
        self.sampled.put(name, tensor)
        takers = [s for s in self._updater.servers if self._takes(s.address, name)]
        if not takers:
            return
        if self.memory is not None and on_gpu(tensor):
            part, nbytes = self.memory.part(name, tensor)
            for server in takers:
                self._add(server, part, nbytes // _MEMORY_SHARE)
            return
        digest = hashlib.sha256(raw_of(name, tensor)[2].data).digest() if self._updater._hashes else b""
        for part in parts_of(name, tensor, self._updater._bucket_bytes, digest):
            for server in takers:
                self._add(server, part)

    def put_all(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Of a state_dict(), or of (name, tensor)."""
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for name, tensor in cast("Iterable[tuple[str, Any]]", pairs):
            self.put(name, tensor)

    def put_delta(
        self, name: str, dtype: str, shape: Sequence[int], data: bytes, kind: int, checksum: str = ""
    ) -> None:
        """What changed of a tensor since the base, as WeightPart.delta has it.  dtype: as safetensors names it."""
        part = pb.WeightPart(name=name, dtype=dtype, shape=shape, data=data, delta=kind, checksum=checksum)  # type: ignore[arg-type]
        self.sampled.put_delta(name, data)
        for server in self._updater.servers:
            if self._takes(server.address, name):
                self._add(server, part)

    def prepare(self) -> None:
        """Returns when every server is ready.  Raises UpdateFailedError: then abort()."""
        for server in self._updater.servers:
            self._send(server)
        for server in self._updater.servers:
            self._wait(server.address, 0)
        identity = self.sampled.identity()
        self._updater.each("prepare", lambda s: s.prepare(self.name, identity))
        self._close_memory()

    def commit(self) -> None:
        """Every server serves the new version.  Where one cannot, those that do are rolled back: no expert is then
        served of the new version alone.  Servers that roll come last: the others still compute the version before for
        them.  They cannot be rolled back; where one stops, call this again.  Raises UpdateFailedError."""
        whole = [s for s in self._updater.servers if s.address not in self.rolls]
        done: list[WeightsServer] = []
        try:
            for server in whole:
                self._commit_on(server)
                done.append(server)
        except ExpertdError as error:
            self._quietly(lambda s: s.abort(self.name), [s for s in self._updater.servers if s not in done])
            stay = self._quietly(lambda s: s.rollback(), done)
            raise _failed("commit", {whole[len(done)].address: error}, stay) from error
        self._roll([s for s in self._updater.servers if s.address in self.rolls])

    def _roll(self, servers: Sequence[WeightsServer]) -> None:
        """Each layer on all of these at once, or a cluster of them would wait for the slowest: a layer has no version
        but one."""
        if not servers:
            return
        layers = self._updater.each("describe", lambda s: s.held(), servers)
        for layer in sorted({n for held in layers.values() for n in held}):
            self._updater.each("commit", lambda s, to=layer: self._roll_on(s, to), servers)  # type: ignore[misc]
        self._updater.each("commit", self._roll_on, servers)

    def abort(self) -> None:
        """Every server lets go of it, as far as it can be reached; its lease ends it elsewhere."""
        for futures in self._under_way.values():
            for future in futures:
                future.cancel()
        self._quietly(lambda s: s.abort(self.name), self._updater.servers)
        self._close_memory()

    def _close_memory(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()

    def _commit_on(self, server: WeightsServer) -> None:
        """The answer may be lost, and the version served all the same."""
        try:
            server.commit(self.name)
        except UnavailableError:
            with contextlib.suppress(ExpertdError):
                if server.status().versions[0].number == self.number:
                    return
                server.commit(self.name)
                return
            raise

    def _roll_on(self, server: WeightsServer, through: int | None = None) -> None:
        """The answer may be lost, or the server started again with all layers of the new version."""
        try:
            server.roll(self.name, through)
        except (UnavailableError, ChangeUnknownError):
            with contextlib.suppress(ExpertdError):
                served = server.status().versions[0]
                if served.number != self.number or served.layers:
                    server.roll(self.name, through)
                return
            raise

    def _quietly(self, work: Callable[[WeightsServer], object], servers: Sequence[WeightsServer]) -> list[str]:
        """Servers for which it failed."""
        try:
            self._updater.each("", work, servers)
        except UpdateFailedError as error:
            return list(error.errors)
        return []

    def _takes(self, address: str, name: str) -> bool:
        found = _EXPERT.search(name)
        if found is None or address not in self.held:
            return True
        return int(found[2]) in self.held[address].get(int(found[1]), ())

    def _add(self, server: WeightsServer, part: pb.WeightPart, size: int = 0) -> None:
        """size: of a part without bytes, as if it had some."""
        at, size = server.address, size or len(part.data)
        if self._sizes[at] + size > self._updater._bucket_bytes:
            self._send(server)
        self._buckets[at].append(part)
        self._sizes[at] += size

    def _send(self, server: WeightsServer) -> None:
        at = server.address
        bucket, self._buckets[at] = self._buckets[at], []
        self.sent_bytes += sum(len(part.data) for part in bucket)
        self._sizes[at] = 0
        if bucket and self.memory is not None:
            self.memory.settle()
        if bucket:
            self._wait(at, _UNDER_WAY - 1)
            self._under_way[at].append(self._updater._pool.submit(server.put, self.name, bucket))

    def _wait(self, address: str, most: int) -> None:
        """Until at most so many messages to a server are under way.  Raises what one of them raised."""
        under_way = self._under_way[address]
        while len(under_way) > most:
            try:
                under_way.pop(0).result()
            except ExpertdError as error:
                raise _failed("put", {address: error}) from error


def _failed(what: str, errors: Mapping[str, ExpertdError], switched: Sequence[str] = ()) -> UpdateFailedError:
    said = "; ".join(error.message for error in errors.values())
    more = f" (and {', '.join(switched)} serve the new version: roll them back)" if switched else ""
    made = UpdateFailedError(f"{what}: {said}{more}")
    made.errors, made.switched = dict(errors), tuple(switched)
    return made
