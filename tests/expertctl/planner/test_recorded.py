"""Servers that do not run yet enter a plan by surfaces that others of their kind measured."""

import json
import re

import pytest

import expertd
from expertctl.cli import main
from expertctl.planner.recorded import read, require_alike, write
from expertd.errors import PlacementError
from expertd.placement import Placement, Server
from expertd.v1 import expert_service_pb2 as pb

GRID = [(e, e * r) for e in (1, 4, 8) for r in (1, 16, 64)]


def described(version=expertd.__version__, fingerprint="abc", us=10.0):
    points = [pb.SurfacePoint(experts=e, routes=n, microseconds=us * e + 0.1 * n) for e, n in GRID]
    part = pb.LayerPart(device="xpu:0", held=[pb.ExpertRange(first=0, count=8)], surface=points)
    layer = pb.Layer(layer=3, num_experts=8, top_k=2, parts=[part])
    return pb.DescribeResponse(version=version, model=pb.Model(fingerprint=fingerprint), layers=[layer])


@pytest.fixture
def folder(tmp_path):
    """Surfaces of an XPU's and an AMD GPU's host, an inventory, and a load."""
    write(tmp_path / "surfaces.json", {"xpu:1": described(us=10.0), "amd:1": described(us=5.0)})
    machines = {"xpu:1": {"experts": 6, "host": "x"}, "amd:1": {"experts": 6, "host": "y", "delay_us": 2000}}
    (tmp_path / "servers.json").write_text(json.dumps(machines))
    (tmp_path / "loads.json").write_text(json.dumps({"0": [1.0] * 8, "1": [1.0] * 8}))
    return tmp_path


def plan(folder, *more):
    files = ("--surfaces", "surfaces", "--servers", "servers", "--trace", "loads")
    named = [x if x.startswith("--") else str(folder / f"{x}.json") for x in files]
    return main(["plan", "--offline", *named, *more])


def test_what_was_written_is_read(folder):
    found = read(folder / "surfaces.json")
    assert list(found) == ["xpu:1", "amd:1"]
    part = found["xpu:1"].parts[0]
    assert (part.device, part.held, found["xpu:1"].top_k) == ("xpu:0", frozenset(range(8)), 2)
    assert list(part.surface.points) == [(e, n, pytest.approx(10.0 * e + 0.1 * n, rel=1e-6)) for e, n in GRID]
    require_alike(folder / "surfaces.json", found, {"other": described()})


def test_servers_that_do_not_run_are_planned_by_their_surfaces(folder, capsys):
    out = folder / "placement.json"
    assert plan(folder, "-o", str(out)) == 0
    placement = json.loads(out.read_text())
    assert {s["address"] for s in placement["servers"]} == {"xpu:1", "amd:1"}
    text = capsys.readouterr().out
    assert "expected time of a layer" in text
    times = [float(n.replace(",", "")) for n in re.findall(r"([\d,]+) us", text)]
    assert len(times) == 3
    assert min(times) > 1000, "the network's delay is in it"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "0.0.1"}, rf"xpu:1: version: got 0.0.1, want {expertd.__version__}.*record it again"),
        ({"fingerprint": "other"}, "model: got"),
        ({"parts": []}, "no parts"),
        (
            {"parts": [{"device": "xpu:0", "held": "0-7", "surface": [[4, 1, 5.0]]}]},
            r"\[4, 1, 5.0\] is no point of xpu:0",
        ),
        ({"top_k": "many"}, "has no surfaces"),
    ],
)
def test_surfaces_of_another_version_or_model_or_none_are_refused(folder, change, says):
    file = folder / "surfaces.json"
    rows = json.loads(file.read_text())
    rows["xpu:1"] |= change
    file.write_text(json.dumps(rows))
    with pytest.raises(PlacementError, match=says):
        require_alike(file, read(file), {"a": described()})


def test_the_command_says_so(folder, capsys):
    (folder / "surfaces.json").write_text("{")
    assert plan(folder) != 0
    assert "want what --record-surfaces writes" in " ".join(capsys.readouterr().err.split())


def test_a_trace_of_another_model_is_refused(folder, capsys):
    current = Placement((Server("xpu:1", {0: tuple(range(16))}),), {0: 16})
    (folder / "current.json").write_text(current.to_json())
    assert plan(folder, "--current", str(folder / "current.json")) != 0
    assert "got 8 numbers, want 16" in " ".join(capsys.readouterr().err.split())
