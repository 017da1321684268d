"""RemoteExperts in CUDA graphs of a caller on another GPU of the server's host: torch.cuda.graph, and torch.compile
with mode="reduce-overhead".  tests/client/device/test_transport.py has the session's life without a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from expertd_kernels import reference, relative_error, tolerance
from expertd_kernels.sources.synthetic import SyntheticModel, random_inputs

try:
    from expertctl.bench.faults.processes import ServerProcess
    from expertd.errors import UnavailableError, UnsupportedCombinationError
    from expertd_client import ExpertClient
    from expertd_client.engines.torch_experts import RemoteExperts
except Exception as e:  # a machine for kernels alone
    pytest.skip(f"the client cannot run here: {type(e).__name__}: {e}", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or torch.version.cuda is None, reason="needs two NVIDIA GPUs of one host"
    ),
]
MODEL, E, K, H, M = "tiny:int4_g128", 8, 2, 256, 12
CALLER, SERVERS = "cuda:0", "cuda:1"


@pytest.fixture
def server():
    """On the second GPU, at the same port after each start."""
    server = ServerProcess(["--synthetic", MODEL, "--device", SERVERS])
    server.start()
    server.ready()
    yield server
    server.kill()


@pytest.fixture
def client(server):
    with ExpertClient(server.address) as client, torch.inference_mode():
        yield client


def batch(seed):
    """Inputs on the caller's GPU, the first two tokens without a route; and the answer."""
    x, ids, w = random_inputs(M, H, E, K, seed=seed)
    ids[:2] = -1
    want = reference(SyntheticModel.parse(MODEL).load(0), x, ids, w)
    return [t.to(CALLER) for t in (x, ids, w)], want


def right(out, want) -> bool:
    return not out[:2].any() and relative_error(out.cpu(), want) <= tolerance("bf16")


def captured(experts, tensors):
    """(graph, output) of a call of them."""
    experts(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*tensors)
    return graph, out


def replayed(graph, out):
    out.fill_(0.5)
    graph.replay()
    begin = time.monotonic()
    torch.cuda.synchronize()
    return out, time.monotonic() - begin


def test_a_replay_follows_its_inputs_and_says_when_the_server_was_replaced(server, client):
    experts = RemoteExperts(client, 0).eval()
    held = batch(0)[0]
    graph, out = captured(experts, held)
    for seed in range(1, 6):
        tensors, want = batch(seed)
        for to, new in zip(held, tensors, strict=True):
            to.copy_(new)
        assert right(replayed(graph, out)[0], want)
    experts.check()
    server.kill()
    answer, seconds = replayed(graph, out)
    assert answer.isnan().all()
    assert seconds < 1.0
    with pytest.raises(UnavailableError):
        experts.check()
    server.restart()
    answer, seconds = replayed(graph, out)
    assert answer.isnan().all(), "the graph's session ended with its server"
    assert seconds < 1.0
    tensors, want = batch(7)
    assert right(experts(*tensors), want)
    end = time.monotonic() + 60
    while client.device_transport(0)._session is None:  # the first calls travel over the host
        assert right(experts(*tensors), want)
        assert time.monotonic() < end, client.device_transport(0).reason
        time.sleep(0.2)
    graph, out = captured(experts, tensors)
    assert right(replayed(graph, out)[0], want)
    experts.check()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_before_the_first_call_is_refused(client):
    experts = RemoteExperts(client, 0).eval()
    tensors, _ = batch(0)
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(UnsupportedCombinationError, match="call the module once before"), graph:
        experts(*tensors)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")
def test_a_compiled_model_captures_the_call(client):
    experts = RemoteExperts(client, 0, graphs=True).eval()

    def layer(x, ids, w):
        return experts(x * 1.0, ids, w) + 0.0

    fast = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    for seed in range(6):
        tensors, want = batch(seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert right(fast(*tensors).clone(), want)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips
    session = client.device_transport(0)._session
    assert session in client.device_transport(0)._captured
