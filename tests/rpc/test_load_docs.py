"""docs/load.md: what its programs write and print.  Its commands run in tests/docs/test_commands.py."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from in_process import hosts

from expertd_client import ExpertClient

TEXT = (Path(__file__).parents[2] / "docs" / "load.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.fixture(scope="module")
def address():
    with hosts(synthetic="tiny:int4_g128", kserve=True) as serve:
        yield serve().address


def run(words, address, folder):
    words = [w.replace("127.0.0.1:50051", str(address)) for w in words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tritonclient(address, tmp_path):
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed: make test installs it")
    (block,) = (b for b in BLOCKS if "tritonclient" in b)
    assert run([sys.executable, "-W", "ignore", "-c", block], address, tmp_path).strip() == "(5, 256)"


def test_the_data_of_perf_analyzer_are_requests_that_the_layer_answers(address, tmp_path):
    (block,) = (b for b in BLOCKS if "perf.json" in b)
    run([sys.executable, "-c", block], address, tmp_path)
    data = json.loads((tmp_path / "perf.json").read_text())["data"]
    assert len(data) == 16
    with ExpertClient(address) as client:
        for request in data:
            values = {name: np.array(t["content"]).reshape(t["shape"]) for name, t in request.items()}
            x, weights = (values[name].astype(np.float32) for name in ("hidden_states", "topk_weights"))
            answer = client.forward(0, x, values["topk_ids"].astype(np.int32), weights)
            assert answer.routes_computed == 16


def test_classes_from_the_proto_file_alone(address, tmp_path):
    """-S: packages that are installed as they lie in this tree are not seen."""
    root = Path(__file__).parents[2]
    (command,) = re.findall(r"`(?:mkdir -p G && )?python (-m grpc_tools.protoc .*?)`", TEXT)
    made = tmp_path / "G"
    made.mkdir()
    words = [str(made) if w == "G" else w.replace("=G", f"={made}") for w in shlex.split(command)]
    subprocess.run([sys.executable, *words], cwd=root, check=True, timeout=100)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(made), sysconfig.get_path("purelib")))}
    words = [sys.executable, "-S", str(root / "client/examples/raw_grpcio.py"), str(address)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
