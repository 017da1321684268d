"""expertctl and the examples against a real server, run as a user runs them: the first command of each name as a
process, the others in this one."""

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import as_command
import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
from as_command import PATH, as_process, expertctl, run
from safetensors.torch import save_file

from expertctl import cli as client_cli
from expertctl.commands.health import wait_for
from expertd_server.commands import cli as server_cli

ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "client/examples" / name for name in ("numpy_client.py", "raw_grpcio.py", "torch_client.py")]
"""Those that take the address of a server and nothing else; tests/models and tests/client run the others."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_python_example(example, tiny_server):
    assert run(sys.executable, example, tiny_server).strip()


@pytest.mark.parametrize("tool", ["buf", "grpcurl"])
def test_json_example(tool, tiny_server, monkeypatch):
    """The script takes grpcurl where both are."""
    folders = [f for f in PATH.split(os.pathsep) if tool == "grpcurl" or not Path(f, "grpcurl").exists()]
    monkeypatch.setattr(as_command, "PATH", os.pathsep.join(folders))
    if shutil.which(tool, path=PATH) is None:
        pytest.skip(f"{tool} is not installed (make test installs buf where npm is)")
    said = run("sh", ROOT / "client" / "examples" / "json_call.sh", tiny_server)
    assert said.count("crc32") == 2


def test_load_like_a_model_that_generates(tiny_server):
    words = ["load", tiny_server, "--generate", 5, "--m", 2]
    rows = json.loads(expertctl(*words, "--depth", 48, "--json"))["rows"]
    assert [r["transport"] for r in rows] == ["shm", "inline"]
    for r in rows:
        assert (r["layers"], r["steps"], r["tokens"]) == (48, 5, 2)
        assert 0 < r["kernel_us"] < r["layer_us"]["p50"] <= r["layer_us"]["p99"]
        assert 24 * r["layer_us"]["p50"] < r["step_us"]["p50"] < 10 * 48 * r["layer_us"]["p99"]
        assert r["slowest"]["layer"] in (0, 1)
        assert r["layer_us"]["p999"] is r["step_us"]["p999"] is None, "too few to say"
    assert rows[0]["layer_us"]["p50"] < rows[1]["layer_us"]["p50"], "shared memory is faster"
    table = expertctl(*words)
    assert "one client, 2 tokens, 2 layers in turn, 5 steps" in table
    assert re.search(r"shared memory +│ +\d.*gRPC +│ +\d", table, re.S), table
    assert "gRPC" in expertctl(*words, "--unary")
    assert "want both: other loads have no steps" in expertctl("load", tiny_server, "--depth", 3, code=2)


@pytest.mark.parametrize("words", [[], ["--help"], ["one", "two"]])
def test_an_example_without_an_address_says_how_it_is_called(words):
    command = [sys.executable, ROOT / "client/examples/raw_grpcio.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (1, "usage: python raw_grpcio.py ADDRESS\n")


def test_every_example_is_run_by_a_test():
    tests = "".join(p.read_text() for p in (ROOT / "tests").glob("**/test_*.py"))
    for example in (ROOT / "client" / "examples").glob("*.py"):
        assert re.search(rf"\b{example.stem}(\.py)?\b", tests), example.name


def test_describe(tiny_server):
    table = expertctl("describe", tiny_server)
    assert re.search(r"0-1\s+│\s+0-7\s+│\s+8 │\s+2 │\s+128 │\s+int4_g128", table), table
    assert "H 256" in table
    assert re.search(r"transports +shm, gRPC\s+session +shm\b", table), table
    assert "verdict" not in table
    assert re.search(r"memory +weights 0\.\d\d, .*GiB as planned; [\d.]+ GiB free", table), table
    decisions = expertctl("describe", tiny_server, "--decisions")
    assert re.search(r"reference\s+│ eligible|reference\s+│ chosen", decisions), decisions
    assert "chosen" in decisions
    facts = json.loads(expertctl("describe", tiny_server, "--json"))
    assert facts["model"]["hidden_size"] == 256
    assert (facts["transports"], facts["session"]) == (
        ["shm"],
        {
            "transport": "shm",
            "refused": {
                "tcp": "the server has it off (no --tcp-listen); --tcp on switches it on, --tcp-listen HOST:PORT at"
                " that address"
            },
        },
    )
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    assert facts["layers"][0]["held"] == [{"first": 0, "count": 8}]
    assert facts["layers"][0]["verdicts"] == []
    assert int(facts["memory"]["weights_bytes"]) > 0 < int(facts["memory"]["free_bytes"])
    refused = json.loads(expertctl("describe", tiny_server, "--json", "--decisions"))["layers"][0]["verdicts"]
    assert any(v["refusals"] for v in refused)


def test_forward_in_each_way_gives_the_same_answer(tiny_server):
    def forward(*words):
        return json.loads(expertctl("forward", tiny_server, "--json", "--layer", 1, "--m", 5, "--seed", 3, *words))

    whole = forward("--synthetic")
    assert (whole["layer"], whole["tokens"], whole["routes_computed"]) == (1, 5, 10)
    assert whole["output"]["dtype"] == "bf16"
    assert whole["output"]["shape"] == [5, 256]
    assert whole["output"]["min"] < 0 < whole["output"]["max"]
    assert whole["timing"]["batch_tokens"] == 5
    for words in (["--digest"], ["--unary"], ["--digest", "--unary"]):
        other = forward("--synthetic", *words)["output"]
        assert other["crc32"] == whole["output"]["crc32"]
        assert other["sum_of_squares"] == pytest.approx(whole["output"]["sum_of_squares"], rel=1e-6)
    assert forward()["output"]["crc32"] == forward()["output"]["crc32"]  # drawn here: another draw, the same each time
    assert "crc32" in expertctl("forward", tiny_server)


def test_forward_of_files_and_into_a_file(tiny_server, tmp_path):
    torch.manual_seed(1)
    x, weights = torch.randn(3, 256).bfloat16(), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [2, -1], [7, 3]])
    tensors = tmp_path / "batch.safetensors"
    save_file({"hidden_states": x, "topk_ids": ids, "topk_weights": weights}, tensors)
    np.save(tmp_path / "x.npy", x.float().numpy().astype(ml_dtypes.bfloat16))
    np.save(tmp_path / "ids.npy", ids.numpy())
    np.save(tmp_path / "w.npy", weights.numpy())
    arrays = ["--hidden-states", tmp_path / "x.npy", "--topk-ids", tmp_path / "ids.npy"]
    arrays += ["--topk-weights", tmp_path / "w.npy"]
    one = json.loads(expertctl("forward", tiny_server, "--json", "--tensors", tensors))
    two = json.loads(expertctl("forward", tiny_server, "--json", *arrays, "--save", tmp_path / "out.npy"))
    assert one["output"] == two["output"]
    assert one["routes_computed"] == 5
    out = np.load(tmp_path / "out.npy")
    assert out.shape == (3, 256)
    assert out.sum() == pytest.approx(two["output"]["sum"], rel=1e-4)
    again = json.loads(
        expertctl("forward", tiny_server, "--json", "--hidden-states", tmp_path / "x.npy", "--output-dtype", "f32")
    )
    assert (again["tokens"], again["output"]["dtype"]) == (3, "f32")


def test_forward_and_load_with_outputs_in_e4m3(tiny_server, tmp_path):
    def forward(dtype, *words):
        return json.loads(expertctl("forward", tiny_server, "--json", "--output-dtype", dtype, *words))["output"]

    wide, small = forward("bf16"), forward("e4m3", "--save", tmp_path / "out.npy")
    assert (small["dtype"], small["shape"]) == ("e4m3", wide["shape"])
    assert small["sum_of_squares"] == pytest.approx(wide["sum_of_squares"], rel=0.05)
    saved = np.load(tmp_path / "out.npy")
    assert saved.dtype == np.float32
    assert float(saved.max()) == pytest.approx(small["max"])
    load = ["load", tiny_server, "--json", "--requests", 20, "--warmup", 2, "--output-dtype"]
    (report,) = json.loads(expertctl(*load, "e4m3"))["runs"]
    assert (report["answered"], report["failed"]) == (20, 0)


@pytest.mark.parametrize(("loop", "name"), [(["--concurrency", 3], "closed"), (["--rate", 200], "open")])
@pytest.mark.parametrize(
    "message", [[], ["--synthetic", "--digest", "--routing", "zipf:1.1"], ["--unary", "--streams", 2]]
)
def test_load(tiny_server, loop, name, message):
    words = ["--m", 2, "--requests", 60, "--warmup", 4, *loop, *message]
    (report,) = json.loads(expertctl("load", tiny_server, "--json", *words))["runs"]
    assert (report["answered"], report["failed"], report["errors"]) == (60, 0, {})
    assert report["routes_computed"] == 60 * 2 * 2
    assert report["plan"]["loop"] == name
    assert report["plan"]["layers"] == [0, 1]
    latency = report["latency_us"]
    assert latency["count"] == 60
    assert 0 < latency["min"] <= latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    assert (report["lateness_us"] is None) == (name == "closed")
    assert report["tokens_per_s"] == pytest.approx(2 * report["requests_per_s"])
    assert report["server"]["kernel_ns"] > 0
    assert report["server"]["batch_tokens"] >= 2
    assert sum(report["backends"].values()) == 60


def test_load_for_people(tiny_server):
    table = expertctl("load", tiny_server, "--requests", 20, "--layers", "1", "--concurrency", 2)
    for word in (
        "p50",
        "p95",
        "p99",
        "tokens/s",
        "queue",
        "kernel",
        "closed loop, 2 clients",
        "layer 1",
        "shared memory",
    ):
        assert word in table, table
    table = expertctl("load", tiny_server, "--duration", "0.3", "--rate", 50, "--arrivals", "fixed")
    assert "lateness" in table
    assert "fixed gaps" in table


def test_what_the_server_refuses_is_a_reason(tiny_server):
    assert "DEADLINE_EXCEEDED" in expertctl("forward", tiny_server, "--timeout", "0.001ms", code=1)
    with_json = expertctl("forward", tiny_server, "--json", "--m", 5000, code=1)
    error = json.loads(with_json)["error"]
    assert error["reason"] in ("TOO_MANY_TOKENS", "MESSAGE_TOO_LARGE")
    assert (error["retryable"], bool(error["message"])) == (False, True)
    words = ["--m", 5000, "--requests", 3, "--warmup", 0]
    (report,) = json.loads(expertctl("load", tiny_server, "--json", *words, code=1))["runs"]
    assert report["answered"] == 0
    assert report["errors"] == {error["reason"]: 3}


SAYS = "got Connection refused, want an expertd server that listens there"


@pytest.mark.parametrize("words", [["describe"], ["forward"], ["load"], ["trace"], ["record", "-o", "/tmp/never"]])
def test_nobody_there(words):
    text = expertctl(words[0], "127.0.0.1:1", *words[1:], code=1)
    assert text == f"expertctl: UNAVAILABLE: 127.0.0.1:1: {SAYS}\n"


@pytest.mark.parametrize("words", [["describe"], ["health"], ["load"], ["versions"]], ids=" ".join)
def test_another_service_at_that_address_is_told_apart(words):
    """The admin address is gRPC without ExpertService; the metrics address is HTTP."""
    service = "grpc.health.v1.Health" if words == ["health"] else "expertd.v1.ExpertService"
    listen = "want an expertd server: its gRPC address (--listen of expertd serve, by default port 50051)"
    admin = grpc.server(ThreadPoolExecutor(1))
    port = admin.add_insecure_port("127.0.0.1:0")
    admin.start()
    try:
        said = expertctl(*words, f"127.0.0.1:{port}", code=1)
    finally:
        admin.stop(0)
    assert f" 127.0.0.1:{port}: got a gRPC server without {service}, {listen}\n" in said
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as metrics:
        Thread(target=metrics.serve_forever, daemon=True).start()
        said = expertctl(*words, f"127.0.0.1:{metrics.server_port}", code=1)
        metrics.shutdown()
    assert (
        f"127.0.0.1:{metrics.server_port}: got a server that speaks HTTP/1, as expertd's metrics address does" in said
    )
    assert listen in said


def test_the_tcp_transport_at_that_address_is_told_apart():
    """It resets a connection that does not begin as its own do."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        over = Event()

        def reset():
            while True:
                accepted, _ = listener.accept()
                if over.is_set():
                    accepted.close()
                    return
                accepted.recv(24)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

        thread = Thread(target=reset, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            said = expertctl("describe", address, code=1)
        finally:
            over.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()
    assert "want an expertd server that listens there: its address is that of --listen, not that of the TCP" in said


def test_somebody_who_never_answers():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = "got no answer in time, want one; look whether it serves there, or give it more time"
        text = expertctl("health", address, "--timeout", 0.3, code=1)
        assert text == f"DEADLINE_EXCEEDED: {address}: {said}\n"


@pytest.mark.parametrize(
    ("words", "code", "want"),
    [
        (["record", "A", "-o", "."], 2, "--output: got the folder '.', want a file"),
        (["record", "A", "-o", "/no/such/r.npz"], 2, "got '/no/such/r.npz', in a folder that is not there"),
        (["record", "A", "-o", "/tmp/never", "--listen", "A"], 1, "HERE: cannot listen there: Address already in use"),
        (["trace", "A", "--out", "/no/such/t.json"], 2, "in a folder that is not there"),
        (["forward", "A", "--save", "."], 2, "want a file"),
        (["apply", "/no/such/p.json"], 2, "BAD_PLACEMENT: /no/such/p.json: cannot be read: No such file"),
        (["apply", "README.md"], 2, "BAD_PLACEMENT: README.md: placement: Failed to load JSON"),
        (["replay", "README.md", "A"], 2, "README.md: cannot be read as a recording: it is no .npz file; want what"),
        (["simulate", "--failures", "-3"], 2, "got '-3', want a number >= 0"),
        (["simulate", "--hangs", "7"], 2, "got '7', want a share from 0 to 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_file_or_number_that_is_none_is_named_before_anything_is_done(tiny_server, words, code, want):
    listens = "--listen" in words  # gRPC writes by itself, past Python's streams
    words = [tiny_server if w == "A" else w for w in words]
    text = (as_process if listens else expertctl)(*words, code=code)
    assert want.replace("HERE", tiny_server) in text
    assert "Traceback" not in text
    assert "grpc" not in text.lower(), "its own log says nothing"


def test_who_reads_no_further_gets_no_traceback(tiny_server):
    command = f"{sys.executable} -m expertctl.cli describe {tiny_server} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["load", "--layers", "7"], "layers: got [7]"),
        (["load", "--layers", "3-1"], "0-3,7"),
        (["load", "--top-k", "9"], "top_k: got 9"),
        (["load", "--rate", "0"], "> 0"),
        (["load", "--concurrency", "0"], ">= 1"),
        (["forward", "--layer", "9"], "layers: got [9]"),
        (["forward", "--synthetic", "--tensors", "x"], "--synthetic: got files"),
        (["forward", "--digest", "--save", "x"], "--save: got --digest"),
        (["forward", "--hidden-states", "no.npy"], "no.npy: cannot be read"),
        (["forward", "--tensors", "README.md"], "README.md: cannot be read as a .safetensors file"),
        (["forward", "--m", "-1"], ">= 0"),
        (["no-such-command"], "got 'no-such-command', want"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_right(tiny_server, words, want):
    text = expertctl(words[0], tiny_server, *words[1:], code=2)
    assert want in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("module", "words"), [(client_cli, ["describe", "A"]), (server_cli, ["serve", "--synthetic", "tiny:bf16"])]
)
def test_ctrl_c_while_a_command_is_imported(module, words, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.importlib, "import_module", interrupted)
    assert module.main(words) == 130


def test_bench_codec_is_there():
    rows = json.loads(expertctl("bench", "codec", "--json", "--sizes", "8192", "--seconds", "0.1"))["rows"]
    assert rows[0]["bytes"] == 8192
    assert rows[0]["expertd_us"] > 0


def test_health(tiny_server):
    assert expertctl("health", tiny_server) == "SERVING\n"
    began = time.monotonic()
    assert expertctl("health", "127.0.0.1:1", code=1) == f"UNAVAILABLE: 127.0.0.1:1: {SAYS}\n"
    assert time.monotonic() - began < 10


def test_the_time_that_health_waits_is_a_time(tiny_server):
    assert expertctl("health", tiny_server, "--wait", "1m") == "SERVING\n"
    assert expertctl("health", tiny_server, "--wait", "0") == "SERVING\n"
    assert "want a time > 0" in expertctl("health", tiny_server, "--wait", "1x", code=2)


def test_health_waits_until_it_serves():
    answers = iter(["UNAVAILABLE: refused", "NOT_SERVING", "SERVING", "NOT_SERVING"])
    now = [0.0]
    status = wait_for(lambda: next(answers), 60, lambda: now[0], lambda s: now.__setitem__(0, now[0] + s))
    assert (status, next(answers)) == ("SERVING", "NOT_SERVING")
    assert wait_for(lambda: "NOT_SERVING", 1, lambda: now[0], lambda s: now.__setitem__(0, now[0] + s)) == "NOT_SERVING"
    assert now[0] < 3


def test_expertctl_asks_for_it(tiny_server):
    def forward(*words):
        return json.loads(expertctl("forward", tiny_server, "--json", "--m", 3, *words))["output"]

    plain, e4m3 = forward(), forward("--wire-dtype", "e4m3")
    assert plain["crc32"] != e4m3["crc32"]
    assert e4m3["sum_of_squares"] == pytest.approx(plain["sum_of_squares"], rel=0.1)
    found = json.loads(
        expertctl("load", tiny_server, "--json", "--requests", 20, "--warmup", 2, "--wire-dtype", "e4m3")
    )
    (report,) = found["runs"]
    assert (found["wire_dtype"], report["answered"], report["errors"]) == ("e4m3", 20, {})
    refused = expertctl("load", tiny_server, "--requests", 1, "--synthetic", "--wire-dtype", "e4m3", code=2)
    assert "nothing is sent of what is drawn" in refused
