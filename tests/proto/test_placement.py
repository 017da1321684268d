"""The placement: ranges, JSON both ways, look-ups, coverage, and what servers say of themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.errors import PlacementError
from expertd.placement import Placement, Server
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import placement_pb2

TWO = Placement(
    (
        Server("a:1", {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}),
        Server("b:1", {0: (3, 4, 5, 6, 7), 1: (4, 5, 6, 7)}),
    ),
    {0: 8, 1: 8},
    epoch=3,
    fingerprint="f00d",
)


def test_holders_in_server_order() -> None:
    assert TWO.holders(0, 0) == ("a:1",)
    assert TWO.holders(0, 3) == ("a:1", "b:1")
    assert TWO.holders(1, 7) == ("b:1",)
    TWO.check_complete()
    for layer, expert in ((2, 0), (0, 8), (0, -1)):
        with pytest.raises(PlacementError, match=f"layer {layer}, expert {expert}"):
            TWO.holders(layer, expert)


def test_missing_experts_are_named() -> None:
    half = Placement(TWO.servers[:1], TWO.num_experts)
    assert half.missing() == {0: (4, 5, 6, 7), 1: (4, 5, 6, 7)}
    assert half.holders(1, 4) == ()
    with pytest.raises(PlacementError, match="layers 0-1: experts 4-7"):
        half.check_complete()


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts = draw(st.dictionaries(st.integers(0, 60), st.integers(1, 12), max_size=6))
    names = draw(st.lists(st.from_regex(r"[a-z]{1,8}:[0-9]{1,4}", fullmatch=True), unique=True, max_size=4))
    servers = []
    for name in names:
        layers = {}
        for layer, n in num_experts.items():
            experts = draw(st.sets(st.integers(0, n - 1)))
            if experts:
                layers[layer] = tuple(sorted(experts))
        servers.append(Server(name, layers))
    return Placement(tuple(servers), num_experts, draw(st.integers(0, 1 << 40)), draw(st.text(max_size=8)))


@settings(max_examples=100, deadline=None)
@given(placements())
def test_json_round_trip_and_lookups_agree(p: Placement) -> None:
    assert Placement.from_json(p.to_json()) == p
    for layer, n in p.num_experts.items():
        for expert in range(n):
            want = tuple(s.address for s in p.servers if expert in s.layers.get(layer, ()))
            assert p.holders(layer, expert) == want
            assert (expert in p.missing().get(layer, ())) == (not want)


def test_json_by_hand() -> None:
    text = """{"version": 1, "num_experts": {"0-1": 8},
      "servers": [{"address": "a:1", "layers": {"0": "0-3", "1": "0-3"}},
                  {"address": "b:1", "layers": {"0": "3-7", "1": "4-7"}}], "epoch": 3, "fingerprint": "f00d"}"""
    assert Placement.from_json(text) == TWO
    assert json.loads(TWO.to_json()) == {
        "version": 1,
        "epoch": "3",
        "fingerprint": "f00d",
        "num_experts": {"0-1": 8},
        "servers": [
            {"address": "a:1", "layers": {"0-1": "0-3"}},
            {"address": "b:1", "layers": {"0": "3-7", "1": "4-7"}},
        ],
    }
    assert Placement.from_json('{"version": 1, "num_experts": {}, "servers": []}').epoch == 0


def test_the_message_says_the_same() -> None:
    message = TWO.to_message()
    assert message == placement_pb2.Placement(
        version=1,
        epoch=3,
        fingerprint="f00d",
        num_experts={"0-1": 8},
        servers=[
            placement_pb2.PlacedServer(address="a:1", layers={"0-1": "0-3"}),
            placement_pb2.PlacedServer(address="b:1", layers={"0": "3-7", "1": "4-7"}),
        ],
    )
    assert Placement.from_message(placement_pb2.Placement.FromString(message.SerializeToString())) == TWO


def _changed(**changes: object) -> str:
    top = json.loads(TWO.to_json())
    top.update(changes)
    return json.dumps({k: v for k, v in top.items() if v is not None})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Failed to load JSON"),
        ("[]", "placement version: got 0, want 1"),
        ('"text"', "placement: "),
        (b"\xff", "can't decode byte 0xff"),
        ("[" * 100_000, "Failed to load JSON"),
        ('{"fingerprint": "\\ud800"}', "placement: "),
        (_changed(epohc=4), 'no field named "epohc"'),
        (_changed(version=2), "got 2, want 1"),
        (_changed(version=None), "got 0, want 1"),
        (_changed(epoch="three"), "epoch field"),
        (_changed(epoch=True), "epoch field: Bool value True"),
        (_changed(epoch=-1), "epoch field: Value out of range"),
        (_changed(num_experts={"0-1": 0}), "layers 0-1: got 0"),
        (_changed(num_experts={"0-1": True}), "Bool value True is not acceptable"),
        (_changed(num_experts={"0-1": 8, "1": 8}), "layer 1 under two keys"),
        (_changed(num_experts={"0": 8}), "layer 1: got expert 3, want a layer of num_experts"),
        (_changed(num_experts={"0-1": 7}), "layer 0: got expert 7, want ids below 7"),
        (_changed(servers=[{"address": "a:1", "layers": {}, "x": 1}]), 'no field named "x"'),
        (_changed(servers=[{"address": "", "layers": {}}]), "server address: got ''"),
        (_changed(servers=[{"address": "a:1", "layers": {"0": [1]}}]), "Failed to parse layers field"),
        (_changed(servers=[{"address": "a:1", "layers": {"0": ""}}]), "a:1: layers 0: got '', want numbers and ranges"),
        (_changed(num_experts={"0-": 8}), "num_experts: got '0-', want numbers and ranges"),
        (_changed(servers=[{"address": "a:1", "layers": {}}] * 2), "a:1 twice"),
        ('{"version": 1, "version": 1, "num_experts": {}, "servers": []}', "duplicate key version"),
    ],
)
def test_json_is_strict(text: str | bytes, says: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(says)):
        Placement.from_json(text)


def _describe(
    held: dict[int, list[tuple[int, int]]], fingerprint: str = "f00d", n: int = 8, epoch: int = 0
) -> pb.DescribeResponse:
    layers = [
        pb.Layer(layer=i, num_experts=n, held=[pb.ExpertRange(first=a, count=c) for a, c in ranges])
        for i, ranges in held.items()
    ]
    model = pb.Model(family="mixtral", fingerprint=fingerprint, hidden_size=64)
    return pb.DescribeResponse(model=model, layers=layers, placement_epoch=epoch)


def test_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(PlacementError, match=re.escape(f"{file}: cannot be read: No such file")):
        Placement.from_file(file)
    file.write_text(TWO.to_json())
    assert Placement.from_file(file) == TWO
    file.write_text("{")
    with pytest.raises(PlacementError, match=re.escape(f"{file}: placement: Failed")):
        Placement.from_file(file)


def test_from_describe() -> None:
    a = _describe({0: [(0, 4)], 1: [(0, 4)]}, epoch=3)
    b = _describe({0: [(3, 1), (4, 4)], 1: [(4, 4)]}, epoch=2)
    assert Placement.from_describe({"a:1": a, "b:1": b}) == TWO
    assert Placement.from_describe({}) == Placement((), {})


def test_from_describe_refuses_mixed_models() -> None:
    a = _describe({0: [(0, 4)]})
    with pytest.raises(PlacementError, match=r"model of b:1: got mixtral .* fingerprint beef"):
        Placement.from_describe({"a:1": a, "b:1": _describe({0: [(4, 4)]}, fingerprint="beef")})
    with pytest.raises(PlacementError, match="got 16 at b:1, want 8"):
        Placement.from_describe({"a:1": a, "b:1": _describe({0: [(4, 4)]}, n=16)})
    with pytest.raises(PlacementError, match="want ids below 8"):
        Placement.from_describe({"a:1": _describe({0: [(4, 5)]})})
    with pytest.raises(PlacementError, match="want ids below 1048576"):  # and does not fill the memory
        Placement.from_describe({"a:1": _describe({0: [(0, 4_000_000_000)]}, n=4_000_000_000)})
