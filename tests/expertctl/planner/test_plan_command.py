"""expertctl plan: its files, what it scrapes, what it prints."""

from __future__ import annotations

import argparse
import http.server
import json
import threading

import numpy as np
import pytest

from expertctl.cli import main
from expertctl.commands import plan
from expertctl.planner import observe
from expertctl.planner.observe import Counters, Machine
from expertd.errors import PlacementError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb

pytestmark = pytest.mark.timeout(30)

TEXT = """# HELP expertd_expert_tokens_total Routes served, by expert.
# TYPE expertd_expert_tokens_total counter
expertd_expert_tokens_total{layer="0",expert="0"} 30.0
expertd_expert_tokens_total{layer="0",expert="1"} 1e+01
expertd_kernel_seconds_sum{backend="cpu"} 0.5
expertd_kernel_seconds_sum{backend="cpu_torch"} 1.5
expertd_kernel_seconds_count{backend="cpu"} 7.0
"""


@pytest.fixture
def folder(tmp_path):
    loads = {str(n): [10.0 * (e + 1) for e in range(6)] for n in range(2)}
    (tmp_path / "loads.json").write_text(json.dumps(loads))
    servers = {f"s{n}:1": {"speed": 1.0 + n, "experts": 4, "host": f"h{n}"} for n in range(3)}
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    return tmp_path


def offline(folder, *more: str) -> list[str]:
    return [
        "plan",
        "--offline",
        "--servers",
        str(folder / "servers.json"),
        "--trace",
        str(folder / "loads.json"),
        *more,
    ]


def test_files_alone_make_a_placement_and_pictures(folder, capsys):
    out, picture = folder / "placement.json", folder / "plan.svg"
    assert main(offline(folder, "-o", str(out), "--svg", str(picture))) == 0
    placement = Placement.from_json(out.read_text())
    assert placement.epoch == 1
    assert not placement.missing()
    assert max(len(e) for s in placement.servers for e in s.layers.values()) <= 4
    text = capsys.readouterr().out
    assert "copies of experts in all" in text
    assert "s2:1" in text
    assert picture.read_text().startswith("<svg")
    assert "s2:1" in picture.read_text()


def test_a_placement_in_force_is_changed_by_few_moves(folder, capsys):
    assert main(offline(folder, "--extra", "0", "--json")) == 0
    first = Placement.from_json(capsys.readouterr().out)
    (folder / "now.json").write_text(first.to_json())
    loads = {str(n): [60.0 - 10.0 * e for e in range(6)] for n in range(2)}
    (folder / "loads.json").write_text(json.dumps(loads))
    assert main(offline(folder, "--current", str(folder / "now.json"), "--max-moves", "2", "--json")) == 0
    second = Placement.from_json(capsys.readouterr().out)
    held = [{(s.address, n, e) for s in p.servers for n, ids in s.layers.items() for e in ids} for p in (first, second)]
    assert 0 < len(held[1] - held[0]) <= 2
    assert second.epoch == first.epoch + 1


def test_counters_are_read_as_prometheus_writes_them():
    found = observe.counters(TEXT)
    assert found.routes == {(0, 0): 30.0, (0, 1): 10.0}
    assert found.kernel_s == 2.0
    assert found.speed == 20.0
    later = Counters({(0, 0): 50.0, (0, 1): 10.0}, 2.5)
    assert later.since(found) == Counters({(0, 0): 20.0, (0, 1): 0.0}, 0.5)
    assert found.since(later) == found, "the server was started anew meanwhile"
    assert observe.loads_of([found, later], {0: 3})[0].tolist() == [80.0, 20.0, 0.0]


def test_they_are_scraped_over_http():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *args):
            """Not to the test's output."""

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = observe.scrape({"a:1": f"127.0.0.1:{server.server_port}"})
        thread.join(10)
        assert found["a:1"].speed == 20.0


def described(held: int, weights: int, limit=0, free=0, loading=100) -> pb.DescribeResponse:
    layers = [
        pb.Layer(layer=n, num_experts=8, held=[pb.ExpertRange(first=0, count=held)]) for n in range(2 * bool(held))
    ]
    memory = pb.Memory(weights_bytes=weights, limit_bytes=limit, free_bytes=free, context_bytes=1000)
    memory.loading_bytes = loading if held else 0
    return pb.DescribeResponse(layers=layers, memory=memory, load=pb.Load(token_ns=1e6))


def test_room_and_speed_come_from_what_servers_say():
    """4 experts of 2 layers in 800 bytes: 100 each; one layer of three is kept free for moving."""
    answers = {"a": described(4, 800, limit=2300), "b": described(4, 800, free=700), "new": described(0, 0, limit=2300)}
    machines = {name: Machine() for name in answers} | {"c": Machine(speed=5.0, experts=3), "d": Machine(drain=True)}
    found = {p.address: p for p in observe.places_of(machines, answers, {}, layers=2)}
    assert (found["a"].experts, found["a"].total) == (8, True)  # (2300 - 1000 - 100) / 100 * 2 / 3
    assert found["b"].experts == 9  # (800 + 700 - 100) / 100 * 2 / 3
    assert found["new"].experts == 8
    assert (found["c"].experts, found["c"].total, found["d"].experts) == (3, False, 0)
    assert found["a"].speed == 1000.0
    counted = {"a": Counters({(0, 0): 500.0}, 0.1)}
    assert {p.address: p.speed for p in observe.places_of(machines, answers, counted, 2)}["a"] == 5000.0
    with pytest.raises(PlacementError, match=r'x: room: got nothing .* "experts" in the inventory'):
        observe.places_of({"x": Machine()}, {}, {}, 2)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("servers.json", "[]", "want an object"),
        ("servers.json", '{"a:1": {"sped": 1}}', "'sped': 1, want some of metrics, speed"),
        ("servers.json", '{"a:1": {"drain": 1}}', "'drain': 1"),
        ("servers.json", "{", "cannot be read"),
        ("servers.json", "{}", "servers: got none"),
        ("loads.json", '{"0": [1, -1]}', "got layer 0, want"),
        ("loads.json", "{}", "got nothing"),
        ("loads.json", '{"x": [1]}', "is no trace of loads"),
        ("loads.json", '{"0": [[1]]}', "got layer 0"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(folder, capsys, name, text, complaint):
    (folder / name).write_text(text)
    assert main(offline(folder)) == 2
    assert complaint in capsys.readouterr().err


def test_a_trace_may_be_an_array(folder, capsys):
    np.save(folder / "loads.npy", np.arange(12.0).reshape(2, 6))
    command = offline(folder, "--json")
    command[command.index("--trace") + 1] = str(folder / "loads.npy")
    assert main(command) == 0
    assert Placement.from_json(capsys.readouterr().out).num_experts == {0: 6, 1: 6}


def test_without_a_load_nothing_is_planned(folder, capsys):
    assert main(["plan", "--offline", "--servers", str(folder / "servers.json")]) == 2
    assert "load: got none, want --trace FILE, or --metrics PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("window", "remedy"), [(None, "wait for calls"), (60.0, "send calls during --window, or leave it out")]
)
def test_no_load_says_what_to_do_about_it(window, remedy):
    args = argparse.Namespace(trace=None, window=window, record=None)
    with pytest.raises(PlacementError, match=f"none that any server counted, want some; {remedy}"):
        plan._loads(args, Placement((), {0: 4}), {"a:1": Counters()})
