"""Hosts in this process on an accelerator: two side by side, and layers that come and go while batches are replayed."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from expertd_kernels import detect_device, reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import random_inputs

try:
    from expertd.errors import LayerNotHeldError
    from expertd_client import ExpertClient
    from expertd_server.boot.assignment import open_source
    from expertd_server.config.serve import ServeConfig
    from expertd_server.config.values import Address, Ranges, Split
    from expertd_server.host.host import Host
except Exception as e:  # a machine for kernels alone: nothing installed, or other versions of grpcio and protobuf
    pytest.skip(f"the server cannot run here: {type(e).__name__}: {e}", allow_module_level=True)

DEVICE = detect_device("auto")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.kind == "cpu", reason="runs on an accelerator, this machine has none"),
]
H, E, K = 2048, 16, 4
SIZES = (1, 3, 8, 40, 130)
API = getattr(torch, "xpu" if DEVICE.kind == "xpu" else "cuda")


def config(**options) -> ServeConfig:
    fixed = {"synthetic": "qwen3-30b-a3b:int4_g128", "experts": Ranges.parse(f"0-{E - 1}"), "max_tokens": 512}
    return ServeConfig(**fixed, listen=Address("127.0.0.1", 0), **options)


@pytest.fixture
def hosts():
    made: list[Host] = []

    def make(**options) -> Host:
        made.append(Host(config(**options)))
        made[-1].start()
        made[-1].ready(300)
        return made[-1]

    yield make
    for host in made:
        host.close()


class Right:
    """Batches of one layer with their answers."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        weights = open_source(config()).load(layer, range(E))
        self.batches = []
        for tokens in SIZES:
            x, ids, w = random_inputs(tokens, H, E, K, seed=tokens)
            self.batches.append((x, ids, w, reference(weights, x, ids, w)))

    def ask(self, client: ExpertClient, n: int) -> None:
        x, ids, w, want = self.batches[n % len(self.batches)]
        answer = client.forward(self.layer, x, ids, w, timeout_s=60)
        assert relative_error(torch.as_tensor(answer.output).float(), want) <= tolerance("bf16")
        assert answer.routes_computed == ids.numel()


class Callers:
    """Threads that ask until they are stopped.  counts: answers by layer; gone: LAYER_NOT_HELD."""

    def __init__(self, wanted: list[tuple[Host, Right]], may_be_gone: bool = False) -> None:
        self.counts = [0] * len(wanted)
        self.gone = 0
        self._faults: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(i, *w, may_be_gone)) for i, w in enumerate(wanted)]
        for t in self._threads:
            t.start()

    def _call(self, i: int, host: Host, right: Right, may_be_gone: bool) -> None:
        try:
            with ExpertClient(host.address) as client:
                while not self._stop.is_set():
                    try:
                        right.ask(client, self.counts[i])
                        self.counts[i] += 1
                    except LayerNotHeldError:
                        assert may_be_gone
                        assert right.layer != 0, "this one stays"
                        self.gone += 1
                        time.sleep(0.002)
        except BaseException as e:
            self._faults.append(e)

    def until_each_has(self, answers: int) -> None:
        """Wait.  pytest's time limit ends it where a caller is stuck."""
        while min(self.counts) < answers and not self._faults:
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        for t in self._threads:
            t.join(60)
        assert not self._faults, self._faults


def test_two_hosts_of_one_device_do_not_meet(hosts):
    """Each has a stream, scratch and graphs of its own: batches of both compute at once."""
    right = [Right(0), Right(1)]
    a, b = hosts(layers=Ranges.parse("0-1")), hosts(layers=Ranges.parse("0-1"))
    assert a.engine.stream is not b.engine.stream
    callers = Callers([(a, right[0]), (b, right[1]), (a, right[1]), (b, right[0])])
    callers.until_each_has(2 * len(SIZES))
    callers.stop()


def test_layers_come_and_go_while_batches_are_replayed(hosts):
    host = hosts(layers=Ranges.parse("0"))
    right = [Right(0), Right(1), Right(2)]
    callers = Callers([(host, r) for r in right], may_be_gone=True)
    used = []
    for _ in range(5):
        host.residence.add(1, 2)
        before = sum(callers.counts[1:])
        end = time.monotonic() + 60
        while sum(callers.counts[1:]) < before + 100 and time.monotonic() < end:
            time.sleep(0.01)
        assert sum(callers.counts[1:]) >= before + 100, "graphs of the new layers were captured and replayed"
        host.residence.remove(1, 2, timeout_s=60)
        used.append(API.memory_reserved())
    callers.stop()
    assert callers.counts[0] > 100
    assert callers.gone > 0
    layer_bytes = 37 << 20
    assert used[-1] - used[1] < layer_bytes, f"reserved by torch after each removal: {used}"


def test_a_host_that_begins_with_no_layers_serves_on_the_device(hosts):
    host = hosts(layers=Ranges("none", ()))
    right = Right(3)
    host.residence.add(3)
    with ExpertClient(host.address) as client:
        for n in range(4 * len(SIZES)):
            right.ask(client, n)


@pytest.mark.skipif(DEVICE.kind != "cuda", reason="runs on cuda: parts are replayed from CUDA graphs")
def test_a_layer_shared_with_the_host_is_replayed(hosts, caplog):
    """The GPU has 12 of the 16 experts, the host's processors the rest."""
    host = hosts(layers=Ranges.parse("0"), device="cuda:0,cpu", split=Split.parse("12,4"))
    right = Right(0)
    with ExpertClient(host.address) as client:
        for n in range(6 * len(SIZES)):
            right.ask(client, n)
    assert "could not be captured" not in caplog.text
    memories = host.engine._executor._space._memories.values()
    assert [part._graphs for memory in memories for user in memory.users for part in user._devices.values()] != [[]]
