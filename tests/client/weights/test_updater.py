"""New weights for two servers at once: every one is ready before any switches, and none does where one is not."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import trained
from trained import H
from updating import IDS, Server, W, X
from waiting import until

from expertd.errors import (
    BadDtypeError,
    ChangeUnknownError,
    DeadlineExceededError,
    ExpertdError,
    UnavailableError,
)
from expertd_client import ExpertCluster
from expertd_client.weights import UpdateFailedError, Updater, WeightsServer
from expertd_server.config.values import Ranges

pytestmark = pytest.mark.timeout(180)


class Pair:
    """Two servers of one half of the experts each, an updater and a cluster of them."""

    def __init__(self, stack: ExitStack, folder, **options) -> None:
        halves = ("0-1", "2-3")
        self.servers = [Server(stack, trained.config(folder, experts=Ranges.parse(h), **options)) for h in halves]
        self.addresses = [s.host.address for s in self.servers]
        self.updater = stack.enter_context(Updater(self.addresses, bucket_bytes=100_000, timeout_s=20))
        self.cluster = stack.enter_context(ExpertCluster(self.addresses, timeout_s=20))

    def answers(self):
        return [s.answers() for s in self.servers]

    def sums(self):
        """What the cluster answers for each layer."""
        return [self.cluster.forward(n, X, IDS, W, output_dtype="f32").output for n in trained.LAYERS]

    def versions(self):
        return [[v.number for v in versions] for versions in self.updater.versions().values()]


@pytest.fixture
def pair(tmp_path):
    with ExitStack() as stack:
        yield Pair(stack, trained.saved(tmp_path / "step-1", trained.step(1)), quantize="int4_g128")


def reference_of_all(tmp_path, number):
    """What one server of all experts answers for each layer with the weights of a step."""
    with ExitStack() as stack:
        folder = trained.saved(tmp_path / f"whole-{number}", trained.step(number))
        server = Server(stack, trained.config(folder, quantize="int4_g128"))
        return [server.client.forward(n, X, IDS, W, output_dtype="f32").output for n in trained.LAYERS]


def reference(tmp_path, number):
    """Of the first layer."""
    return reference_of_all(tmp_path, number)[0]


def test_a_version_is_published_and_rolled_back(pair, tmp_path):
    first = pair.answers()
    with pair.updater.version(7, label="seven") as update:
        update.put_all(trained.step(2))
        assert pair.answers() == first
    assert update.number == 7
    assert pair.versions() == [[7, 1], [7, 1]]
    assert all(a != b for a, b in zip(pair.answers(), first, strict=True))
    # a third of each tensor goes to nobody: each server gets its experts alone, and the tensor that is no expert's
    own = sum(t.numel() * 2 for n, t in trained.step(2).items() if ".experts." in n)
    assert update.sent_bytes == own + 2 * 8 * H * 2
    for _ in range(100):
        found = pair.cluster.forward(0, X, IDS, W, output_dtype="f32")
        if found.weights_version == 7:
            break
        assert found.weights_version == 1
    found = pair.cluster.forward(0, X, IDS, W, output_dtype="f32", weights_version=7)
    want = reference(tmp_path, 2)
    assert float((found.output - want).norm() / want.norm()) < 0.01
    with pair.updater.version() as update:
        update.put_all(iter(trained.step(3).items()))
    assert update.number == 8
    assert pair.updater.rollback() == 7
    assert pair.versions() == [[7, 8], [7, 8]]
    with pytest.raises(UpdateFailedError, match="want 5 among them"):
        pair.updater.rollback(5)
    assert pair.updater.rollback(8) == 8


def test_numpy_and_tensors_that_are_trained(pair):
    first = pair.answers()
    tensors = {n: t.requires_grad_() for n, t in trained.step(2, torch.float32).items()}
    with pair.updater.version() as update:
        update.put_all(tensors)
    second = pair.answers()
    with pair.updater.version() as update:
        update.put_all({n: t.detach().numpy() for n, t in tensors.items()})
    assert pair.answers() == second != first
    with pytest.raises(BadDtypeError, match=r"experts\.0\.x: got dtype"), pair.updater.version() as update:
        update.put("experts.0.x", np.zeros(3, np.complex64))
    assert pair.answers() == second


def test_a_folder_is_read_by_every_server(pair, tmp_path):
    first = pair.answers()
    folder = trained.saved(tmp_path / "step-2", trained.step(2))
    assert pair.updater.from_checkpoint(str(folder), 4) == 4
    assert pair.versions() == [[4, 1], [4, 1]]
    assert all(a != b for a, b in zip(pair.answers(), first, strict=True))
    with pytest.raises(UpdateFailedError, match="is no folder"):
        pair.updater.from_checkpoint("/nowhere")
    assert pair.versions() == [[4, 1], [4, 1]]


def test_where_one_server_refuses_none_switches(pair):
    """A tensor of one server's experts has NaN; the other server was ready."""
    first = pair.answers()
    tensors = trained.step(2)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][0, 0] = float("nan")
    with pytest.raises(UpdateFailedError, match=r"experts\.3\.up_proj.*NaN") as error, pair.updater.version() as u:
        u.put_all(tensors)
    assert set(error.value.errors) == {pair.addresses[1]}
    assert pair.answers() == first
    assert pair.versions() == [[1], [1]]
    assert all(not s.call("GetUpdate").update for s in pair.servers)
    with pair.updater.version() as update:
        update.put_all(trained.step(2))
    assert pair.versions() == [[2, 1], [2, 1]]


def test_a_trainer_that_fails_lets_go_of_the_update(pair):
    def tensors():
        yield from list(trained.step(2).items())[:5]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), pair.updater.version() as update:
        update.put_all(tensors())
    assert all(not s.call("GetUpdate").update for s in pair.servers)
    assert pair.versions() == [[1], [1]]


def test_a_missing_tensor_refuses_the_update(pair):
    tensors = trained.step(2)
    del tensors["model.layers.0.mlp.experts.0.down_proj.weight"]
    with pytest.raises(UpdateFailedError, match="down weight of expert 0 is missing"), pair.updater.version() as update:
        update.put_all(tensors)
    assert pair.versions() == [[1], [1]]


def test_a_commit_that_fails_on_one_server_is_taken_back_on_the_others(pair, monkeypatch):
    first = pair.answers()
    real = WeightsServer.commit

    def commit(self, update):
        if self.address == pair.addresses[1]:
            raise DeadlineExceededError(f"{self.address}: got no answer in time")
        return real(self, update)

    monkeypatch.setattr(WeightsServer, "commit", commit)
    with pytest.raises(UpdateFailedError, match=r"commit: .*got no answer") as error, pair.updater.version() as update:
        update.put_all(trained.step(2))
    assert error.value.switched == ()
    assert pair.answers() == first
    assert [v[0] for v in pair.versions()] == [1, 1]


def test_a_server_that_is_gone_fails_the_update_and_the_others_go_on(pair):
    first = pair.servers[0].answers()
    update = pair.updater.begin()
    update.put_all(trained.step(2))
    pair.servers[1].host.close()
    with pytest.raises(ExpertdError):
        update.prepare()
    update.abort()
    assert pair.servers[0].answers() == first
    assert pair.servers[0].call("GetUpdate").update == ""


def test_two_updates_at_once_are_refused(pair):
    with pair.updater.version() as update, Updater(pair.addresses) as other:
        with pytest.raises(UpdateFailedError, match="receiving"), other.version():
            pass
        update.put_all(trained.step(2))
    assert pair.versions() == [[2, 1], [2, 1]]


def test_what_was_damaged_on_its_way_is_refused(pair, monkeypatch):
    real = WeightsServer.put

    def put(self, update, parts):
        parts[-1].data = bytes(len(parts[-1].data))
        return real(self, update, parts)

    monkeypatch.setattr(WeightsServer, "put", put)
    with pytest.raises(UpdateFailedError, match="SHA-256"), pair.updater.version() as update:
        update.put_all(trained.step(2))
    assert pair.versions() == [[1], [1]]


def test_nothing_to_roll_back_to(pair):
    with pytest.raises(UpdateFailedError, match="want one before"):
        pair.updater.rollback()


@pytest.mark.parametrize("servers", [[], ["a", "a"]])
def test_servers_are_named_once(servers):
    with pytest.raises(ValueError, match="at least one address, each once"):
        Updater(servers)


def test_an_update_that_was_let_go_of_is_unknown(pair):
    server = pair.updater.servers[0]
    with pytest.raises(ChangeUnknownError, match="want it under way"):
        server.commit("nobody's")


def limited(tmp_path, number=1, layers=1):
    """Options of a server with room for so many layers beside the two that it serves, and the folder of a step."""
    folder = trained.saved(tmp_path / f"step-{number}", trained.step(number))
    with ExitStack() as stack:
        options = {"experts": Ranges.parse("0-1"), "quantize": "int4_g128"}
        memory = Server(stack, trained.config(folder, **options)).client.describe().memory
    rest = memory.scratch_bytes + memory.context_bytes + max(memory.buffers_bytes, memory.loading_bytes)
    return folder, {"quantize": "int4_g128", "memory_limit": memory.weights_bytes * (2 + layers) // 2 + rest}


@pytest.fixture
def rolling(tmp_path):
    """A pair without room for a second version."""
    folder, options = limited(tmp_path)
    with ExitStack() as stack:
        pair = Pair(stack, folder, **options)
        pair.updater = stack.enter_context(Updater(pair.addresses, timeout_s=20, rolling="allowed"))
        yield pair


def test_servers_roll_together_and_calls_go_on(rolling, tmp_path):
    """Each call is of one version, and none fails or waits for the end of the update."""
    right = {1: rolling.sums(), 2: reference_of_all(tmp_path, 2)}
    seen, wrong, stop = set(), [], threading.Event()

    def calls() -> None:
        layer = 0
        while not stop.is_set():
            try:
                found = rolling.cluster.forward(layer, X, IDS, W, output_dtype="f32")
            except Exception as e:
                wrong.append(e)
                return
            want = right[found.weights_version][layer]
            if float((found.output - want).norm() / want.norm()) > 0.01:
                wrong.append((layer, found.weights_version))
            seen.add((layer, found.weights_version))
            layer = 1 - layer

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        assert rolling.updater.from_checkpoint(str(trained.saved(tmp_path / "new", trained.step(2)))) == 2
        until(lambda: {(0, 2), (1, 2)} <= seen)
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert rolling.versions() == [[2], [2]]
    with pytest.raises(UpdateFailedError, match=r"\[2\], want one before .*; the served one came layer by layer"):
        rolling.updater.rollback()


def test_layers_are_switched_on_all_servers_before_the_next_one_is(rolling, tmp_path, monkeypatch):
    seen, real = [], WeightsServer.roll

    def roll(self, update, through=None):
        found = real(self, update, through)
        seen.append((through, self.address))
        return found

    monkeypatch.setattr(WeightsServer, "roll", roll)
    rolling.updater.from_checkpoint(str(trained.saved(tmp_path / "new", trained.step(2))))
    assert [through for through, _ in seen] == [0, 0, 1, 1, None, None]
    assert [{address for _, address in seen[n : n + 2]} for n in (0, 2, 4)] == 3 * [set(rolling.addresses)]


def test_a_server_that_stops_in_the_middle_is_asked_again(rolling, tmp_path, monkeypatch):
    real = WeightsServer.roll

    def roll(self, update, through=None):
        if self.address == rolling.addresses[1] and through == 1:
            raise DeadlineExceededError(f"{self.address}: got no answer in time")
        return real(self, update, through)

    monkeypatch.setattr(WeightsServer, "roll", roll)
    update = rolling.updater.begin(checkpoint=str(trained.saved(tmp_path / "new", trained.step(2))))
    assert update.rolls == set(rolling.addresses)
    update.prepare()
    with pytest.raises(UpdateFailedError, match=r"commit: .*got no answer in time"):
        update.commit()
    assert [[list(v.layers) for v in versions] for versions in rolling.updater.versions().values()][1] == [[0], [1]]
    monkeypatch.setattr(WeightsServer, "roll", real)
    update.commit()
    assert rolling.versions() == [[2], [2]]


def test_an_answer_that_was_lost_is_no_failure(rolling, tmp_path, monkeypatch):
    real = WeightsServer.roll

    def roll(self, update, through=None):
        monkeypatch.setattr(WeightsServer, "roll", real)
        real(self, update, through)
        raise UnavailableError(f"{self.address}: the connection broke")

    monkeypatch.setattr(WeightsServer, "roll", roll)
    rolling.updater.from_checkpoint(str(trained.saved(tmp_path / "new", trained.step(2))))
    assert rolling.versions() == [[2], [2]]


def test_servers_that_hold_both_versions_switch_before_those_that_roll(tmp_path):
    folder, options = limited(tmp_path)
    with ExitStack() as stack:
        plain = {"quantize": "int4_g128"}
        half = [
            Server(stack, trained.config(folder, experts=Ranges.parse(h), **more))
            for h, more in (("0-1", options), ("2-3", plain))
        ]
        addresses = [s.host.address for s in half]
        updater = stack.enter_context(Updater(addresses, timeout_s=20, rolling="allowed"))
        assert [answer.rolling for answer in updater.plan().values()] == [True, False]
        update = updater.begin(checkpoint=str(trained.saved(tmp_path / "new", trained.step(2))))
        update.prepare()
        order, commit, roll = [], WeightsServer.commit, WeightsServer.roll
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightsServer, "commit", lambda s, *a: order.append(s.address) or commit(s, *a))
            patch.setattr(WeightsServer, "roll", lambda s, *a: order.append(s.address) or roll(s, *a))
            update.commit()
        assert order[0] == addresses[1]
        assert set(order[1:]) == {addresses[0]}
        assert [[v.number for v in versions] for versions in updater.versions().values()] == [[2], [2, 1]]


def test_without_leave_to_roll_the_update_is_refused(rolling, tmp_path):
    with (
        Updater(rolling.addresses, timeout_s=20) as updater,
        pytest.raises(UpdateFailedError, match=r"a second version .*allow a rolling update"),
    ):
        updater.from_checkpoint(str(trained.saved(tmp_path / "new", trained.step(2))))
    with pytest.raises(ValueError, match="rolling: got 'yes', want no, allowed, always"):
        Updater(rolling.addresses, rolling="yes")
