"""Sessions over gRPC: what a client offers reaches the server, what the server answers reaches the channel (one body
for the synchronous and the asyncio client, on localhost), and the real server's refusals."""

import numpy as np
import pytest
from commanded_server import STREAMS, InLoop, batch

from expertd.codec import ForwardResponseView, TensorView
from expertd.errors import DeadlineExceededError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AioGrpcTransport, ExpertClient, FunctionTransport, GrpcTransport, Session


class Doubles:
    """A channel to a server that answers twice its hidden states, in this process."""

    def __init__(self, name):
        self.name, self.answers, self.closed, self.carried = name, [], None, 0

    def close(self):
        pass

    def open(self, answer, deliver, closed, ready):
        self.answers.append(answer)
        self.closed = closed
        connection = FunctionTransport(self.double).connect(deliver, closed)
        connection.blocking = None
        ready(connection)

    def double(self, request):
        self.carried += 1
        x = request.hidden_states
        twice = 2 * np.frombuffer(x.raw, np.float32)
        return ForwardResponseView(request.request_id, TensorView.of_raw(x.dtype, x.shape, twice), routes_computed=4)


@pytest.fixture(params=STREAMS)
def reach(request, address):
    """Connects a client that has these channels."""
    clients = []

    def make(*offers):
        if request.param == "sync-stream":
            clients.append(ExpertClient(GrpcTransport(address, offers=offers)))
        else:
            clients.append(InLoop(lambda: AioGrpcTransport(address, offers=offers)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def accept(name):
    def on_session(offer):
        verdicts = [
            pb.TransportVerdict(transport=t, accepted=t == name, reason="" if t == name else "one is enough")
            for t in offer.transports
        ]
        return pb.SessionAnswer(verdicts=verdicts, token="t0ken", endpoint="over there")

    return on_session


def test_a_client_without_channels_offers_nothing(reach, servicer):
    client = reach()
    assert client.session() == Session("inline", {})
    client.forward(*batch())
    assert servicer.offers == []


def test_refusals_reach_the_caller(reach, servicer):
    client = reach(Doubles("shm"), Doubles("tcp"))
    assert client.session() == Session("inline", {"shm": "not here", "tcp": "not here"})
    assert client.forward(*batch(3.0)).output[0, 0] == 3.0
    assert [list(offer.transports) for offer in servicer.offers] == [["shm", "tcp"]]


def test_an_accepted_channel_carries_the_requests_until_it_breaks(reach, servicer):
    shm = Doubles("shm")
    servicer.on_session = accept("shm")
    client = reach(shm, Doubles("tcp"))
    assert client.session() == Session("shm", {"tcp": "one is enough"})
    (answer,) = shm.answers
    assert (answer.token, answer.endpoint) == ("t0ken", "over there")
    assert client.forward(*batch(3.0)).output[0, 0] == 6.0
    assert servicer.seen == []
    shm.closed(UnavailableError("the ring is gone"))
    assert client.session() == Session("inline", {"tcp": "one is enough", "shm": "it broke: the ring is gone"})
    assert client.forward(*batch(3.0)).output[0, 0] == 3.0
    assert (len(servicer.seen), servicer.streams, shm.carried) == (1, 1, 1)


def test_requests_do_not_wait_for_the_agreement(reach, servicer):
    servicer.on_session = lambda offer: None
    client = reach(Doubles("shm"))
    assert client.forward(*batch(3.0)).output[0, 0] == 3.0
    with pytest.raises(DeadlineExceededError, match=r"no answer to the offer within 0\.1 s"):
        client.session(timeout_s=0.1)
    assert client.forward(*batch(4.0)).output[0, 0] == 4.0
    assert len(servicer.offers) == 1


@pytest.mark.parametrize("make", [ExpertClient, InLoop])
def test_what_has_no_session_says_so(make, address):
    options = {"unary": True, "offers": [Doubles("shm")]}
    unary = GrpcTransport(address, **options) if make is ExpertClient else lambda: AioGrpcTransport(address, **options)
    with make(unary) as client:
        assert client.session() == Session("inline", {})
        assert client.forward(*batch(3.0)).output[0, 0] == 3.0
    function = FunctionTransport(Doubles("").double)
    function.offers = [Doubles("shm")]
    with make(function) as client:
        assert client.session() == Session("inline", {"shm": "a function has no sessions"})


def test_nobody_to_agree_with():
    transport = GrpcTransport("127.0.0.1:1", offers=[Doubles("shm")])
    with ExpertClient(transport) as client, pytest.raises(UnavailableError):
        client.session()


def test_the_real_server_says_why_not(tiny_server):
    with ExpertClient(GrpcTransport(tiny_server, offers=[Doubles("tcp"), Doubles("smoke")])) as client:
        session = client.session()
    assert session.transport == "inline"
    assert list(session.refused) == ["tcp", "smoke"]
    assert "--tcp-listen" in session.refused["tcp"]
    assert session.refused["smoke"] == "this server does not know it"
