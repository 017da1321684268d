"""`expertctl update` and `expertctl versions`, as people call them."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import trained
from updating import Server

from expertctl.cli import main
from expertd.v1 import weights_service_pb2 as pb
from expertd_server.config.values import Ranges
from expertd_server.residence.residence import Residence, Room

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def pair(tmp_path):
    """Two servers of one half of the experts each."""
    folder = trained.saved(tmp_path / "1", trained.step(1))
    with ExitStack() as stack:
        yield [Server(stack, trained.config(folder, experts=Ranges.parse(h))) for h in ("0-1", "2-3")]


def test_a_folder_versions_and_back(pair, tmp_path, capsys, monkeypatch):
    addresses = [s.host.address for s in pair]
    first = [s.answers() for s in pair]
    new = str(trained.saved(tmp_path / "2", trained.step(2)))
    assert main(["update", *addresses, "--checkpoint", new, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("room for a second version beside version 1") == 2
    assert main(["update", *addresses, "--checkpoint", new, "--version", "7", "--label", "night"]) == 0
    assert "version 7 is served by 2 servers" in capsys.readouterr().out
    assert all(s.answers() != a for s, a in zip(pair, first, strict=True))
    monkeypatch.setattr(Residence, "room_beside", lambda self, rolling: Room(self.memory, False))
    assert main(["update", *addresses, "--checkpoint", new, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("beside version 7; version 1 goes when the update begins") == 2
    assert main(["versions", *addresses]) == 0
    shown = capsys.readouterr().out
    assert shown.count("night") == 2
    assert shown.count("checkpoint") == 2
    assert f"version 7 was read from {new} by {', '.join(addresses)}" in shown
    assert main(["versions", *addresses, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[v["number"] for v in found[a]["versions"]] for a in addresses] == [[7, 1], [7, 1]]
    assert [[v["folder"] for v in found[a]["versions"]] for a in addresses] == [[new, ""], [new, ""]]
    assert main(["versions", *addresses, "--rollback", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[v["number"] for v in found[a]["versions"]] for a in addresses] == [[1, 7], [1, 7]]
    assert [s.answers() for s in pair] == first


def test_a_rolling_update_is_told_before_and_while_it_runs(pair, tmp_path, capsys):
    addresses = [s.host.address for s in pair]
    new = str(trained.saved(tmp_path / "2", trained.step(2)))
    assert main(["update", *addresses, "--checkpoint", new, "--rolling", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("room for a second version beside version 1") == 2, "where that fits"
    assert main(["update", *addresses, "--checkpoint", new, "--rolling", "always", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("room for one layer beside version 1, so layers are switched one by one") == 2
    pair[0].call("BeginUpdate", update="u", checkpoint=new, version=5, rolling=pb.ROLLING_UPDATE_REQUIRED)
    pair[0].call("PrepareUpdate", update="u")
    pair[0].call("CommitUpdate", update="u", through_layer=0)
    assert main(["versions", addresses[0]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 │ layers 0" in shown
    assert "1 │ layers 1" in shown
    assert "version 5 is committing, 2 of 2 layers, 1 of them switched" in shown
    assert main(["versions", addresses[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[addresses[0]]["versions"]
    assert [(v["number"], v["rolling"], v["layers"]) for v in found] == [(5, True, [0]), (1, False, [1])]
    pair[0].call("CommitUpdate", update="u")
    assert main(["update", addresses[1], "--checkpoint", new, "--rolling", "always", "--version", "5"]) == 0
    assert main(["versions", *addresses, "--rollback"]) == 1
    assert "came layer by layer" in " ".join(capsys.readouterr().err.split())


def test_what_one_server_refuses_none_serves(pair, capsys):
    addresses = [s.host.address for s in pair]
    assert main(["update", *addresses, "--checkpoint", "/nowhere"]) == 1
    assert "UPDATE_FAILED" in capsys.readouterr().err
    assert main(["versions", *addresses, "--rollback"]) == 1
    assert "want one before" in capsys.readouterr().err


def test_servers_of_several_versions_are_said(pair, tmp_path, capsys):
    pair[0].update(trained.step(2), version=3)
    addresses = [s.host.address for s in pair]
    assert main(["versions", *addresses]) == 0
    assert "servers serve several versions: 1, 3" in " ".join(capsys.readouterr().out.split())
