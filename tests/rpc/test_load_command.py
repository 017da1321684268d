"""expertctl load beyond one run: sweeps, ramps, promises, Ctrl-C, reports, the echo server."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from as_command import expertctl

from expertctl.common.echo import echo_server


def test_a_sweep_of_callers(tiny_server, tmp_path):
    words = ["--concurrency", "1,4", "--requests", 40, "--html", tmp_path / "r.html"]
    found = json.loads(expertctl("load", tiny_server, "--json", *words))
    assert [r["plan"]["concurrency"] for r in found["runs"]] == [1, 4]
    assert [r["answered"] for r in found["runs"]] == [40, 40]
    assert "Latency and throughput" in (tmp_path / "r.html").read_text()
    table = expertctl("load", tiny_server, "--rate", "200,400", "--duration", 0.3)
    assert "200 requests/s" in table
    assert "400 requests/s" in table


def test_what_other_load_generators_call_their_options(tiny_server):
    words = ["-n", "30", "-c", "2", "-z", "20s", "-m", "3", "--timeout", "9s", "--json"]
    whole = json.loads(expertctl("load", tiny_server, *words))
    (found,) = whole["runs"]
    assert (found["answered"], found["plan"]["concurrency"], found["plan"]["tokens"]) == (30, 2, 3)
    assert found["plan"]["duration_s"] == 20
    assert (whole["transport"], found["transports"]) == ("shm", {"shm": 30})
    assert found["latency_us"]["p999"] is None, "thirty answers say nothing of one in a thousand"
    unary = expertctl("load", tiny_server, "-n", "3", "--unary")
    assert "gRPC, one call for each request" in " ".join(unary.split())
    assert "want a time > 0, for example 10s" in expertctl("load", tiny_server, "-z", "10 parsecs", code=2)


def test_requests_that_go_over_grpc_are_counted_as_such(tiny_server):
    few = ["load", tiny_server, "-n", "6", "--json"]
    digests = json.loads(expertctl(*few, "--digest"))
    assert (digests["transport"], digests["runs"][0]["transports"]) == ("shm", {"inline": 6})
    said = " ".join(expertctl("load", tiny_server, "-n", "6", "--digest").split())
    assert "gRPC, 1 connection" in said
    assert "shared memory" not in said
    chosen = json.loads(expertctl(*few, "--transport", "grpc"))
    assert (chosen["transport"], chosen["runs"][0]["transports"]) == ("inline", {"inline": 6})
    assert json.loads(expertctl(*few, "--transport", "shm"))["runs"][0]["transports"] == {"shm": 6}


def test_a_timeout_of_requests_is_none_of_describe(tiny_server):
    words = ["load", tiny_server, "-n", "6", "--timeout", "1us", "--concurrency", "1"]
    said = expertctl(*words, "--warmup", "1", code=1)
    assert "DEADLINE_EXCEEDED 6" in said
    assert re.search(r"first failure +after \d+\.\d\d s: DEADLINE_EXCEEDED: ", said)


def test_a_ramp(tiny_server, tmp_path):
    words = ["load", tiny_server, "--rate", "20..380", "--duration", 1, "--arrivals", "fixed", "--json"]
    whole = json.loads(expertctl(*words, "--hdr", tmp_path / "r.hgrm", "--routing", "hot:2:0.9"))
    (found,) = whole["runs"]
    assert (found["plan"]["rate"], found["plan"]["rate_to"], found["plan"]["loop"]) == (20, 380, "open")
    assert found["answered"] == pytest.approx(200, abs=2)
    half = [s["answered"] for s in found["series"] if s["end_s"] <= 0.5]
    assert sum(half) < 90  # 55 are due by then, and 145 in the second half
    assert whole["routing"] == "hot:2:0.9"
    assert "Percentile" in (tmp_path / "r.hgrm").read_text()


def test_what_is_written_is_named(tiny_server, tmp_path):
    page, histogram = tmp_path / "r.html", tmp_path / "r.hgrm"
    words = ["load", tiny_server, "-n", "3", "--html", page, "--hdr", histogram, "--json"]
    command = [sys.executable, "-m", "expertctl.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert f"wrote {page}\nwrote {histogram}\n" in done.stderr
    assert json.loads(done.stdout)["runs"]


def test_a_promise(tiny_server):
    words = ["load", tiny_server, "--slo", "p90<2s", "--duration", 0.2, "--repeats", 2, "--json", "--m", 1]
    found = json.loads(expertctl(*words))["slo"]
    assert found["rate"] > 10
    assert found["slo"] == "p90 < 2 s"
    assert found["late_share_at_most"] <= 0.1
    assert found["confidence"] == 0.95
    assert all(t["met"] for t in found["trials"][-2:])
    said = expertctl("load", tiny_server, "--slo", "p50<1us", "--duration", 0.05)
    assert "no rate meets p50 < 1 us" in said or "the load generator sent too late even at" in said


def read_until(terminal, pattern):
    """What comes there, until the pattern does or nothing more."""
    said = ""
    while not re.search(pattern, said):
        try:
            said += os.read(terminal, 1 << 16).decode()
        except OSError:
            break
    return said


@pytest.mark.parametrize("words", [["--rate", "50"], [], ["--concurrency", "2,3"]])
def test_ctrl_c_leaves_a_report(tiny_server, words, tmp_path):
    page = tmp_path / "r.html"
    command = [sys.executable, "-m", "expertctl.cli", "load", tiny_server, "--duration", "30", "--json", *words]
    terminal, its_end = pty.openpty()  # standard error: where it goes on, it shows how
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([*command, "--html", page], stdout=subprocess.PIPE, stderr=its_end, text=True, env=env)
    os.close(its_end)
    err = read_until(terminal, r" [1-9][\d,]* ok ")
    read_until(terminal, r" [1-9]\d[\d,]* ok ")
    os.kill(child.pid, signal.SIGINT)
    threading.Thread(target=read_until, args=(terminal, "$^"), daemon=True).start()
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["runs"][-1]["answered"] >= 10
    assert 0 < found["runs"][-1]["wall_s"] < 30, "it did not run to its end"
    assert "Interrupted" in page.read_text()


def test_the_echo_server():
    found = json.loads(expertctl("load", "--echo", "--hidden-size", 256, "--requests", 50, "--json"))
    assert found["runs"][0]["backends"] == {"echo": 50}
    assert found["echo"] is True


@pytest.mark.timeout(120)  # three servers and four commands, each a process that imports what it needs
def test_several_servers_are_one_cluster(tmp_path):
    with ExitStack() as stack:
        shards = [("--experts", "9", "--shard", f"{n}/3") for n in range(3)]
        servers = [stack.enter_context(echo_server(256, 64, *shard)) for shard in shards]
        words = ["--requests", 40, "--top-k", 2, "--streams", 2, "--html", tmp_path / "r.html"]
        whole = json.loads(expertctl("load", *servers, *words, "--json"))
        (found,) = whole["runs"]
        assert set(found["transports"]) <= {"shm", "inline"}
        assert sum(found["transports"].values()) >= sum(one["parts"] for one in found["by_server"])
        assert (found["answered"], found["errors"]) == (40, {})
        assert found["routes_computed"] == 40 * 8 * 2, "each third of the experts computed its own"
        assert (whole["address"], whole["servers"]) == (" ".join(servers), "a cluster of 3 servers")
        each = found["by_server"]
        assert [one["server"] for one in each] == servers
        assert sum(one["routes"] for one in each) == found["routes_computed"]
        assert all(0 < one["parts"] <= 40 and one["backends"] == {"echo": one["parts"]} for one in each)
        assert max(one["latency_us"]["max"] for one in each) <= found["latency_us"]["max"]
        page = (tmp_path / "r.html").read_text()
        assert all(f"<td>{one['server']}</td><td>echo</td><td>{one['parts']}</td>" in page for one in each)
        assert page.count("Plotly.newPlot(") == 3
        text = " ".join(expertctl("load", *servers, "--rate", 50, "--requests", 10).split())
        assert "layer 0, a cluster of 3 servers, shared memory, 1 connection" in text
        assert "last server" in text
        assert all(f"{server} │ echo │" in text for server in servers)
        sweep = expertctl("load", *servers, "--concurrency", "1,2", "--requests", 10)
        assert all(len(re.findall(rf"^{n} clients? +│ {server} │", sweep, re.M)) == 1
                   for n in (1, 2) for server in servers)  # fmt: skip
        third = json.loads(expertctl("load", servers[0], "--requests", 40, "--top-k", 2, "--json"))["runs"][0]
        assert third["routes_computed"] == pytest.approx(each[0]["routes"], rel=0.2), "alone it computes its own"
        assert "by_server" not in third


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["A", "A", "--unary"], "--unary: got 2 servers with it, want one: a cluster keeps a stream to each"),
        (["A", "A", "--synthetic"], "--synthetic: got 2 servers with it"),
        (["A", "A", "--digest"], "--digest: got 2 servers with it"),
        (["A", "A", "--generate", "2"], "expertctl trace"),
        (
            ["A", "A", "--output-dtype", "e4m3"],
            "--output-dtype e4m3: got 2 servers with it, want one: partial sums have to be",
        ),
        ([], "ADDRESS and --echo: got neither"),
        (["A", "--echo"], "got both"),
        (["A", "--slo", "p99<1s", "--rate", "5"], "--slo: got --rate"),
        (["A", "--slo", "p99<1s", "--concurrency", "1,2"], "--slo: got a sweep"),
        (["A", "--rate", "5,6", "--concurrency", "1,2"], "--concurrency: got --rate with it"),
        (["A", "--rate", "5", "--concurrency", "2"], "--concurrency: got --rate with it"),
        (["A", "--transport", "tcp"], "--transport tcp: got a server, "),
        (["A", "--transport", "tcp"], "that does not take it: "),
        (["A", "--transport", "shm", "--unary"], "--transport shm: got --unary with it"),
        (["A", "--transport", "shm", "--generate", "2"], "--transport: got --generate with it"),
        (["A", "--rate", "5..6", "--requests", "3"], "want --duration: its end"),
        (["A", "--rate", "5..0"], "> 0"),
        (["A", "--rate", "5,6", "--hdr", "x"], "--hdr: got a sweep"),
        (["A", "--html", "/no/such/folder/r.html"], "a folder that is not there"),
        (["A", "--synthetic", "--routing", "incast"], "servers draw no others"),
        (["A", "--routing", "recorded:nothing.npz"], "nothing.npz: cannot be read as a recording"),
    ],
)
def test_what_does_not_go_together(tiny_server, words, want):
    said = expertctl("load", *(tiny_server if w == "A" else w for w in words), code=2)
    assert want in said
    assert "Traceback" not in said
