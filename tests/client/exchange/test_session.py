"""Channels beside a connection, and memory that a transport lends: with a transport in the test's hands."""

from __future__ import annotations

import gc
import mmap
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from exchange_kit import Beside, Waiter, X, answer, exchange, request

from expertd.codec import TensorView
from expertd.errors import UnavailableError
from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import Request, Session
from expertd_client.clients.client import ForwardFuture
from expertd_client.requests.lent import Lent
from expertd_client.requests.result import result_of
from expertd_client.transports.protocol import ConnectionFullError


def said(*verdicts):
    """The server's answer: (name, "" or why not) for each."""
    accepted = any(not why for _, why in verdicts)
    return pb.SessionAnswer(
        verdicts=[pb.TransportVerdict(transport=name, accepted=not why, reason=why) for name, why in verdicts],
        token="t0ken" if accepted else "",
        endpoint="there" if accepted else "",
    )


def opened(*offers):
    """An exchange that has connected, with who waits for its session."""
    ex, hand, alarm = exchange(*offers)
    waiter = Waiter()
    ex.session(waiter)
    return ex, hand, alarm, waiter


def session_of(ex):
    waiter = Waiter()
    ex.session(waiter)
    return waiter.what


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_without_channels_everything_is_inline_and_nothing_is_offered():
    _, hand, _, waiter = opened()
    assert waiter.what == Session("inline", {})
    assert hand.ways[0].offers == []


def test_what_is_refused_has_its_reason_and_requests_stay_inline():
    ex, hand, _, waiter = opened(Beside("shm"), Beside("tcp"))
    (way,) = hand.ways
    assert way.offers == [pb.SessionOffer(transports=["shm", "tcp"], host_id=host_id())]
    first = Waiter()
    number = ex.submit(request(), None, first)  # does not wait for the agreement
    assert (list(way.sent), waiter.told) == ([number], [])
    way.deliver(said(("tcp", "not here"), ("shm", "another host")))
    assert waiter.what == Session("inline", {"shm": "another host", "tcp": "not here"})
    assert list(waiter.what.refused) == ["shm", "tcp"], "in the order of the offer"
    way.deliver(answer(number))
    assert first.what.routes_computed == 6


def test_an_accepted_channel_gets_token_and_endpoint_and_carries_what_comes_later():
    shm = Beside("shm")
    ex, hand, _, waiter = opened(shm, Beside("tcp"))
    (inline,) = hand.ways
    before, after, back = Waiter(), Waiter(), Waiter()
    one = ex.submit(request(), None, before)
    agreement = said(("shm", ""), ("tcp", "shm is faster"))
    inline.deliver(agreement)
    assert waiter.what == session_of(ex) == Session("shm", {"tcp": "shm is faster"})
    assert shm.answers == [agreement]
    two, three = ex.submit(request(), None, after), ex.submit(request(), None, back)
    assert (list(inline.sent), list(shm.ways[0].sent)) == ([one], [two, three])
    assert isinstance(shm.ways[0].sent[two][1], Request), "not bytes yet: the channel decides"
    shm.ways[0].deliver(answer(two))
    inline.deliver(answer(one))
    assert before.what.routes_computed == after.what.routes_computed == 6
    assert ex.cancel(three)
    assert (inline.cancelled, shm.ways[0].cancelled) == ([], [three]), "to where the request is"
    ex.close()
    assert shm.ways[0].ended


def test_a_request_that_a_channel_refuses_as_it_ends_fails_once_and_is_not_sent_again():
    """Found by tests/faults/races: it was told that it failed, sent inline as well, and answered a second time."""
    shm = Beside("shm")
    ex, hand, _, _ = opened(shm)
    (inline,) = hand.ways
    inline.deliver(said(("shm", "")))

    def ends(*_):
        shm.ways[0].breaks(UnavailableError("gone"))
        raise ConnectionFullError

    shm.ways[0].forward = ends
    lost = Waiter()
    ex.submit(request(), None, lost)
    assert lost.what.message == "gone"
    assert (inline.sent, ex.in_flight) == ({}, 0)


def test_a_request_that_goes_inline_when_the_connection_has_just_ended_fails():
    """Found by tests/faults/races: nobody told it."""
    shm = Beside("shm")
    ex, hand, _, _ = opened(shm)
    (inline,) = hand.ways
    inline.deliver(said(("shm", "")))
    lost = Waiter()

    def ends(*_):
        shm.ways[0].ended = True  # it says so later than the connection
        inline.breaks(UnavailableError("gone"))
        raise ConnectionFullError

    shm.ways[0].forward = ends
    ex.submit(request(), None, lost)
    assert lost.what.message == "gone"
    assert (inline.sent, ex.in_flight) == ({}, 0)


def test_what_waits_on_a_channel_fails_with_the_error_of_its_connection():
    """Found by tests/faults/races: with RequestCancelledError, as if this client had been closed, which is final."""
    shm = Beside("shm")
    _, hand, _, _ = opened(shm)
    hand.ways[0].deliver(said(("shm", "")))
    why = []
    shm.ways[0].broke = why.append
    hand.ways[0].breaks(UnavailableError("connection reset"))
    assert [(type(error), error.message) for error in why] == [(UnavailableError, "connection reset")]


def test_a_channel_that_breaks_fails_its_own_requests_and_later_ones_go_inline():
    shm = Beside("shm")
    ex, hand, _, _ = opened(shm)
    (inline,) = hand.ways
    stays, lost = Waiter(), Waiter()
    one = ex.submit(request(), None, stays)
    inline.deliver(said(("shm", "")))
    ex.submit(request(), None, lost)
    shm.ways[0].breaks(UnavailableError("the ring is gone"))
    assert isinstance(lost.what, UnavailableError)
    assert lost.what.retryable
    assert stays.told == []
    assert session_of(ex) == Session("inline", {"shm": "it broke: the ring is gone"})
    three = ex.submit(request(), None, Waiter())
    assert list(inline.sent) == [one, three], "the same connection, and nothing was sent twice"
    inline.deliver(answer(one))
    assert stays.what.routes_computed == 6


@pytest.mark.parametrize("why", [OSError(13, "Permission denied"), UnavailableError("nobody listens there")])
def test_a_channel_that_does_not_open_is_a_reason(why):
    ex, hand, _, waiter = opened(Beside("shm", refuses=why), Beside("tcp"))
    hand.ways[0].deliver(said(("shm", ""), ("tcp", "one is enough")))
    assert waiter.what.transport == "inline"
    assert str(why) in waiter.what.refused["shm"]
    assert waiter.what.refused["tcp"] == "one is enough"
    number = ex.submit(request(), None, Waiter())
    assert number in hand.ways[0].sent


def test_a_channel_that_breaks_while_it_opens_never_carries_anything():
    class Brittle(Beside):
        def opened(self, ready):
            self.ways[-1].breaks(UnavailableError("at once"))
            ready(self.ways[-1])

    ex, hand, _, waiter = opened(Brittle("shm"))
    hand.ways[0].deliver(said(("shm", "")))
    assert waiter.what == Session("inline", {"shm": "it broke: at once"})
    number = ex.submit(request(), None, Waiter())
    assert number in hand.ways[0].sent


def test_the_end_of_the_connection_is_the_end_of_its_channel_and_the_next_one_asks_again():
    shm = Beside("shm")
    ex, hand, _, _ = opened(shm)
    hand.ways[0].deliver(said(("shm", "")))
    lost = Waiter()
    ex.submit(request(), None, lost)
    hand.ways[0].breaks(UnavailableError("the server went away"))
    assert isinstance(lost.what, UnavailableError)
    assert "went away" in lost.what.message, "not that we closed the channel"
    assert shm.ways[0].ended
    again = Waiter()
    ex.session(again)
    assert hand.ways[1].offers == hand.ways[0].offers
    hand.ways[1].breaks(UnavailableError("again"))
    assert isinstance(again.what, UnavailableError), "who waits for a session that never comes gets to know"


def test_an_answer_to_no_offer_changes_nothing():
    shm = Beside("shm")
    ex, hand, _, _ = opened(shm)
    hand.ways[0].deliver(said(("shm", "no")))
    hand.ways[0].deliver(said(("shm", "")))
    assert session_of(ex) == Session("inline", {"shm": "no"})
    assert shm.ways == []
    ex, hand, _, _ = opened(Beside("tcp"))
    hand.ways[0].deliver(said(("shm", "")))
    assert session_of(ex) == Session("inline", {})


# ---- lent memory -----------------------------------------------------------------------------------------------------


class Slot:
    """Memory of a transport for one answer; given: how often it came back."""

    def __init__(self):
        self.given = 0
        self.memory = mmap.mmap(-1, 4096)
        self.memory[: X.nbytes] = (2 * X).tobytes()

    def lend(self, request_id=1, **fields):
        def give_back():
            self.given += 1

        lent = Lent(memoryview(self.memory)[: X.nbytes], give_back)
        output = TensorView.of_raw(pb.DATA_TYPE_F32, (3, 8), lent.array())
        return answer(request_id, **{"output": output, "give_back": lent.release, **fields})


def test_lent_memory_goes_back_with_the_last_array_over_it():
    slot = Slot()
    result = result_of(slot.lend(), request())
    part = result.output[1:2, ::2]
    assert part.tolist() == [[2.0] * 4]
    del result
    gc.collect()
    assert slot.given == 0, "somebody still reads it"
    part += 1
    del part
    gc.collect()
    assert slot.given == 1


def test_torch_keeps_lent_memory_as_numpy_does():
    slot = Slot()
    ask = Request(0, torch.ones(3, 8), torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 2))
    output = result_of(slot.lend(), ask).output
    assert torch.equal(output, torch.full((3, 8), 2.0))
    row = output[2]
    del output
    gc.collect()
    assert slot.given == 0
    del row
    gc.collect()
    assert slot.given == 1


def test_who_knows_earlier_gives_it_back_once():
    slot = Slot()
    with result_of(slot.lend(), request()) as result:
        total = 0.5 * result.output
    assert (slot.given, result.output) == (1, None)
    result.release()
    del result
    gc.collect()
    assert slot.given == 1
    assert total.sum() == X.size


def test_a_second_release_does_nothing():
    given = []
    result = result_of(answer(1, give_back=lambda: given.append(1)), request())
    result.release()
    result.release()
    assert given == [1]


def test_memory_of_their_own_is_released_as_well():
    with result_of(answer(1), request()) as result:
        assert result.output.shape == (3, 8)
    assert result.output is None


def test_what_nobody_reads_goes_back_at_once():
    wrong_shape = TensorView.of_raw(pb.DATA_TYPE_F32, (1, 8), X.tobytes())
    for fields, options in (({"output": wrong_shape}, {}), ({"output": None, "digest": pb.Digest()}, {"digest": True})):
        slot, waiter = Slot(), Waiter()
        ex, hand, _ = exchange()
        number = ex.submit(request(**options), None, waiter)
        hand.ways[0].deliver(view := slot.lend(number, **fields))
        assert len(waiter.told) == 1
        assert slot.given == 1
        del view


def test_the_late_answer_to_a_cancelled_request_goes_back_at_once():
    slot = Slot()
    ex, hand, _ = exchange()
    number = ex.submit(request(), None, Waiter())
    assert ex.cancel(number)
    hand.ways[0].deliver(view := slot.lend(number))
    assert slot.given == 1
    del view


def test_an_answer_that_meets_a_cancelled_future_goes_back():
    slot = Slot()

    class Places:
        def release(self): ...

    future = ForwardFuture(exchange()[0], Places())
    assert Future.cancel(future)  # the exchange has it already: it is on its way
    result = result_of(slot.lend(), request())
    future.answer(result)
    assert (slot.given, result.output) == (1, None)


def test_memory_that_is_of_no_use_is_never_given_back():
    given = []
    with pytest.raises((ValueError, BufferError)):
        Lent(memoryview(np.ones((4, 4)))[::2], lambda: given.append(1))
    gc.collect()
    assert given == []
