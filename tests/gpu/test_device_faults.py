"""A device that really runs out of memory, and one that is really lost, each in a process of its own: right answers, or
none.  tests/faults/test_device_faults.py plays the same on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
import torch
from faulty_program import faulty_program

from expertd_kernels import detect_device, reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

try:
    from expertd.errors import ExpertdError
    from expertd_client import ExpertClient
except Exception as e:  # a machine for kernels alone
    pytest.skip(f"the server cannot run here: {type(e).__name__}: {e}", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(detect_device("auto").kind != "cuda", reason="needs a GPU of NVIDIA or AMD"),
]
MODEL, E, K, H = "tiny:int4_g128", 8, 2, 256
FAULTY = faulty_program(
    """
import triton
import triton.language as tl

@triton.jit
def wild(x, far):
    tl.store(x + far, 1.0)

class Experts(reference.ReferenceExperts):
    def __call__(self, x, ids, w, **more):
        if 40 < len(x) < 64:  # more than there is, by torch's own allocator
            torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device=x.device)
        if len(x) == 13:
            wild[(1,)](x, 1 << 44)  # an address that is nobody's
            torch.cuda.synchronize()
        return super().__call__(x, ids, w, **more)
"""
)


@pytest.fixture
def server(tmp_path):
    """(process, gRPC address, URL of the metrics, lines of the log so far)"""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    options = ["serve", "--synthetic", MODEL, "--layers", "0", "--listen", "127.0.0.1:0", "--log-format", "json"]
    command = [sys.executable, str(script), *options, "--metrics-listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{"):
                lines.append(json.loads(line))
                if lines[-1]["message"].startswith("serving on"):
                    break
        address = next(line["address"] for line in lines if "address" in line)
        yield process, address, next(line["metrics"] for line in lines if "metrics" in line), lines
        process.kill()


def right(client: ExpertClient, tokens: int) -> None:
    x, ids, w = random_inputs(tokens, H, E, K)
    answer = client.forward(0, x, ids, w, timeout_s=60)
    want = reference(SyntheticModel.parse(MODEL).load(0), x, ids, w)
    assert relative_error(torch.as_tensor(answer.output).float(), want) <= tolerance("bf16")


@pytest.mark.timeout(100)
def test_memory_that_runs_out_halves_a_batch_and_an_illegal_access_ends_the_server(server):
    process, address, metrics, lines = server
    with ExpertClient(address) as client:
        right(client, 5)
        for _ in range(3):
            right(client, 50)
        right(client, 64)
        with urllib.request.urlopen(metrics, timeout=10) as answer:
            text = answer.read().decode()
        assert 'expertd_faults_total{kind="split"} 3.0' in text
        assert 'expertd_faults_total{kind="lost"} 0.0' in text
        said = [line["message"] for line in lines if "no GPU metrics" in line["message"]]
        assert ("expertd_gpu_temperature_celsius" in text) != bool(said), "NVML's facts, or why there are none"
        print([line for line in text.splitlines() if line.startswith("expertd_gpu_")], said)
        for tokens in (13, 5, 5):
            with pytest.raises(ExpertdError):
                client.forward(0, *random_inputs(tokens, H, E, K), timeout_s=60)
    assert process.wait(60) == 3
    rest = process.stderr.read()
    assert "the device is lost to this process" in rest
    assert "restart the server" in rest
