"""Torch modules on a GPU whose experts are behind such a session (expertd_client.device.transport)."""

import pytest
import torch
from connection_kit import E, H
from software_gpu import MISSING, STREAM, Session, enter, inputs

from expertd.errors import UnavailableError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.clients.forwarder import Forwarder
from expertd_client.device.transport import DeviceTransport
from expertd_client.engines import torch_experts
from expertd_client.requests.result import ForwardResult

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or "there"), pytest.mark.timeout(60)]


def described(held=E, max_tokens=64):
    layers = [pb.Layer(layer=n, num_experts=E, held=[pb.ExpertRange(first=0, count=held)]) for n in range(2)]
    return pb.DescribeResponse(layers=layers, limits=pb.Limits(max_tokens=max_tokens))


class Far(Forwarder):
    """Everything but a session is counted."""

    def __init__(self, way):
        self.way, self.requests = way, 0

    def device_transport(self, device):
        return self.way

    def forward_request(self, request, *, timeout_s=None):
        self.requests += 1
        factor = ((request.topk_ids + 1) * request.topk_weights).sum(1, keepdim=True)
        out = (request.hidden_states.float() * factor).to(request.hidden_states.dtype)
        return ForwardResult(out, None, int((request.topk_ids >= 0).sum()), pb.Timing(), pb.Load(), 0)

    def submit_request(self, request, *, timeout_s=None):
        raise AssertionError("one request is enough")

    def close(self):
        pass


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors count as lying on GPU 0."""
    monkeypatch.setattr(torch_experts, "_gpu_of", lambda x: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def remote(open_session, **facts):
    way = DeviceTransport(open_session, lambda: described(**facts))
    far = Far(way)
    return torch_experts.RemoteExperts(far, 1).eval(), far, way


def test_a_module_on_a_gpu_sends_from_there(server, on_gpu):
    experts, far, way = remote(lambda: enter(server))
    for seed in range(3):
        t, want = inputs(5, seed=seed)
        assert torch.allclose(experts(*t).float(), want, rtol=1e-2)
    x, ids, w = inputs(6, x=torch.float32)[0]
    out = experts(x.double().view(2, 3, H), ids.short().view(2, 3, 2), w.double().view(2, 3, 2))
    assert (out.dtype, out.shape, far.requests, way.reason) == (torch.float64, (2, 3, H), 0, "")
    assert torch.allclose(out.view(6, H).float(), inputs(6, x=torch.float32)[1], rtol=1e-2)
    way.close()


def test_a_batch_beyond_the_limit_goes_in_pieces(server, on_gpu):
    experts, far, way = remote(lambda: enter(server), max_tokens=7)
    t, want = inputs(30)
    assert torch.allclose(experts(*t).float(), want, rtol=1e-2)
    assert far.requests == 0
    assert {key[1] for key in way._session._prepared} == {7, 2}
    way.close()


def test_layers_of_which_the_server_lacks_experts_travel_as_others_do(server, on_gpu):
    experts, far, way = remote(lambda: enter(server), held=E - 1)
    x, ids, w = inputs(5)[0]
    assert torch.allclose(experts(x, ids.abs(), w).float(), x.float() * ((ids.abs() + 1) * w).sum(1, keepdim=True))
    assert far.requests == 1
    way.close()


def test_where_no_session_can_be_had_nothing_is_lost_and_it_is_not_asked_each_time(on_gpu):
    asked = []

    def none():
        asked.append(1)
        raise UnavailableError("cuda_ipc: the server computes on a CPU")

    experts, far, way = remote(none)
    x, ids, w = inputs(5)[0]
    for _ in range(3):
        experts(x, ids.abs(), w)
    assert (far.requests, len(asked)) == (3, 1)
    assert "on a CPU" in way.reason


def test_a_session_that_broke_is_opened_again(server, on_gpu, monkeypatch):
    experts, far, way = remote(lambda: enter(server))
    x, ids, w = inputs(5)[0]
    experts(x, ids.abs(), w)
    monkeypatch.setattr(way._session, "_lost", True)
    experts(x, ids.abs(), w)
    assert (far.requests, "ended" in way.reason) == (1, True)
    way._not_before_s = 0.0
    experts(x, ids.abs(), w)
    assert (far.requests, way.reason) == (1, "")
    way.close()
    experts(x, ids.abs(), w)
    assert (far.requests, way.reason) == (2, "closed")


@pytest.mark.parametrize(("client_s", "module_s", "wanted"), [(None, None, 0), (7.0, None, 7e9), (7.0, 3.0, 3e9)])
def test_the_server_is_told_the_time_of_the_module_and_else_of_the_client(
    server, on_gpu, monkeypatch, client_s, module_s, wanted
):
    told, ask = [], Session._ask
    monkeypatch.setattr(Session, "_ask", lambda self, s: (told.append(s.deadline_ns), ask(self, s))[1])
    with ExpertClient("127.0.0.1:1", timeout_s=client_s) as client:
        monkeypatch.setattr(client, "device_session", lambda device: enter(server))
        way = client.device_transport(0)
        monkeypatch.setattr(way, "_describe", described)
        t, want = inputs(5)
        experts = torch_experts.RemoteExperts(client, 1, timeout_s=module_s).eval()
        assert torch.allclose(experts(*t).float(), want, rtol=1e-2)
    assert told == [wanted]


@pytest.fixture
def capturing(monkeypatch):
    """Sets whether the current stream counts as being captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return lambda value: now.__setitem__(0, value)


def test_a_graph_keeps_its_session_when_the_server_is_replaced(server, on_gpu, capturing, monkeypatch):
    callers = iter(("one", "two"))  # the first session is not really lost
    experts, _far, way = remote(lambda: enter(server, next(callers)))
    x, ids, w = inputs(5)[0]
    experts(x, ids.abs(), w)
    capturing(True)
    experts(x, ids.abs(), w)
    capturing(False)
    experts.check(0)
    first = way._session
    monkeypatch.setattr(first, "_lost", True)
    with pytest.raises(UnavailableError, match="the server ended it"):
        experts.check(0)
    experts(x, ids.abs(), w)  # by another way, and the session is lost
    assert way._session is None
    assert not first._closed, "a replay writes into its memory"
    way._not_before_s = 0.0
    experts(x, ids.abs(), w)
    second = way._session
    with pytest.raises(UnavailableError, match="the server ended it"):
        experts.check(0)
    capturing(True)
    experts(x, ids.abs(), w)
    capturing(False)
    experts.check(0)
    way.close()
    assert first._closed
    assert second._closed


def test_a_capture_that_cannot_go_from_gpu_to_gpu_is_refused(server, on_gpu, capturing, monkeypatch):
    experts, far, way = remote(lambda: enter(server))
    x, ids, w = inputs(5)[0]
    capturing(True)
    with pytest.raises(UnsupportedCombinationError, match="call the module once before the capture"):
        experts(x, ids.abs(), w)
    with monkeypatch.context() as patch:
        patch.setattr(way, "start", way.forward)  # its own stream is the GPU's
        with pytest.raises(UnsupportedCombinationError, match="a CUDA graph that is captured"):
            experts.start(x, ids.abs(), w)
    capturing(False)
    experts(x, ids.abs(), w)
    monkeypatch.setattr(way._session, "_lost", True)
    capturing(True)
    with pytest.raises(UnavailableError, match="the server ended it"):
        experts(x, ids.abs(), w)
    assert way._session is not None, "closing it waits for the GPU"
    assert far.requests == 0
    capturing(False)
    way.close()
