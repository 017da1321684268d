"""The placement: ranges, JSON both ways, look-ups, coverage, and what servers say of themselves."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
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
    with pytest.raises(PlacementError, match=r"^placement: experts 4-7 of layers 0-1 have no server; want"):
        half.check_complete()
    some = Placement([Server("a:1", {0: tuple(range(6)), 1: tuple(range(8)), 2: (1,)})], {0: 8, 1: 8, 2: 2})
    with pytest.raises(PlacementError, match="experts 6-7 of layer 0, experts 0 of layer 2 have no server"):
        some.check_complete()


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
    with pytest.raises(PlacementError, match="want ids below 65536"):  # and does not fill the memory
        Placement.from_describe({"a:1": _describe({0: [(0, 4_000_000_000)]}, n=4_000_000_000)})


def _small(**changes: object) -> str:
    return json.dumps({"version": 1, "num_experts": {"0": 8}, "servers": [], **changes})


_SERVER = {"address": "a:1", "layers": {"0": "0-7"}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_small(num_experts={"0-1048575": 1048576}), "got 1048576, want 1 to 65536"),
        (_small(num_experts={"0-1048575": 65536}), "1048576 numbers, want at most 8"),
        (_small(num_experts={"0-1048575": 1}), "1048576 numbers, want at most 4096"),
        (_small(servers=[{"address": "a:1", "layers": {"0-1048575": "0"}}], num_experts={"0-1000": 8}), "want at most"),
        (_small(servers=[{"address": "a:1", "layers": {"0": "0-1048575"}}]), "want at most 65536"),
        (_small(servers=[_SERVER] * 16385), "servers: got 16385, want at most 16384"),
        ('{"servers": [' + ",".join(["{}"] * 1_000_000) + "]}", "servers: got 1000000, want at most 16384"),
        (_small(servers=[{"address": "a" * (9 << 20), "layers": {}}]), "bytes, want at most"),
        (_small(servers=[{**_SERVER, "address": "evil\n:1"}]), "server address"),
        (_small(servers=[{**_SERVER, "address": "unix-abstract:a\0b"}]), "server address"),
    ],
)
def test_a_small_file_takes_no_large_memory(text: str, says: str) -> None:
    begun = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(PlacementError, match=re.escape(says)):
            Placement.from_json(text)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text) + (1 << 24)
    finally:
        tracemalloc.stop()
    assert time.process_time() - begun < 15


def test_a_large_placement_is_read_and_its_replicas_found() -> None:
    """Every server holds all: as many tuples as experts, whose lengths are the servers'."""
    servers = tuple(Server(f"10.0.{i // 256}.{i % 256}:7070", {0: tuple(range(64))}) for i in range(4096))
    begun = time.process_time()
    p = Placement.from_json(Placement(servers, {0: 64}).to_json())
    assert len(p.holders(0, 63)) == 4096
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    "layer",
    [
        pb.Layer(layer=0, num_experts=2**32 - 1, held=[pb.ExpertRange(first=0, count=2**32 - 1)]),
        pb.Layer(layer=0, num_experts=8, held=[pb.ExpertRange(first=2**32 - 2, count=4)]),
        pb.Layer(layer=0, num_experts=1 << 20, held=[pb.ExpertRange(first=0, count=1 << 20)] * 20_000),
    ],
)
def test_what_a_server_says_of_itself_is_bounded(layer: pb.Layer) -> None:
    begun = time.process_time()
    with pytest.raises(PlacementError, match=r"at most|ids below"):
        Placement.from_describe({"a:1": pb.DescribeResponse(layers=[layer])})
    assert time.process_time() - begun < 10


def test_ranges_that_overlap_are_one() -> None:
    layer = pb.Layer(layer=0, num_experts=8, held=[pb.ExpertRange(first=2, count=3)] * 20_000)
    p = Placement.from_describe({"a:1": pb.DescribeResponse(layers=[layer])})
    assert p.servers[0].layers == {0: (2, 3, 4)}


@pytest.mark.parametrize(("first", "count", "fits"), [(0, 4, True), (3, 1, True), (3, 2, False), (4, 1, False)])
def test_a_server_holds_no_expert_that_the_layer_has_not(first: int, count: int, fits: bool) -> None:
    held = [pb.ExpertRange(first=first, count=count)]
    answer = pb.DescribeResponse(layers=[pb.Layer(layer=7, num_experts=4, held=held)])
    if fits:
        assert Placement.from_describe({"a:1": answer}).servers[0].layers == {7: tuple(range(first, first + count))}
    else:
        with pytest.raises(
            PlacementError, match=f"a:1: layer 7: got experts up to {first + count - 1}, want ids below 4"
        ):
            Placement.from_describe({"a:1": answer})
