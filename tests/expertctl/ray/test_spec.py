"""What is wanted of Ray, and what becomes of a server: without Ray."""

from __future__ import annotations

import argparse
import io
import re
import time

import pytest
from rich.console import Console

from expertctl.cli import main
from expertctl.commands.ray import _show, add_parser
from expertd.errors import PlacementError

pytest.importorskip("ray", reason="the room imports it; pip install ray (the extra `deploy` has it)")

from expertctl.ray import deploy
from expertctl.ray.spec import Place, Spec, needs_of, strategy_of
from expertctl.ray.watched import Watched
from expertd_client.cluster import ray as source

SERVING = {"phase": "serving", "why": "", "address": "10.0.0.1:7070", "metrics": "", "node": "10.0.0.1", "pid": 7}


def test_what_servers_say_stands_below_a_table_that_is_whole():
    why = "--max-tokens: got 'none', want a whole number from 1 to 1048576; " * 3
    rows = [{"part": 0, "replica": n, "phase": "failed", "address": "[fd00:1234:5678::17]:39311", "starts": 3,
             "why": why * n} for n in range(2)]  # fmt: skip
    out = io.StringIO()
    _show(Console(width=80, file=out, force_terminal=True, no_color=True, markup=False, emoji=False), rows)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert text.count("[fd00:1234:5678::17]:39311") == 2
    assert f"part 0, replica 1: {why}".strip() == " ".join(text[text.index("part 0, ") :].split())


def test_a_cluster_that_is_none_is_told_at_once(monkeypatch, capsys):
    began = time.monotonic()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["ray", "status"]) == 2
    assert time.monotonic() - began < 5
    want = "Ray: got none at 127.0.0.1:1: [Errno 111] Connection refused, want a cluster; ray start --head, or name"
    assert want in capsys.readouterr().err


def test_who_stops_waiting_is_told_that_the_servers_go_on(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "connect", lambda address: False)
    monkeypatch.setattr(deploy, "up", interrupted)
    assert main(["ray", "up", "--synthetic", "tiny:int4_g128"]) == 130
    assert "the servers go on starting; status shows them, down ends them" in capsys.readouterr().err


def test_every_part_has_its_replicas():
    assert list(map(str, Spec("a", (), shards=2, replicas=2).places())) == ["0.0", "0.1", "1.0", "1.1"]


def test_what_a_part_needs_is_what_was_said_last_of_it():
    spec = Spec("a", (), shards=8, needs=needs_of(["GPU=1,CPU=2", "6-7:CPU=4,memory=2e10", "6:xpu=1"]))
    assert [spec.needs_of(n) for n in (5, 6, 7)] == [{"GPU": 1, "CPU": 2}, {"xpu": 1}, {"CPU": 4, "memory": 2e10}]
    assert Spec("a", (), shards=8).needs_of(3) == {"CPU": 1}
    assert Spec("a", (), shards=8, needs=needs_of(["6:xpu=1"])).needs_of(5) == {"CPU": 1}


@pytest.mark.parametrize("text", ["GPU", "GPU=", "=1", "GPU=0", "GPU=-1", "GPU=inf", "GPU=nan", "x:GPU=1", "", "6-7:"])
def test_resources_that_cannot_be_read(text):
    with pytest.raises(PlacementError, match="want NAME=NUMBER"):
        needs_of([text])


def test_parts_that_there_are_not():
    with pytest.raises(PlacementError, match="got part 8, want parts 0-7 of 8 shards"):
        Spec("a", (), shards=8, needs=needs_of(["7-8:GPU=1"]))
    with pytest.raises(PlacementError, match="name"):
        Spec("a/b", ())


def test_options_of_a_server_are_its_own():
    argv = ("--checkpoint", "/m", "--metrics-listen", "{node}:9464", "--held", "/var/{part}-{replica}.json")
    spec = Spec("a", argv, shards=8, replicas=2, needs=needs_of(["GPU=1", "6:CPU=4", "7:xpu=1"]))
    assert spec.argv_of(Place(2, 1), "10.0.0.5") == [
        *("--listen", "10.0.0.5:0", "--shard", "2/8"),
        *("--checkpoint", "/m", "--metrics-listen", "10.0.0.5:9464", "--held", "/var/2-1.json"),
    ]
    assert spec.argv_of(Place(2, 1), "fd00::5")[1] == "[fd00::5]:0"
    on_a_cpu = ["--device", "cpu", "--threads", "4"]  # Ray gives it these cores, also where the node has a GPU
    assert spec.argv_of(Place(6, 0), "10.0.0.5")[4:8] == on_a_cpu
    assert "--device" not in spec.argv_of(Place(7, 0), "10.0.0.5")


def test_replicas_stay_apart_where_there_are_nodes_for_it():
    big, small = {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0}
    assert strategy_of({"CPU": 1}, 2, [big, small]) == "STRICT_SPREAD"
    assert strategy_of({"GPU": 1}, 2, [big, small]) == "SPREAD"
    assert strategy_of({"GPU": 1}, 1, [big, small]) == "STRICT_SPREAD"


def test_a_server_that_cannot_serve_is_started_again_later_each_time():
    failed = {**SERVING, "phase": "failed", "why": "no room", "address": ""}
    watched = Watched()
    assert watched.heard(failed, now_s=100.0)
    assert not watched.heard(failed, now_s=100.5)
    assert not watched.due(100.9)
    assert watched.due(101.0)
    assert not watched.due(101.1), "once"
    assert watched.heard({**failed, "pid": 8}, now_s=105.0)
    assert not watched.due(106.9)
    assert watched.due(107.0)
    for n in range(20):
        watched.heard({**failed, "pid": 100 + n}, now_s=1000.0)
    assert not watched.due(1059.0)
    assert watched.due(1060.0), "a minute at most"
    watched.heard(SERVING, now_s=2000.0)
    watched.heard(failed, now_s=2001.0)
    assert watched.due(2002.0), "it served in between"


def test_what_is_known_of_a_server():
    watched = Watched()
    assert not watched.lost(), "Ray has not started it yet"
    assert watched.phase == "pending"
    assert watched.heard(SERVING, 0.0)
    assert not watched.heard(SERVING, 0.1)
    assert (watched.phase, watched.address, watched.starts) == ("serving", "10.0.0.1:7070", 1)
    assert watched.lost()
    assert not watched.lost()
    assert (watched.phase, watched.address) == ("away", "")
    assert watched.heard({**SERVING, "pid": 8, "address": "10.0.0.1:7071"}, 1.0)
    assert (watched.phase, watched.starts) == ("serving", 2)
    assert watched.ended("the actor died", 5.0)
    assert not watched.ended("the actor died", 5.1)
    assert (watched.phase, watched.why, watched.address) == ("failed", "the actor died", "")
    assert watched.due(6.0)


def test_the_command_of_the_page():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "")
    line = "ray up --checkpoint /m --shards 8 --replicas 2 --resources GPU=1 -- --metrics-listen {node}:0 --insecure"
    args = parser.parse_args(line.split())
    assert args.options == ["--metrics-listen", "{node}:0", "--insecure"]
    assert (args.shards, args.replicas, args.name) == (8, 2, "experts")
