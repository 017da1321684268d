"""docs/load.md: every command and snippet is run as it stands there, but for the address."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import hosts
from waiting import until

from expertd_client import ExpertClient

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "load.md").read_text()
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", TEXT, re.S) for kind in ("sh", "python")}
PATH = os.pathsep.join([str(Path(sys.executable).parent), str(ROOT / "node_modules" / ".bin"), os.environ["PATH"]])

pytestmark = pytest.mark.timeout(600)  # a dozen commands, each a process that imports its client


@pytest.fixture(scope="module")
def address():
    with hosts(synthetic="tiny:int4_g128", kserve=True) as serve:
        yield serve().address


def run(text, address, folder, **more):
    text = text.replace("127.0.0.1:50051", str(address))
    text = re.sub(r"127\.0\.0\.1(?=\s)", str(address), text)
    env = {**os.environ, "PATH": PATH, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = more.pop("words", ["bash", "-euc"])
    return subprocess.Popen([*words, text], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, **more)  # fmt: skip


def done(child):
    said, _ = child.communicate(timeout=500)
    assert child.returncode == 0, said
    return said


BUF, GRPCURL, LOADS, *RECORDING, PERF = BLOCKS["sh"]
TRITON, PERF_DATA = BLOCKS["python"]


def test_the_page_has_these_blocks():
    assert BUF.startswith("buf curl")
    assert "grpcurl -plaintext" in GRPCURL
    assert [block.split()[:2] for block in (LOADS, *RECORDING)] == [
        ["expertctl", c] for c in ("load", "record", "load", "replay")
    ]
    assert PERF.startswith("perf_analyzer")


def test_calls_by_hand(address, tmp_path):
    if shutil.which("buf", path=PATH) is None:
        pytest.skip("buf is not installed: make test installs it where npm is")
    said = done(run(BUF, address, tmp_path))
    assert said.count('"crc32"') == 2
    assert '"hiddenSize": 256' in said
    assert '"SERVING"' in said


def test_calls_with_grpcurl_and_ghz(address, tmp_path):
    for tool in ("grpcurl", "ghz"):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"{tool} is not installed")
    said = done(run(GRPCURL, address, tmp_path))
    assert "expertd.v1.ExpertService" in said
    assert '"routesComputed": "8"' in said
    assert "[OK]   1000 responses" in said


def test_loads(address, tmp_path):
    said = done(run(LOADS, address, tmp_path))
    assert "backend echo" in said
    assert "16 callers" in said
    assert "95 % confidence" in said
    assert (tmp_path / "sweep.html").read_text().startswith("<!DOCTYPE html>")
    assert "Percentile" in (tmp_path / "ramp.hgrm").read_text()


def free_port() -> int:
    """One that nobody is given who asks the system for any port: below the range of those."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all are taken")


def listens(port) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_recording(address, tmp_path):
    port = free_port()
    record, load, replay = (block.replace("50061", str(port)) for block in RECORDING)
    recorder = run(record, address, tmp_path)
    until(lambda: recorder.poll() is not None or listens(port), 120)
    assert recorder.poll() is None, recorder.communicate()[0]
    assert "answered  100" in done(run(load, address, tmp_path))
    assert "100 requests of 200 tokens" in done(recorder)
    assert "answered  100" in done(run(replay, address, tmp_path))


def test_tritonclient(address, tmp_path):
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed: make test installs it")
    words = [sys.executable, "-W", "ignore", "-c"]
    assert done(run(TRITON, address, tmp_path, words=words)).strip() == "(5, 256)"


def test_perf_analyzer(address, tmp_path):
    """Its data are requests that the layer answers; the program itself runs where it is installed."""
    done(run(PERF_DATA, address, tmp_path, words=[sys.executable, "-c"]))
    data = json.loads((tmp_path / "perf.json").read_text())["data"]
    assert len(data) == 16
    with ExpertClient(address) as client:
        for request in data:
            values = {name: np.array(t["content"]).reshape(t["shape"]) for name, t in request.items()}
            x, weights = (values[name].astype(np.float32) for name in ("hidden_states", "topk_weights"))
            answer = client.forward(0, x, values["topk_ids"].astype(np.int32), weights)
            assert answer.routes_computed == 16
    if shutil.which("perf_analyzer", path=PATH) is None:
        pytest.skip("perf_analyzer is not installed")
    said = done(run(PERF.replace("2000", "100"), address, tmp_path))
    assert "Request count: 100" in said
