"""A server in this process, from its plan to its end: for `expertd serve`, for a test, for an actor of a cluster.

    host = Host(config)
    address = host.start()    plan, listen (health NOT_SERVING); layers are read, checked and warmed up on a thread
    host.ready()              SERVING
    host.residence.add(3)     more layers, or fewer, while it serves
    host.drain(30)            refuse what is new, answer what was taken
    host.close()

Every method may be called from any thread; no signal is handled, and nothing of the process is changed but the CPU
kernel's number of threads.  Several hosts live side by side, each with its own engine, streams and metrics.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

import expertd
from expertd.common.tables import print_sentence
from expertd.errors import TABLE
from expertd_kernels.native.memory import available_bytes
from expertd_kernels.oracle import table
from expertd_kernels.oracle.probe import installed_packages, packages_for
from expertd_kernels.packed.cache import PackedCache
from expertd_kernels.sources.source import ExpertSource, LayerInfo
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.boot.assignment import (
    Assigner,
    Assignment,
    BootError,
    WrongOptionError,
    files_state,
    open_source,
)
from expertd_server.boot.autotuning import Autotuning, settle_threads
from expertd_server.boot.compiling import KernelsAhead
from expertd_server.boot.joint import JointAssigner, Place, resolve_places
from expertd_server.boot.layers import Booted, Stopped
from expertd_server.boot.memory import (
    by_site,
    device_bytes,
    free_bytes,
    memory_text,
    plan_memory,
    planned_bytes,
    require_room,
)
from expertd_server.boot.prepare import Workshop
from expertd_server.boot.progress import Progress
from expertd_server.config.logs import fields
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address
from expertd_server.engine.admission import Limits, QueueLimits
from expertd_server.engine.core import CoreMissingError
from expertd_server.engine.engine import Engine
from expertd_server.engine.joined import JoinedSpace, Site
from expertd_server.engine.policy import Policy
from expertd_server.engine.report import BatchReport, Moves
from expertd_server.host.from_options import largest_message, require_free_ports, security_of
from expertd_server.residence.changes import Changes
from expertd_server.residence.follower import Follower
from expertd_server.residence.remembered import recall, remember
from expertd_server.residence.residence import FIRST, Residence
from expertd_server.service.service import Service
from expertd_server.transports.grpc.admin import AdminTransport
from expertd_server.transports.grpc.server import GrpcTransport
from expertd_server.transports.listening import listening
from expertd_server.transports.protocol import Transport
from expertd_server.transports.table import listeners
from expertd_server.updates.identity import identity_of
from expertd_server.updates.sources import alike, checkpoint_of
from expertd_server.updates.store import Served, Store
from expertd_server.updates.updates import Updates
from expertd_server.updates.versions import TENSORS, Version
from expertd_server.views.describe import Describer
from expertd_server.views.gpu_metrics import gpu_facts
from expertd_server.views.metrics import BackendFacts, Metrics
from expertd_server.views.metrics_http import MetricsHttp
from expertd_server.views.page import Page
from expertd_server.views.part_metrics import PartMetrics
from expertd_server.views.render import print_decisions
from expertd_server.views.traces import Traces, TracesMissingError

__all__ = ["Host"]

log = logging.getLogger(__name__)


class Host:
    """One server of a process, from its listeners and its plan to its end.

    console    prints messages for people; None: nowhere
    on_fault   called once, on the engine's thread, with the reason why nothing is computed any more: close the host
               then, and start another process where the reason says that the device is lost
    kernels    what compiles kernels beside it, where that was started before this module was imported

    address    where gRPC is served; metrics: this host's series; metrics_address: where Prometheus reads them
    residence  what it holds
    loaded     done when it is SERVING, or with the reason why it is not: BootError, or Stopped after close()
    fault      what on_fault was told, "" = none
    """

    def __init__(
        self,
        config: ServeConfig,
        console: Console | None = None,
        on_fault: Callable[[str], None] = lambda why: None,
        kernels: KernelsAhead | None = None,
    ) -> None:
        self.config = config
        self.address = ""
        self.metrics_address = ""
        self.fault = ""
        self.metrics = Metrics(each_expert=config.expert_metrics)
        self.loaded: Future[None] = Future()
        self._logs_facts = config.log_format == "json"
        self._console = console or Console(quiet=True)
        self._on_fault = on_fault
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._http: MetricsHttp | None = None
        self._transports: list[Transport] = []
        self._admin: AdminTransport | None = None
        self._traces: Traces | None = None
        self._follower: Follower | None = None
        self._loader: threading.Thread | None = None
        self._kernels = kernels
        self._epoch = 0

    @property
    def device(self) -> torch.device:
        """Where it computes, the first of several; after start()."""
        return self._places[0].device

    @property
    def devices(self) -> list[torch.device]:
        """All on which it computes; after start()."""
        return list(dict.fromkeys(p.device for p in self._places))

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Plan, listen, and begin to load.  Returns the address.  Raises BootError."""
        kernels = self._kernels = self._kernels or KernelsAhead(self.config.device)
        try:
            return self._start(kernels)
        except BaseException:
            kernels.close()
            raise

    def _start(self, kernels: KernelsAhead) -> str:
        config = self.config
        self._security = security_of(config)
        require_free_ports(config)
        places = self._places = resolve_places(config)
        # devices that share a layer are given their parts of it by the host
        where = torch.device("cpu") if config.joins else places[0].device
        source = open_source(config, places[0].device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self._traces = self._make_traces()
        space = self._make_space(places) if config.joins else None
        self.engine = self._make_engine(where, space)
        store = Store(config.held, config.layer_template)
        served = store.recall(source.fingerprint)
        self._workshop = self._make_workshop(source, where, space)
        with self._workshop.stage("plan"):
            if not config.joins:
                self._compile_early(source, places[0], kernels)
            assigner = self._assigner(source, places)
            if served is None:
                served = Served(Version(FIRST, identity=_identity_of(source)), FIRST, source.fingerprint)
            else:
                assigner, served = self._committed_weights(store, served, source, assigner)
            assignments = self._assignments(assigner, source.fingerprint)
        oracle = Autotuning.of(config, where, assignments)
        if oracle is not None:
            assignments = [oracle.apply(a) for a in assignments]
        kernels.give(assignments, where, config.max_tokens, config.warm_routes, self.say)
        self._tell_decisions(assignments, pending=oracle is not None)
        self._require_served(assignments)
        self._require_room(assignments)
        self.residence = Residence(config, assigner, self._workshop, self.engine, oracle, self._changed)
        if config.move_rate:
            self._follower = Follower(self.residence, config.devices, config.move_rate)
        self._changes = Changes(self.residence, self._committed)
        self._changes.epoch = self._epoch
        self._updates = Updates(config, self.residence, source, store, self.metrics.updates, served)
        self.residence.version = self._updates.version.number
        infos = [a.info for a in assignments] or [source.info(source.layers[0])]
        try:
            self._make_service(source, infos)
            self._listen(source.fingerprint)
        except BaseException:
            self.close()
            raise
        self._loader = threading.Thread(target=self._boot, args=(assignments,), name="expertd-load", daemon=True)
        self._loader.start()
        return self.address

    def ready(self, timeout_s: float | None = None) -> None:
        """Wait until it is SERVING.  Raises BootError; Stopped if it was closed before; TimeoutError."""
        self.loaded.result(timeout_s)

    def drain(self, grace_s: float) -> bool:
        """Refuse new requests, finish those taken, stop listening.  False: grace_s was over before everything was
        answered."""
        until_s = time.monotonic() + grace_s
        self.service.drain()
        answered = [t.drain(until_s) for t in self._transports]
        done = all(answered)
        if self._follower is not None:
            self._follower.close()
        self.engine.stop(max(0.1, until_s - time.monotonic()) if done else 0.1)
        return done

    def close(self) -> None:
        """End it at once, whatever is under way: what waits is answered with DRAINING.  While it loads, the layer that
        is being made is finished first, but its measuring (--oracle measure) ends with the call under way: a
        thread that computes must not be left behind."""
        self._closing.set()
        with self._lock:
            transports, self._transports = self._transports, []
            http, self._http = self._http, None
            admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()
        if self.address:
            self._updates.close()
            self._changes.close()
        if self._follower is not None:
            self._follower.close()
        for t in transports:
            t.close()
        if http is not None:
            http.close()
        if self._kernels is not None:
            self._kernels.close()
        if self._loader is not None:
            self._loader.join()
        if self.address:
            self.engine.stop(0.1)
            self.service.close()
        if self._traces is not None:
            self._traces.close()

    def say(self, text: str, **facts: Any) -> None:
        """Tell people, or the log where it is for programs, which get the facts by themselves, too."""
        print_sentence(self._console, text)
        self._console.file.flush()
        if self._logs_facts:
            log.info("%s", text, extra=fields(**facts))

    # ---- on the thread that loads ------------------------------------------------------------------------------------

    def _boot(self, assignments: Sequence[Assignment]) -> None:
        try:
            settle_threads(self.config, assignments, lambda text: self.say(f"cpu kernel: {text}"))
            with Progress(self._console, len(assignments), self._workshop, self.say) as progress:
                self.residence.boot(assignments, progress.done, self._closing.is_set)
            changed = [
                b.assignment
                for b, a in zip(self.residence.booted.values(), assignments, strict=True)
                if b.assignment.decision != a.decision
            ]
            self._tell_decisions(changed)
            self.metrics.booted(self._workshop.seconds, self._workshop.lookups)
            with self._lock:
                if self._closing.is_set():
                    raise Stopped("closed while loading")
                self.engine.start()
                self.service.open(self._describe)
                for t in self._transports:
                    t.open()
                if self._follower is not None:
                    self._follower.start()
        except BaseException as e:
            self.loaded.set_exception(e)
        else:
            self.loaded.set_result(None)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _assigner(self, source: ExpertSource, places: Sequence[Place]) -> Assigner:
        """Raises BootError."""
        if not self.config.joins:
            kind = places[0].kind
            return Assigner(self.config, source, kind, packages_for(kind, table.BACKENDS, self.config.cache))
        assigner = JointAssigner(self.config, source, places)
        assigner.settle([free_bytes(p.device) for p in places])
        self.say(f"experts of each layer: {assigner.shares_text()}")
        return assigner

    def _make_space(self, places: Sequence[Place]) -> JoinedSpace:
        sites = [Site.of(p.name, p.device, p.node) for p in places]
        try:
            return JoinedSpace(sites, COMPUTE_DTYPE[self.config.compute], self.config.max_tokens)
        except CoreMissingError as e:
            raise BootError(str(e)) from None

    def _make_engine(self, where: torch.device, space: JoinedSpace | None) -> Engine:
        config = self.config
        try:
            engine = Engine(
                where,
                compute_dtype=config.compute,
                policy=Policy(config.max_tokens, config.max_wait_us * 1000, config.patience),
                limits=QueueLimits(
                    config.max_queue_tokens,
                    config.max_queue_requests,
                    config.max_queue_routes,
                    config.max_queue_bytes,
                    config.refuse_late,
                ),
                nonfinite=config.nonfinite,
                observe=self._computed,
                answered=self._answered,
                traced=None if self._traces is None else self._traces.add,
                on_fault=self._faulted,
                trouble=self.metrics.trouble,
                warm_routes=None if where.type == "cpu" else config.warm_routes,
                space=space,
            )
        except CoreMissingError as e:
            raise BootError(str(e)) from None
        if engine.launches_why:
            self.say(f"engine: without CUDA graphs, one batch at a time: {engine.launches_why}")
        self.metrics.watch_load(engine.load)
        devices = [where] if space is None else space.accelerators
        if device := next((d for d in devices if d.type != "cpu"), None):
            self.metrics.watch_device(lambda: device_bytes(device))
        if device is not None and device.type == "cuda" and not torch.version.hip and config.metrics_listen is not None:
            self._watch_gpu(device)
        if space is not None:
            self.metrics.registry.register(PartMetrics([s.name for s in space.sites], space.times, self._moves))
        self.metrics.before_a_scrape(lambda: engine.delivery.report(scraped=True))
        return engine

    def _moves(self) -> Moves:
        return Moves() if self._follower is None else self._follower.moves

    def _watch_gpu(self, where: torch.device) -> None:
        uuid = str(torch.cuda.get_device_properties(where).uuid)
        facts = gpu_facts(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        if isinstance(facts, str):
            self.say(f"note: no GPU metrics: {facts}")
        else:
            self.metrics.registry.register(facts)

    def _make_traces(self) -> Traces | None:
        """Raises BootError."""
        if not self.config.traces:
            return None
        try:
            return Traces(self.metrics)
        except TracesMissingError as e:
            raise WrongOptionError(f"--traces yes: {e}") from None

    def _make_workshop(self, source: ExpertSource, where: torch.device, space: JoinedSpace | None) -> Workshop:
        config = self.config
        return Workshop(
            source,
            where,
            _cache(config),
            files_state(config) if config.cache else "",
            config.max_tokens,
            config.warm_routes,
            stream=self.engine.stream,
            alone=self.engine.between if where.type != "cpu" or space is not None else lambda work: work(),
            route_s=1e-6 * config.test_route_us if where.type == "cpu" else 0.0,
            parts_s=() if config.test_part_us is None else [1e-6 * us for us in config.test_part_us.counts],
            space=space,
            name=config.device,
            kernels=self._kernels,
        )

    def _compile_early(self, source: ExpertSource, place: Place, kernels: KernelsAhead) -> None:
        """Begin with the kernels of the backends that are likely to be chosen: the plan imports every package that is
        installed, which takes seconds on an accelerator, and seldom finds that one is broken."""
        config = self.config
        if not kernels.wanted:
            return
        with contextlib.suppress(Exception):  # the plan tells what is wrong
            assigner = Assigner(config, source, place.kind, installed_packages(table.BACKENDS))
            assignments = self._assignments(assigner, source.fingerprint, quiet=True)
            kernels.give(assignments, place.device, config.max_tokens, config.warm_routes)

    def _committed_weights(
        self, store: Store, served: Served, source: ExpertSource, assigner: Assigner
    ) -> tuple[Assigner, Served]:
        """Of the version that was committed last, served instead of the start's; and that version, with the identity of
        what is read now where it is read from a folder.  Raises BootError."""
        version, config = served.version, self.config
        held = {a.info.layer: a.held for a in self._assignments(assigner, source.fingerprint, quiet=True)}
        found = store.open(version, checkpoint_of(source), held)
        if version.source != TENSORS:
            read = source if found is None else cast("ExpertSource", found)
            served = replace(served, version=replace(version, identity=_identity_of(read)))
        if found is None:
            return assigner, served
        self.say(f"serving version {version.number} of the weights, which was committed last: {found.root}")
        first = source.info(next(iter(held)))
        made = alike(found, first.layer, first)
        files = files_state(replace(config, checkpoint=found.root)) if config.cache else ""
        self._workshop = replace(self._workshop, source=made, files=files)
        return assigner.of(made), served

    def _make_service(self, source: ExpertSource, infos: Sequence[LayerInfo]) -> None:
        config = self.config
        largest = largest_message(config, infos)
        limits = Limits(
            config.max_tokens, largest, config.max_in_flight, max_half_sent_bytes=config.max_half_sent_bytes
        )
        self.service = Service(self.engine, self.metrics, limits)
        self.service.traced = None if self._traces is None else self._traces.add
        for listener in listeners(config, self.service, infos):
            self._transports.append(listener)
            if listener.notice:
                self.say(listener.notice)
        self._describe = Describer(
            self.service.load_message,
            instance_id=uuid.uuid4().hex,
            version=expertd.__version__,
            family=source.family,
            fingerprint=source.fingerprint,
            hidden_size=infos[0].hidden_size,
            limits=limits,
            transports=[name for name, transport in self.service.offered.items() if not isinstance(transport, str)],
            memory_limit=config.memory_limit,
        )
        self._describe.placement_epoch = self._epoch

    def _listen(self, fingerprint: str) -> None:
        where = self.config.metrics_listen
        if where is not None:
            with listening("--metrics-listen", where):
                page = Page(self.metrics, self._describe)
                self._http = MetricsHttp(self.metrics, where.host, where.port, page)
            self.metrics_address = str(Address(where.host, self._http.port))
            at = f"http://{self.metrics_address}/metrics"
            self.say(f"metrics on {at} (status page: http://{self.metrics_address}/)", metrics=at)
        config = self.config
        if config.callers is not None and config.tls_cert is None and not config.listen.loopback:
            self.say("note: the tokens of clients are sent in plain text (--insecure)")
        grpc = GrpcTransport(self.service, config.listen, self._security)
        with listening("--listen", config.listen):
            self.address = grpc.start()
        self._transports.append(grpc)
        self.say(f"listening on {self.address}", address=self.address)
        if config.admin_listen is not None:
            self._admin = AdminTransport(
                self._changes,
                self._updates,
                self.metrics,
                fingerprint,
                config.admin_listen,
                self._security,
                self._serves,
            )
            with listening("--admin-listen", config.admin_listen):
                self._describe.admin_address = self._admin.start()
            self.say(f"AdminService on {self._describe.admin_address}")

    def _tell_decisions(self, assignments: Sequence[Assignment], pending: bool = False) -> None:
        """Which backend serves each layer.  pending: it is to be measured."""
        assignments = [part for a in assignments for part in a.each]
        print_decisions(self._console, assignments, pending)
        if not self._logs_facts or pending:
            return
        for a in assignments:
            chosen = None if a.decision.chosen is None else a.decision.chosen.name
            facts = {"backend": chosen, "chosen_by": a.chosen_by, "device": str(a.decision.problem.device)}
            text = f"layer {a.info.layer}: {a.decision.problem.scheme_name} on backend {chosen}"
            log.info("%s", text, extra=fields(layer=a.info.layer, scheme=a.decision.problem.scheme_name, **facts))

    def _require_served(self, assignments: Sequence[Assignment]) -> None:
        """Raises BootError where a layer has no backend."""
        refused = next((part for a in assignments for part in (*a.each, a) if part.decision.chosen is None), None)
        if refused is None:
            return
        d = refused.decision
        what = "no backend serves" if not d.pinned else f"--backend {self.config.backend} does not serve"
        raise WrongOptionError(
            f"{what} layer {refused.info.layer}, {d.problem.scheme_name} on {d.problem.device}: the table says why"
        )

    def _require_room(self, assignments: Sequence[Assignment]) -> None:
        """Show the plan of memory.  Raises BootError where it does not fit."""
        if not assignments:
            return
        devices = {p.name: p.device for p in self._places}
        for name, own, these in by_site(self.config, assignments):
            plan, free = plan_memory(own, these), free_bytes(devices[name])
            for line in memory_text(plan, free):
                self.say(f"{name}: {line}" if self.config.joins else line)
            require_room(plan, own, these, free, available_bytes())

    def _changed(self, booted: Mapping[int, Booted], leaving: Mapping[int, Collection[int]]) -> None:
        """The residence holds this now, and does not tell of `leaving`."""
        self.metrics.hold([_facts(b) for b in booted.values()])
        if self.residence.memory is not None:
            self.metrics.plan(planned_bytes(self.residence.memory))
        self._describe.versions = self._updates.messages()
        self.metrics.updates.serve({n: self.residence.version_of(n) for n in booted})
        devices = dict.fromkeys(w.device for w in self._workshop.each)
        self._describe.update(list(booted.values()), self.residence.memory, tuple(devices), leaving)

        if self.config.held is not None and not leaving and self.loaded.done():
            self._remember(self.config.held, booted)

    def _committed(self, epoch: int) -> None:
        self._describe.placement_epoch = self._epoch = epoch

    def _assignments(self, assigner: Assigner, fingerprint: str, quiet: bool = False) -> list[Assignment]:
        """Of what was held last, where that is remembered; else of what the options say.  quiet: nobody is told."""
        found = None if self.config.held is None else recall(self.config.held, fingerprint)
        if found is None:
            return assigner.all()
        self._epoch, layers = found
        if not quiet:
            self.say(f"serving the experts of epoch {self._epoch}, as recorded in {self.config.held}")
        return assigner.these(layers)

    def _remember(self, path: Path, booted: Mapping[int, Booted]) -> None:
        layers = {n: tuple(b.assignment.held) for n, b in booted.items()}
        counts = {n: b.served.num_experts for n, b in booted.items()}
        try:
            remember(path, self._describe.fingerprint, self._epoch, layers, counts)
        except OSError as e:  # what is held is held all the same
            log.error("--held %s: cannot be written: %s; a restart will serve other experts", path, e)

    def _serves(self) -> bool:
        return self.loaded.done() and self.loaded.exception() is None

    def _computed(self, b: BatchReport) -> None:
        """Batches of a layer were."""
        self.metrics.batch(b)
        if self._follower is not None:
            self._follower.count(b)

    def _answered(self, reason: str, requests: int) -> None:
        """The engine has answered requests without a transport of ours."""
        code = TABLE[reason].code.name if reason else "OK"
        self.metrics.answered(code, reason, requests)
        if reason:
            self.service.refusals.tell_many(reason, "sessions in shared memory or over TCP", requests)

    def _faulted(self, why: str) -> None:
        self.fault = why
        self.metrics.serving(False)
        self._on_fault(why)


def _facts(b: Booted) -> BackendFacts:
    p = b.assignment.decision.problem
    return BackendFacts(
        b.served.layer,
        b.served.backend,
        p.scheme_name,
        p.activation_quant.value,
        str(p.device),
        b.assignment.chosen_by,
        b.from_cache,
    )


def _identity_of(source: ExpertSource) -> str:
    """Raises BootError."""
    try:
        return identity_of(source)
    except (ValueError, OSError) as e:
        raise BootError(str(e)) from e


def _cache(config: ServeConfig) -> PackedCache | None:
    """Raises BootError where the folder cannot be made."""
    if config.cache is None:
        return None
    try:
        config.cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise WrongOptionError(f"--cache {config.cache}: cannot be made: {e.strerror or e}; want a folder") from e
    return PackedCache(config.cache)
