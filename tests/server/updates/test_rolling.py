"""Updates where memory holds no second version: layer by layer, each answer of the version that its layer is of."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
import trained
from updating import IDS, Server, W, X
from waiting import until

from expertd.errors import (
    ChangePendingError,
    ChangeRefusedError,
    ChangeUnknownError,
    MalformedMessageError,
    WeightsVersionNotHeldError,
)
from expertd.v1 import weights_service_pb2 as pb
from expertd_client import ExpertClient
from expertd_client.weights import WeightsServer
from expertd_server.boot.assignment import BootError
from expertd_server.residence.residence import Residence
from expertd_server.updates.rolling import Rollout

pytestmark = pytest.mark.timeout(120)

ALLOWED, REQUIRED = pb.ROLLING_UPDATE_ALLOWED, pb.ROLLING_UPDATE_REQUIRED


@pytest.fixture
def config(serve, folder):
    """config(layers, **options): of a server with room for so many layers beside the two that are served."""
    memory = serve(trained.config(folder, quantize="int4_g128")).client.describe().memory
    rest = memory.scratch_bytes + memory.context_bytes + max(memory.buffers_bytes, memory.loading_bytes)

    def made(layers: int, **options):
        limit = memory.weights_bytes + layers * memory.weights_bytes // 2 + rest
        return trained.config(folder, quantize="int4_g128", memory_limit=limit, **options)

    return made


@pytest.fixture
def answers(serve, tmp_path):
    """answers(number): of a server that was started with the step."""

    def of(number: int) -> list[bytes]:
        found = trained.saved(tmp_path / f"whole-{number}", trained.step(number))
        return serve(trained.config(found, quantize="int4_g128")).answers()

    return of


def new_folder(tmp_path: Path, number: int = 2) -> str:
    return str(trained.saved(tmp_path / f"step-{number}", trained.step(number)))


def prepared(server: Server, name: str, folder: str, **begin) -> None:
    server.call("BeginUpdate", update=name, checkpoint=folder, rolling=ALLOWED, **begin)
    server.call("PrepareUpdate", update=name)


def versions(server: Server) -> list[tuple[int, bool, bool, list[int]]]:
    return [(v.number, v.serving, v.rolling, list(v.layers)) for v in server.client.describe().versions]


def served(server: Server) -> list[int]:
    """Version by layer, as a scrape sees it."""
    read = server.host.metrics.registry.get_sample_value
    return [read("expertd_weights_version", {"layer": str(n)}) for n in trained.LAYERS]


def answer(client: ExpertClient, layer: int, version: int = 0) -> tuple[int, bytes]:
    found = client.forward(layer, X, IDS, W, weights_version=version)
    return found.weights_version, found.output.view(torch.uint8).numpy().tobytes()


def test_where_no_second_version_fits_layers_are_switched_one_by_one(serve, config, answers, tmp_path):
    server = serve(config(1))
    first, second = server.answers(), answers(2)
    began = server.call("BeginUpdate", update="u", checkpoint=new_folder(tmp_path), version=7, rolling=ALLOWED)
    assert began.rolling
    assert began.memory.weights_bytes == 3 * server.client.describe().memory.weights_bytes // 2
    ready = server.call("PrepareUpdate", update="u")
    assert (ready.layers, ready.version.rolling) == (2, True)
    assert server.answers() == first
    half = server.call("CommitUpdate", update="u", through_layer=0).version
    assert (half.number, half.rolling, half.layers) == (7, True, [0])
    assert server.answers() == [second[0], first[1]]
    assert versions(server) == [(7, True, True, [0]), (1, True, False, [1])]
    assert served(server) == [7, 1]
    assert [answer(server.client, n)[0] for n in (0, 1)] == [7, 1]
    status = server.call("GetUpdate")
    assert (status.state, status.rolling, status.layers_switched) == (pb.UPDATE_STATE_COMMITTING, True, 1)
    with pytest.raises(ChangePendingError, match="is committing; it goes on"):
        server.call("AbortUpdate", update="u")
    done = server.call("CommitUpdate", update="u").version
    assert done.digest == ready.version.digest
    assert server.call("CommitUpdate", update="u").version == done, "the answer was lost"
    assert server.answers() == second
    assert versions(server) == [(7, True, True, [])]
    assert served(server) == [7, 7]
    assert server.call("GetUpdate").update == ""


def test_a_pin_is_for_the_version_of_the_layer(serve, config, tmp_path):
    server = serve(config(1))
    prepared(server, "u", new_folder(tmp_path))
    server.call("CommitUpdate", update="u", through_layer=0)
    assert answer(server.client, 0, 2)[0] == 2
    assert answer(server.client, 1, 1)[0] == 1
    for layer, wrong, held in ((0, 1, 2), (1, 2, 1)):
        with pytest.raises(WeightsVersionNotHeldError, match=rf"got {wrong}, want one that is held here: {held}, or"):
            answer(server.client, layer, wrong)
        with pytest.raises(WeightsVersionNotHeldError, match=rf"got {wrong}, want one that is held here: {held}, or"):
            server.client.forward(layer, X, IDS, W, digest=True, weights_version=wrong)
        assert server.client.forward(layer, X[:0], IDS[:0], W[:0]).weights_version == held


def test_calls_under_way_are_of_the_version_that_each_names(serve, config, answers, tmp_path):
    """None fails, and none waits for the end of the update."""
    server = serve(config(1))
    right = {1: server.answers(), 2: answers(2)}
    seen, wrong, stop = set(), [], threading.Event()

    def calls() -> None:
        with ExpertClient(server.host.address, timeout_s=60) as client:
            layer = 0
            while not stop.is_set():
                try:
                    version, got = answer(client, layer)
                except Exception as e:
                    wrong.append(e)
                    return
                seen.add((layer, version))
                if got != right[version][layer]:
                    wrong.append((layer, version))
                layer = 1 - layer

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        until(lambda: {(0, 1), (1, 1)} <= seen)
        prepared(server, "u", new_folder(tmp_path))
        server.call("CommitUpdate", update="u", through_layer=0)
        until(lambda: (0, 2) in seen)
        server.call("CommitUpdate", update="u")
        until(lambda: (1, 2) in seen)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not wrong


def test_no_more_than_one_layer_beside_those_that_are_served_is_there(serve, config, tmp_path, monkeypatch):
    server, alive, most = serve(config(1)), [], []
    residence = server.host.residence
    alive += [weakref.ref(b.served.experts) for b in residence.booted.values()]
    made = residence.make

    def make(*args):
        booted = made(*args)
        alive.append(weakref.ref(booted.served.experts))
        gc.collect()
        most.append(sum(ref() is not None for ref in alive))
        return booted

    monkeypatch.setattr(residence, "make", make)
    prepared(server, "u", new_folder(tmp_path))
    server.call("CommitUpdate", update="u")
    assert most == [3, 3, 3, 3], "two layers, each checked, and made again"


def test_which_way_it_will_be(serve, config):
    """Two versions fit; one layer more does; nothing does."""

    def plan(server, rolling):
        return server.call("BeginUpdate", dry_run=True, rolling=rolling)

    whole = serve(config(2))
    assert [plan(whole, r).rolling for r in (0, ALLOWED, REQUIRED)] == [False, False, True]
    some = serve(config(1))
    with pytest.raises(ChangeRefusedError, match=r"second version .*; for one layer more there is room: allow a roll"):
        plan(some, 0)
    assert [plan(some, r).rolling for r in (ALLOWED, REQUIRED)] == [True, True]
    none = serve(config(0))
    for rolling in (0, ALLOWED):
        with pytest.raises(ChangeRefusedError, match=r"second version .*; one layer beside .* --memory-limit allows"):
            plan(none, rolling)
    with pytest.raises(ChangeRefusedError, match=r"^one layer beside those that are served: .* --memory-limit allows"):
        plan(none, REQUIRED)
    with pytest.raises(MalformedMessageError, match=r"BeginUpdateRequest\.rolling: got 9"):
        plan(some, 9)
    assert whole.call("GetUpdate").versions[0].number == 1


def test_a_rolling_update_gives_up_the_version_before_and_leaves_none(serve, config, tmp_path):
    server = serve(config(2))
    for number in (2, 3):
        folder = new_folder(tmp_path, number)
        rolling = REQUIRED if number == 3 else 0
        began = server.call("BeginUpdate", update=f"u{number}", checkpoint=folder, rolling=rolling)
        assert began.gives_up == (1 if number == 3 else 0)
        server.call("PrepareUpdate", update=f"u{number}")
        server.call("CommitUpdate", update=f"u{number}")
    with pytest.raises(ChangeUnknownError, match=r"version 3, which came layer by layer.*publish the old checkpoint"):
        server.call("RollbackVersion")
    assert versions(server) == [(3, True, True, [])]


def test_tensors_are_kept_on_disk_until_their_layers_are_switched(serve, config, answers, tmp_path):
    server = serve(config(1, held=tmp_path / "held.json"))
    server.call("BeginUpdate", update="u", rolling=ALLOWED)
    weights = WeightsServer(server.host.address)
    parts = trained.parts(trained.step(2))
    for at in range(0, len(parts), 4):
        weights.put("u", parts[at : at + 4])  # again where too much waits
    weights.close()
    server.call("PrepareUpdate", update="u")
    server.call("CommitUpdate", update="u")
    second = answers(2)
    assert server.answers() == second
    assert [p.name for p in (tmp_path / "held.json.weights").iterdir() if p.is_dir()] == ["2"]
    server.host.residence.remove(0, experts=[3])
    server.host.residence.add(0, experts=[3])  # which reads them once more
    assert server.answers() == second


def test_tensors_for_which_there_is_no_memory_while_they_arrive_are_refused(serve, config, tmp_path, monkeypatch):
    server = serve(config(1, held=tmp_path / "held.json"))
    monkeypatch.setattr(server.host._updates, "_waiting_limit", lambda plan, rolling: 700_000)
    with pytest.raises(ChangeRefusedError, match=r"tensors take 786432 bytes.* got room for 700000.* a folder"):
        server.call("BeginUpdate", update="u", rolling=ALLOWED)
    server.call("BeginUpdate", update="u", rolling=ALLOWED, checkpoint=new_folder(tmp_path))


def test_without_held_tensors_are_refused_and_nothing_has_changed(serve, config):
    server = serve(config(1))
    with pytest.raises(ChangeRefusedError, match=r"it has to roll, and this server has no --held.* or a folder"):
        server.call("BeginUpdate", update="u", rolling=ALLOWED)
    assert server.call("GetUpdate").update == ""
    server.host.residence.remove(1)  # changes are possible


def test_what_is_wrong_is_found_before_the_first_layer_is_switched(serve, config, tmp_path, monkeypatch):
    from expertd_server.boot import prepare

    server = serve(config(1))
    first, real, checked = server.answers(), prepare.check, []

    def fails(*args):
        checked.append(1)
        fault = "relative error 0.5, want at most 0.01" if len(checked) == 2 else real(*args).fault
        return real(*args).__class__(**{**vars(real(*args)), "fault": fault})

    monkeypatch.setattr(prepare, "check", fails)
    server.call("BeginUpdate", update="u", checkpoint=new_folder(tmp_path), rolling=ALLOWED)
    with pytest.raises((ChangeRefusedError, ChangeUnknownError), match=r"layer 1: .*self-check"):
        server.call("PrepareUpdate", update="u")
    assert server.answers() == first
    assert versions(server) == [(1, True, False, [])]


def stopped_in_the_middle(server, folder, monkeypatch, **begin) -> None:
    """The second layer cannot be made any more."""
    prepared(server, "u", folder, **begin)
    server.call("CommitUpdate", update="u", through_layer=0)
    real = Rollout._switch

    def fails(self, booted):
        raise BootError("no memory")

    monkeypatch.setattr(Rollout, "_switch", fails)
    with pytest.raises(ChangeRefusedError, match=r"no memory; 1 of 2 layers are switched: commit it again to go on"):
        server.call("CommitUpdate", update="u")
    monkeypatch.setattr(Rollout, "_switch", real)


def test_what_stops_in_the_middle_is_said_and_goes_on(serve, config, answers, tmp_path, monkeypatch):
    server = serve(config(1))
    stopped_in_the_middle(server, new_folder(tmp_path), monkeypatch)
    assert versions(server) == [(2, True, True, [0]), (1, True, False, [1])]
    assert served(server) == [2, 1]
    assert "1 of 2 layers are switched" in server.call("GetUpdate").last_error
    with pytest.raises(ChangeUnknownError, match="came layer by layer"):
        server.call("RollbackVersion")
    server.call("CommitUpdate", update="u")
    assert server.answers() == answers(2)
    assert server.call("GetUpdate").last_error == ""
    assert versions(server) == [(2, True, True, [])]


@pytest.mark.parametrize("layers", [1, 2])
def test_what_stopped_and_was_let_go_of_is_replaced_by_a_later_update(
    serve, config, answers, tmp_path, monkeypatch, layers
):
    """The old version, from its folder: whole or rolling again."""
    server = serve(config(layers))
    first = server.answers()
    real = server.host.residence.room_beside
    monkeypatch.setattr(server.host.residence, "room_beside", lambda rolling=False: real(rolling=True))
    stopped_in_the_middle(server, new_folder(tmp_path), monkeypatch)
    monkeypatch.setattr(server.host.residence, "room_beside", real)
    server.call("AbortUpdate", update="u")
    assert versions(server) == [(2, True, True, [0]), (1, True, False, [1])]
    with pytest.raises(BootError, match="layers are of versions 1, 2 of the weights, since a rolling update stopped"):
        server.host.residence.add(0)
    with pytest.raises(ChangeUnknownError, match="came layer by layer"):
        server.call("RollbackVersion")
    with pytest.raises(ChangeRefusedError, match="version: got 2, want more than 2"):
        prepared(server, "v", str(tmp_path / "step-1"), version=2)
    prepared(server, "v", str(tmp_path / "step-1"))
    assert versions(server)[0] == (2, True, True, [0])
    server.call("CommitUpdate", update="v")
    assert server.answers() == first
    assert versions(server) == [(3, True, layers == 1, [])]
    server.host.residence.remove(1)


def test_a_trainer_that_dies_after_the_first_layer_leaves_one_version(serve, config, answers, tmp_path):
    server = serve(config(1))
    prepared(server, "u", new_folder(tmp_path), lease_s=1)
    server.call("CommitUpdate", update="u", through_layer=0)
    until(lambda: not server.call("GetUpdate").update)
    assert server.answers() == answers(2)
    assert server.call("GetUpdate").last_error == ""


def test_a_trainer_that_dies_before_leaves_nothing(serve, config, tmp_path):
    server = serve(config(1))
    first = server.answers()
    prepared(server, "u", new_folder(tmp_path), lease_s=1)
    until(lambda: not server.call("GetUpdate").update)
    assert "no call about it for 1 s" in server.call("GetUpdate").last_error
    assert server.answers() == first
    server.host.residence.remove(1)


def test_files_that_change_after_they_were_checked_are_not_served(serve, config, tmp_path):
    server = serve(config(1))
    first = server.answers()
    prepared(server, "u", new_folder(tmp_path))
    (tmp_path / "step-2" / "config.json").touch()
    with pytest.raises(ChangeRefusedError, match="have changed; begin it again"):
        server.call("CommitUpdate", update="u")
    assert server.answers() == first
    assert server.call("GetUpdate").state == pb.UPDATE_STATE_READY
    server.call("AbortUpdate", update="u")


def test_a_restart_in_the_middle_serves_the_new_version(serve, config, answers, tmp_path, monkeypatch):
    options = config(1, held=tmp_path / "held.json")
    server = serve(options)
    prepared(server, "u", new_folder(tmp_path))
    server.host.close()  # before the commit
    server = serve(options)
    assert served(server) == [1, 1]
    prepared(server, "u", str(tmp_path / "step-2"))
    server.call("CommitUpdate", update="u", through_layer=0)
    server.host.close()
    again = serve(options)
    assert served(again) == [2, 2]
    assert again.answers() == answers(2)
    assert versions(again) == [(2, True, False, [])]


def test_requests_that_use_a_layer_for_too_long_stop_it(serve, config, answers, tmp_path, monkeypatch):
    server = serve(config(1))
    prepared(server, "u", new_folder(tmp_path))
    real = server.host.engine.forget
    monkeypatch.setattr(server.host.engine, "forget", lambda layers, timeout_s=None: False)
    with pytest.raises(ChangeRefusedError, match=r"requests still use them after 60 s.*1 of 2 layers are switched"):
        server.call("CommitUpdate", update="u")
    monkeypatch.setattr(server.host.engine, "forget", real)
    server.call("CommitUpdate", update="u")
    assert server.answers() == answers(2)


def test_the_plan_of_a_layer_is_that_of_the_largest(serve, config, monkeypatch):
    server = serve(config(1))
    residence, asked = server.host.residence, []
    monkeypatch.setattr(residence, "_require_room", lambda these, advise=True: asked.append(these) or residence.memory)
    room = Residence.room_beside(residence, rolling=True)
    assert (room.rolling, room.before, len(asked)) == (True, True, 1), "both layers are alike"
    uneven = dataclasses.replace(residence.booted[1].assignment, held=(0,))
    uneven = dataclasses.replace(
        uneven,
        decision=dataclasses.replace(
            uneven.decision, problem=dataclasses.replace(uneven.decision.problem, num_experts=1)
        ),
    )
    residence.booted = {**residence.booted, 1: dataclasses.replace(residence.booted[1], assignment=uneven)}
    asked.clear()
    Residence.room_beside(residence, rolling=True)
    assert len(asked) == 2
