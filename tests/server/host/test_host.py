"""Servers in this process: several at once, from any thread, and layers that come and go under load."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
import torch
from allocated import allocated, needs_mallinfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until, until_inside

from expertd.errors import InternalError, LayerNotHeldError
from expertd_client import ExpertClient
from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.measure import autotuning
from expertd_kernels.sources.synthetic import random_inputs
from expertd_server.boot.assignment import BootError, open_source
from expertd_server.boot.compiling import KernelsAhead
from expertd_server.boot.layers import Stopped
from expertd_server.config.serve import ServeConfig
from expertd_server.config.values import Address, Ranges, Shard
from expertd_server.host import host as host_module
from expertd_server.host.host import Host
from expertd_server.residence import residence

H, E, K = 256, 8, 2
HERE = Address("127.0.0.1", 0)
NO_LAYER = Ranges("none", ())
TINY = {"synthetic": "tiny:int4_g128", "device": "cpu", "backend": "reference", "listen": HERE, "threads": 1}


@pytest.fixture
def started():
    """started(**options): a Host that serves.  All are closed in the end, and leave no thread behind."""
    before = {t.name for t in threading.enumerate()}
    with ExitStack() as stack:

        def make(ready=True, **options) -> Host:
            host = Host(ServeConfig(**(TINY | options)))
            stack.callback(host.close)
            host.start()
            if ready:
                host.ready(60)
            return host

        yield make
    assert {t.name for t in threading.enumerate() if t.name.startswith("expertd")} <= before


@pytest.fixture(scope="module")
def weights():
    """The model's, by layer."""
    source = open_source(ServeConfig(**TINY))
    return {n: source.load(n, range(E)) for n in source.layers}


class Batch:
    """Inputs, and what the experts `held` make of them."""

    def __init__(self, layer: int, seed: int = 0, tokens: int = 5) -> None:
        self.layer = layer
        self.x, self.ids, self.w = random_inputs(tokens, H, E, K, seed=seed)

    def ask(self, client: ExpertClient):
        return client.forward(self.layer, self.x, self.ids, self.w)

    def routes(self, held) -> int:
        return int(torch.isin(self.ids, torch.tensor(sorted(held))).sum())

    def want(self, weights, held) -> torch.Tensor:
        slots = torch.where(torch.isin(self.ids, torch.tensor(sorted(held))), self.ids, -1).int()
        return reference(weights[self.layer], self.x, slots, self.w)

    def check(self, weights, answer, held) -> None:
        assert answer.routes_computed == self.routes(held)
        assert relative_error(torch.as_tensor(answer.output).float(), self.want(weights, held)) <= tolerance("bf16")


def serving(host: Host) -> list[str]:
    """Layers that the metrics say have a backend."""
    families = {m.name: m for m in host.metrics.registry.collect()}
    return sorted(s.labels["layer"] for s in families["expertd_backend_info"].samples)


def status(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


def test_a_checkpoint_that_is_not_there_is_named_with_its_option(tmp_path):
    with pytest.raises(BootError, match=f"--checkpoint {tmp_path / 'away'}: is no folder here; want one") as said:
        open_source(ServeConfig(checkpoint=tmp_path / "away"))
    assert said.value.exit_code == 2
    assert "--held" not in str(said.value)
    with pytest.raises(BootError, match="after an update --held needs the folder from before it"):
        open_source(ServeConfig(checkpoint=tmp_path / "away", held=tmp_path / "held.json"))


def test_a_whole_life_in_a_thread_that_is_not_the_main_one(weights):
    seen, before = {}, set(threading.enumerate())

    def live() -> None:
        host = Host(ServeConfig(**TINY))
        address = host.start()
        host.ready(60)
        seen["status"] = status(address)
        with ExpertClient(address) as client:
            batch = Batch(1)
            batch.check(weights, batch.ask(client), range(E))
            seen["layers"] = [layer.layer for layer in client.describe().layers]
        seen["drained"] = host.drain(10)
        host.close()
        host.close()

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(120)
    assert seen == {"status": health_pb2.HealthCheckResponse.SERVING, "layers": [0, 1], "drained": True}
    assert not [t for t in {*threading.enumerate()} - before if t.name.startswith("expertd")]


def test_two_hosts_of_one_process_hold_a_half_each(started, weights):
    hosts = [started(shard=Shard(rank, 2)) for rank in (0, 1)]
    faults: list[BaseException] = []

    def call(n: int) -> None:
        try:
            with ExpertClient(hosts[0].address) as a, ExpertClient(hosts[1].address) as b:
                for seed in range(20):
                    batch = Batch(seed % 2, seed=100 * n + seed)
                    parts = [batch.ask(a), batch.ask(b)]
                    batch.check(weights, parts[0], range(4))
                    batch.check(weights, parts[1], range(4, 8))
        except BaseException as e:
            faults.append(e)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(60)
    assert not faults
    assert hosts[0].drain(10)
    with ExpertClient(hosts[1].address) as client:
        batch = Batch(0)
        batch.check(weights, batch.ask(client), range(4, 8))
    counted, of = hosts[1].metrics.registry, {"layer": "0"}
    until(lambda: (counted.get_sample_value("expertd_tokens_total", of) or 0) >= 5 * 41)  # after the answer
    assert counted.get_sample_value("expertd_tokens_total", of) == 5 * 41, "and each counts its own"


def test_a_host_without_layers_serves_what_it_is_given_later(started, weights):
    host = started(expert_metrics=True, layers=NO_LAYER)
    assert status(host.address) == health_pb2.HealthCheckResponse.SERVING
    with ExpertClient(host.address) as client:
        batch = Batch(0)
        assert list(client.describe().layers) == []
        with pytest.raises(LayerNotHeldError, match="want one of those held here: none"):
            batch.ask(client)
        host.residence.add(0, experts=range(3))
        batch.check(weights, batch.ask(client), range(3))
        host.residence.add(0, 1, experts=range(2, 6))
        batch.check(weights, batch.ask(client), range(6))
        other = Batch(1)
        other.check(weights, other.ask(client), range(2, 6))
        described = {x.layer: [(r.first, r.count) for r in x.held] for x in client.describe().layers}
        assert described == {0: [(0, 6)], 1: [(2, 4)]}
        assert client.describe().memory.weights_bytes > 0
        host.residence.remove(0, experts=(0, 5, 7))
        batch.check(weights, batch.ask(client), range(1, 5))
        host.residence.remove(0, experts=range(E))
        with pytest.raises(LayerNotHeldError):
            batch.ask(client)
        assert serving(host) == ["1"]
        host.residence.add(0)
        batch.check(weights, batch.ask(client), range(E))
    assert serving(host) == ["0", "1"]
    routes, of = int((batch.ids == 7).sum()), {"layer": "0", "expert": "7"}
    until(lambda: host.metrics.registry.get_sample_value("expertd_expert_tokens_total", of))  # after the answer
    assert host.metrics.registry.get_sample_value("expertd_expert_tokens_total", of) == routes


def test_a_change_that_changes_nothing_loads_nothing(started, monkeypatch):
    host = started()
    monkeypatch.setattr(residence, "boot_layer", lambda *a, **k: pytest.fail("it loaded"))
    held = host.residence.booted
    host.residence.add(0, experts=(1, 2))
    host.residence.add(1)
    host.residence.remove(7)
    host.residence.remove(0, experts=(99,))
    assert host.residence.booted is held


def test_layers_come_and_go_under_load(started, weights):
    """Callers of a layer that stays see no error; those of one that goes get its answer or LAYER_NOT_HELD; whatever is
    answered is the sum over what was held at one moment."""
    host = started(backend="auto", layers=Ranges.parse("0"))
    stop, faults, counts = threading.Event(), [], {0: 0, 1: 0, "gone": 0}

    def call(layer: int, seed: int) -> None:
        batch = Batch(layer, seed)
        halves = [range(E)] if layer == 0 else [range(4), range(E)]
        try:
            with ExpertClient(host.address) as client:
                while not stop.is_set():
                    try:
                        answer = batch.ask(client)
                    except LayerNotHeldError:
                        assert layer == 1
                        counts["gone"] += 1
                        time.sleep(0.002)
                        continue
                    held = next(h for h in halves if batch.routes(h) == answer.routes_computed)
                    batch.check(weights, answer, held)
                    counts[layer] += 1
        except BaseException as e:
            faults.append(e)

    callers = [threading.Thread(target=call, args=(n % 2, n)) for n in range(4)]
    for t in callers:
        t.start()
    for _ in range(6):
        before, gone = counts[0], counts["gone"]
        host.residence.add(1, experts=range(4))
        host.residence.add(1)
        answered = counts[1]
        until(lambda answered=answered: faults or counts[1] > answered)
        host.residence.remove(1, timeout_s=30)
        until(lambda before=before, gone=gone: faults or (counts[0] > before and counts["gone"] > gone))
    stop.set()
    for t in callers:
        t.join(60)
    assert not faults
    assert counts[1] > 0
    assert host.engine.idle()


@needs_mallinfo
def test_memory_of_a_layer_that_is_removed_is_free(started, monkeypatch):
    """24 MiB packed, four times; without the garbage collector, which a server under load cannot wait for."""
    host = started(
        synthetic="qwen3-30b-a3b:int4_g128", layers=NO_LAYER, experts=Ranges.parse("0-9"), backend="auto", max_tokens=64
    )
    monkeypatch.setattr(residence, "_collect_garbage", lambda: pytest.fail("something refers to it"))
    kept = []
    gc.disable()
    try:
        for _ in range(4):
            host.residence.add(5)
            alive = weakref.ref(host.residence.booted[5].served.experts)
            with ExpertClient(host.address) as client:
                x, ids, w = random_inputs(4, 2048, 10, 8, seed=1)
                assert client.forward(5, x, ids, w).routes_computed == 32
            host.residence.remove(5)
            assert alive() is None
            kept.append(allocated())
    finally:
        gc.enable()
    assert kept[-1] - kept[0] < 12 << 20, "one layer would take twice that"


def test_what_a_request_uses_is_not_taken_away(started, weights):
    """Neither what is computed, nor what waits for it and was taken before the change."""
    host = started(max_tokens=8)  # a batch is one of these requests
    served = host.residence.booted[0].served
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)
    real = served.experts

    class Gated:
        backend = real.backend

        def __call__(self, *args, **kwargs):
            entered.release()
            assert gate.acquire(timeout=20)
            return real(*args, **kwargs)

    object.__setattr__(served, "experts", Gated())
    got: list = []
    with ExpertClient(host.address) as client:
        callers = [threading.Thread(target=lambda n=n: got.append((n, Batch(0, n).ask(client)))) for n in range(2)]
        for t in callers:
            t.start()
        assert entered.acquire(timeout=20)
        until(lambda: host.engine.load().queued_requests == 2)
        ended: list = []
        remover = threading.Thread(target=lambda: ended.append(remove(host)))
        remover.start()
        until_inside(remover, "result")
        assert not ended, "one is computed"
        gate.release()
        assert entered.acquire(timeout=20)
        remover.join(20)
        assert ended == ["layers 0: requests still use them after 0.2 s; want them done first"], "the other as well"
        gate.release()
        for t in callers:
            t.join(20)
        with pytest.raises(LayerNotHeldError):
            Batch(0).ask(client)
    for n, answer in got:
        Batch(0, n).check(weights, answer, range(E))
    assert len(got) == 2


def remove(host: Host) -> str:
    try:
        host.residence.remove(0, timeout_s=0.2)
    except TimeoutError as e:
        return str(e)
    return "removed"


def test_an_addition_that_fails_changes_nothing(started, monkeypatch):
    host = started(layers=Ranges.parse("0"))
    with pytest.raises(BootError, match=r"layers to add: got 1,9, but layer 9 has no experts"):
        host.residence.add(1, 9)
    with pytest.raises(BootError, match=r"layer 1: got the experts 6-9, want some of 0 to 7"):
        host.residence.add(1, experts=range(6, 10))
    real = residence.boot_layer

    def second_fails(a, *args, **kwargs):
        if a.info.layer == 1:
            raise BootError("layer 1: the disk is gone")
        return real(a, *args, **kwargs)

    monkeypatch.setattr(residence, "boot_layer", second_fails)
    host.residence.remove(0)
    with pytest.raises(BootError, match="the disk is gone"):
        host.residence.add(0, 1)
    assert not host.residence.booted
    monkeypatch.setattr(residence, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(BootError, match=r"GiB are free"):
        host.residence.add(0)
    assert not host.residence.booted


def test_an_address_that_is_taken_is_said_and_nothing_is_left(started):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = Address("127.0.0.1", s.getsockname()[1])
        with pytest.raises(BootError, match=f"--listen {taken}: cannot listen there: Address already in use"):
            started(listen=taken)
        for option in ("metrics_listen", "tcp_listen", "admin_listen"):
            flag = f"--{option.replace('_', '-')}"
            with pytest.raises(BootError, match=f"{flag} {taken}: cannot listen there: Address already in use"):
                started(**{option: taken})
        with pytest.raises(BootError, match=f"--listen {taken}: cannot listen there"):
            started(listen=taken, synthetic=None, checkpoint=Path("/no/such/model"))  # before the model is read
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(BootError, match="--listen"):
            started(listen=taken, metrics_listen=free)
        with socket.socket() as other:
            other.bind((free.host, free.port))


def test_what_fails_while_loading_is_raised_to_whoever_waits(started, monkeypatch):
    def fail(*args, **kwargs):
        raise BootError("layer 0: the disk is gone")

    monkeypatch.setattr(residence, "boot_layers", fail)
    host = started(ready=False)
    with pytest.raises(BootError, match="the disk is gone"):
        host.ready(20)
    assert status(host.address) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_host_that_is_closed_while_it_loads_ends(started, monkeypatch):
    loading, go_on = threading.Event(), threading.Event()
    real = residence.boot_layers

    def slow(*args, **kwargs):
        loading.set()
        assert go_on.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(residence, "boot_layers", slow)
    host = started(ready=False)
    assert loading.wait(20)
    threading.Timer(0.2, go_on.set).start()
    host.close()
    with pytest.raises(Stopped):
        host.ready(20)
    assert not host._loader.is_alive()
    assert not host.engine._thread.is_alive()


def test_a_host_that_is_closed_while_it_measures_ends(started, monkeypatch, tmp_path):
    """As for minutes with --oracle measure on a CPU: a timing that ends only when a call raises."""
    measuring, given_up = threading.Event(), threading.Event()

    def endless(call, *_):
        measuring.set()
        while not given_up.is_set():
            call(0)
        return 1.0

    monkeypatch.setattr(autotuning, "time_calls", endless)
    host = started(ready=False, oracle="measure", backend="auto", cache=tmp_path)
    assert measuring.wait(60)
    timer = threading.Timer(20, given_up.set)
    timer.start()
    host.close()
    timer.cancel()
    assert not given_up.is_set(), "it measured on"
    with pytest.raises(Stopped):
        host.ready(20)


def test_a_fault_of_the_engine_reaches_the_host(monkeypatch):
    told = threading.Event()
    host = Host(ServeConfig(**TINY), on_fault=lambda why: told.set())
    host.start()
    host.ready(60)
    monkeypatch.setattr("expertd_server.engine.engine.Engine._compute", lambda *args: 1 // 0)
    with ExpertClient(host.address) as client, pytest.raises(InternalError, match="ended on a fault of its own"):
        Batch(0).ask(client)
    assert told.wait(20)
    assert host.fault == "the engine failed with an internal error"
    host.close()


def test_a_slower_machine_can_be_played(started, weights):
    host, batch = started(test_route_us=2000), Batch(0, tokens=8)
    with ExpertClient(host.address) as client:
        begin_s = time.perf_counter()
        answer = batch.ask(client)
        assert time.perf_counter() - begin_s >= 8 * K * 2e-3
        batch.check(weights, answer, range(E))
    kernel_s = host.metrics.registry.get_sample_value("expertd_kernel_seconds_sum", {"backend": "reference"})
    assert kernel_s is None or kernel_s >= 8 * K * 2e-3


def test_hosts_that_are_gone_leave_no_descriptor_open():
    def one() -> None:
        host = Host(ServeConfig(**TINY, tcp="on"))
        try:
            host.start()
            host.ready(60)
            with ExpertClient(host.address) as client:
                x, ids, w = random_inputs(4, H, E, K)
                assert client.forward(0, x, ids, w).routes_computed == 4 * K
        finally:
            host.close()

    def opened() -> list[str]:
        gc.collect()
        found = []
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.append(str(fd.readlink()))
        return [name for name in found if name.startswith(("anon_inode", "/memfd"))]

    one()
    before = len(opened())
    for _ in range(3):
        one()
    until(lambda: len(opened()) <= before)  # gRPC closes what it polls a moment later


class Kernels(KernelsAhead):
    """What compiles ahead, which only notes what it is asked."""

    wanted = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self.steps: list[object] = []

    def give(self, assignments, where, most, routes=(), say=None):
        self.steps.append(("give", [a.decision.chosen.name for a in assignments], say is not None))

    def wait(self):
        self.steps.append("wait")

    def close(self):
        self.steps.append("close")


def test_kernels_are_compiled_before_packages_are_imported_and_waited_for_before_they_are_called(monkeypatch):
    kernels = Kernels()
    packages_for = host_module.packages_for

    def imports(*arguments):
        kernels.steps.append("import")
        return packages_for(*arguments)

    monkeypatch.setattr(host_module, "packages_for", imports)
    host = Host(ServeConfig(**TINY), kernels=kernels)
    try:
        host.start()
        host.ready(60)
    finally:
        host.close()
    chosen = ["reference"] * len(host.residence.booted)
    assert kernels.steps[:3] == [("give", chosen, False), "import", ("give", chosen, True)]
    assert kernels.steps[3:] == ["wait"] * len(chosen) + ["close"]


def test_a_start_that_is_refused_leaves_nothing_that_compiles():
    kernels = Kernels()
    with pytest.raises(BootError):
        Host(ServeConfig(**(TINY | {"backend": "no-such"})), kernels=kernels).start()
    assert kernels.steps == ["close"]
