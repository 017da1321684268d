"""What waits in the core: deadlines, cancels, a full queue, whose turn it is, layers that change meanwhile."""

import time

import pytest
from core_kit import MOST, Bench, Caller, bench, inputs
from core_library import needs_core
from waiting import until

pytestmark = [needs_core, pytest.mark.timeout(60)]


def test_what_is_not_held_is_refused():
    with bench() as b:
        handle, _, _ = b.forward(*inputs(1), layer=4)
        assert b.outcome(handle)[0] == "LAYER_NOT_HELD"


def test_deadlines_are_looked_at_when_it_comes_and_when_its_turn_comes():
    with bench() as b:
        assert b.forward(*inputs(1), deadline_ns=time.monotonic_ns() - 1)[1] == "DEADLINE_EXCEEDED"
        first = b.hold(*inputs(1))
        late = b.forward(*inputs(1), deadline_ns=(deadline_ns := time.monotonic_ns() + 500_000_000))
        until(lambda: time.monotonic_ns() > deadline_ns)
        b.may_run.set()
        assert b.outcome(first[0])[0] == ""
        assert b.outcome(late[0])[0] == "DEADLINE_EXCEEDED"
        assert len(b.batches) == 1


def test_a_cancelled_request_is_not_computed():
    with bench() as b:
        first = b.hold(*inputs(1))
        gone, stays = b.forward(*inputs(2)), b.forward(*inputs(3))
        b.core.cancel(gone[0])
        b.may_run.set()
        assert b.outcome(gone[0])[0] == "CANCELLED"
        assert b.outcome(stays[0])[0] == ""
        assert b.outcome(first[0])[0] == ""
        assert [rows for _, _, rows, *_ in b.batches] == [1, 3]
        assert b.core.load().queued_tokens == 0


def test_a_full_queue_refuses_with_advice_and_takes_again():
    with bench(max_queue_requests=3, max_queue_tokens=10) as b:
        first = b.hold(*inputs(9))
        several = [b.forward(*inputs(4)), b.forward(*inputs(4))]
        assert b.forward(*inputs(4))[1] == "QUEUE_FULL"  # 12 tokens
        several.append(b.forward(*inputs(1)))
        assert b.forward(*inputs(1))[1] == "QUEUE_FULL"  # 4 requests
        b.may_run.set()
        for handle, *_ in (first, *several):
            assert b.outcome(handle)[0] == ""
        assert b.forward(*inputs(MOST))[1] == "", "an empty queue takes any request"


@pytest.mark.parametrize(
    ("limits", "most", "more"),
    [({"max_queue_routes": 20}, 3, {}), ({"max_queue_bytes": 1000}, 2, {"bytes": 400})],
    ids=["routes", "bytes"],
)
def test_a_queue_is_full_of_routes_or_bytes_too(limits, most, more):
    with bench(**limits) as b:
        first = b.hold(*inputs(1))
        taken = [b.forward(*inputs(2, k=3), **more) for _ in range(most)]
        assert [reason for _, reason, _ in taken] == [""] * most
        assert b.forward(*inputs(2, k=3), **more)[1] == "QUEUE_FULL"
        assert b.forward(*inputs(1, k=1), caller=2)[1] == "", "room is left for others"
        b.may_run.set()
        for handle, *_ in (first, *taken):
            assert b.outcome(handle)[0] == ""
        assert b.forward(*inputs(2, k=3), **more)[1] == ""


def test_wide_requests_are_not_one_batch_with_all_the_others():
    """Every row of a batch is as wide as its widest: more routes than so many of the model's tokens have is two
    batches, and one request that has more is refused in shared memory, as it is inline (service/intake.py)."""
    with bench() as b:
        b.add_layer(layer=5, generation=9, top_k=2)
        b.hold(*inputs(1), layer=5)
        several = [b.forward(*inputs(8, k=8), layer=5), b.forward(*inputs(40, k=2), layer=5)]  # 48 x 8 > 64 x 2
        b.may_run.set()
        for handle, *_ in several:
            assert b.outcome(handle)[0] == ""
        assert [rows for layer, _, rows, *_ in b.batches if layer == 5] == [1, 8, 40]
        c = Caller(b)
        t = inputs(40, k=4)
        assert c.call(c.request(*t, layer=5)) == "TOO_MANY_TOKENS"
        assert b"got 160 routes, 4 for each of 40 tokens" in c.answer.text
        t = inputs(32, k=4)
        assert c.call(c.request(*t, layer=5)) == ""
        c.close()


def test_draining_refuses_what_is_new_and_answers_what_was_taken():
    with bench() as b:
        b.may_run.clear()
        taken = [b.forward(*inputs(1))[0] for _ in range(3)]
        b.core.drain()
        assert b.forward(*inputs(1))[1] == "DRAINING"
        b.may_run.set()
        assert [b.outcome(h)[0] for h in taken] == [""] * 3
        assert b.core.load().admitted == 3


def test_layers_come_and_go_while_requests_wait():
    with bench() as b:
        b.add_layer(layer=5, generation=11)
        first = b.hold(*inputs(1))
        stays, given = b.forward(*inputs(2)), b.forward(*inputs(3), layer=5)
        b.until_taken(3)
        b.add_layer(layer=3, generation=2)
        b.core.remove_layer(5)
        later = b.forward(*inputs(2)), b.forward(*inputs(1), layer=5)
        b.may_run.set()
        for handle, *_ in (first, stays, given, later[0]):
            assert b.outcome(handle)[0] == "", "a request is computed by what was held when it came"
        assert b.outcome(later[1][0])[0] == "LAYER_NOT_HELD"
        assert sorted((layer, generation) for layer, generation, *_ in b.batches) == [(3, 1), (3, 1), (3, 2), (5, 11)]
        b.turn()
        assert b.waited == [False, False, False]


def test_the_least_served_caller_goes_first_when_not_all_fit():
    with bench() as b:
        b.hold(*inputs(1))
        greedy = [b.forward(*inputs(16), caller=1) for _ in range(8)]
        modest = b.forward(*inputs(16), caller=2)
        b.may_run.set()
        for handle, *_ in (*greedy, modest):
            b.outcome(handle)
        order = list(b.answered)
        assert order.index(modest[0]) < order.index(greedy[3][0]), "it does not wait for all that was there before it"


def test_fail_all_answers_what_waits():
    b = Bench()
    b.add_layer()
    taken = [b.forward(*inputs(1))[0] for _ in range(3)]
    b.core.fail_all("DRAINING", "server: the device is lost")
    assert {b.outcome(h)[:3] for h in taken} == {("DRAINING", 0, "server: the device is lost")}
    assert b.core.load().queued_requests == 0
    b.start()
    b.close()
