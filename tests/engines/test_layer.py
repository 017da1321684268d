"""One layer as one rank of an engine calls it: shares of the tokens, padding, and what runs meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import Connected, Scaling, batch, expert_sum

from expertd.errors import UnavailableError, UnsupportedCombinationError
from expertd_client.engines.layer import RankExperts, share
from expertd_client.engines.served import Found
from expertd_client.requests.step_version import StepVersion

LAYER = Found("layers.3.experts", 3, 8, 16, 32)


def padding_of(tokens, real):
    return torch.arange(tokens) >= real


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("padded", [0, 2, 40])
def test_outputs_of_all_ranks_add_up_and_each_token_is_sent_once(tokens, ranks, padded):
    x, ids, weights = batch(tokens)
    padding = padding_of(tokens, max(tokens - padded, 0)) if padded else None
    real = tokens if padding is None else int((~padding).sum())
    whole, sent = torch.zeros(tokens, 16), []
    for rank in range(ranks):
        connection = Connected()
        before = [t.clone() for t in (x, ids, weights)]
        part = RankExperts(connection, LAYER, rank, ranks)(x, ids, weights, padding=padding)
        assert all(torch.equal(a, b) for a, b in zip(before, (x, ids, weights), strict=True))
        assert part.shape == x.shape
        sent.append(sum(len(request.topk_ids) for request in connection.forwarder.seen))
        assert {request.layer for request in connection.forwarder.seen} <= {3}
        whole += part
    wanted = expert_sum(x, ids, weights).float()
    if padding is not None:
        wanted[padding] = 0
    torch.testing.assert_close(whole, wanted)
    assert sum(sent) == real
    assert max(sent) - min(sent) <= 1  # shares are equal, however many rows are padding


def test_padding_alone_is_not_sent_and_its_weights_may_be_anything():
    connection = Connected()
    x, ids, weights = batch(6)
    weights.fill_(float("nan"))
    answer = RankExperts(connection, LAYER)(x, ids, weights, padding=padding_of(6, 0))
    assert torch.equal(answer, torch.zeros(6, 16))
    assert not connection.forwarder.seen


def test_a_rank_without_tokens_makes_no_call():
    connection = Connected()
    x, ids, weights = batch(1)
    answer = RankExperts(connection, LAYER, 1, 4)(x, ids, weights)
    assert torch.equal(answer, torch.zeros(1, 16))
    assert not connection.forwarder.seen


def test_shared_experts_run_while_the_routed_ones_are_under_way():
    connection = Connected()
    x, ids, weights = batch(5)
    experts = RankExperts(connection, LAYER)
    log = connection.forwarder.log
    fetch = experts.remote._wait
    experts.remote._wait = lambda *args: (log.append("fetched"), fetch(*args))[1]
    answer = experts(x, ids, weights, meanwhile=lambda: log.append("shared"))
    torch.testing.assert_close(answer, expert_sum(x, ids, weights).float())
    assert log == ["sent", "shared", "fetched"]


def test_shared_experts_run_once_where_nothing_is_sent():
    connection = Connected()
    ran = []
    RankExperts(connection, LAYER)(*batch(4), padding=padding_of(4, 0), meanwhile=lambda: ran.append(1))
    assert ran == [1]
    assert not connection.forwarder.seen


def test_the_servers_limit_and_layer_are_asked_once():
    connection = Connected(max_tokens=4)
    experts = RankExperts(connection, LAYER)
    x, ids, weights = batch(10)
    torch.testing.assert_close(experts(x, ids, weights), expert_sum(x, ids, weights).float())
    assert [len(request.topk_ids) for request in connection.forwarder.seen] == [4, 4, 2]
    assert connection.found == [LAYER]


def test_a_call_has_its_own_timeout_and_version_of_the_weights():
    connection = Connected()
    experts = RankExperts(connection, LAYER, timeout_s=2.5, weights_version=7)
    x = batch(3)
    experts(*x)
    experts.weights_version = 0
    experts(*x, meanwhile=lambda: None)
    assert [request.weights_version for request in connection.forwarder.seen] == [7, 0]
    assert connection.forwarder.timeouts == [2.5, 2.5]
    assert experts.weights_version == 0


def test_the_version_that_answered_is_told():
    experts = RankExperts(Connected(), LAYER)
    assert experts.weights_version_seen == 0
    experts.remote.weights_version_seen = 9
    assert experts.weights_version_seen == 9


class Serving(Scaling):
    """Of that version; it holds the one before, too."""

    def __init__(self, serves):
        super().__init__()
        self.serves = serves

    def forward_request(self, request, *, timeout_s=None):
        answer = super().forward_request(request, timeout_s=timeout_s)
        answer.weights_version = request.weights_version or self.serves
        return answer


@pytest.mark.parametrize("tokens", [4, 1])
def test_ranks_take_the_version_that_they_agree_on(tokens):
    """Rank 0 reaches the servers before they switch, rank 1 afterwards; of one token rank 1 sends nothing."""
    together, shared = threading.Barrier(2, timeout=20), [0, 0]

    def one_rank(rank):
        def agree(version):
            shared[rank] = version
            together.wait()
            return min(filter(None, shared), default=0)

        step, connection = StepVersion(agree=agree), Connected()
        connection.forwarder = Serving(serves=1 + rank)
        first, second = (RankExperts(connection, LAYER, rank, 2, weights_version=step) for _ in range(2))
        whole = first(*batch(tokens)), second(*batch(tokens), meanwhile=lambda: None)
        return [request.weights_version for request in connection.forwarder.seen], step.number, whole

    with ThreadPoolExecutor(2) as pool:
        (asked0, number0, out0), (asked1, number1, out1) = pool.map(one_rank, range(2))
    assert number0 == number1 == 1
    assert asked0 == [0, 1]
    assert asked1 == ([0, 1, 1] if tokens > 1 else [])
    for a, b in zip(out0, out1, strict=True):
        torch.testing.assert_close(a + b, expert_sum(*batch(tokens)).float())


def test_ranks_that_do_not_agree_on_a_version_are_refused():
    refused = pytest.raises(UnsupportedCombinationError, match=r"layer 3: weights_version: .*of 2.*StepVersion\(agree=")
    with refused:
        RankExperts(Connected(), LAYER, 0, 2, weights_version=StepVersion())
    experts = RankExperts(Connected(), LAYER, 0, 2)
    with refused:
        experts.weights_version = StepVersion()
    assert RankExperts(Connected(), LAYER, weights_version=StepVersion()).ranks == 1


def test_what_replays_met_is_raised():
    class Refused:
        def check(self):
            raise UnavailableError("the server ended")

    connection = Connected()
    connection.forwarder.device_transport = lambda device: {3: Refused()}[device]
    with pytest.raises(UnavailableError, match="the server ended"):
        RankExperts(connection, LAYER).check(3)


def test_a_share_leaves_the_routers_tensor_alone_where_all_is_sent():
    _, ids, _ = batch(5)
    assert share(ids) is ids
