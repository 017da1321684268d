"""What runs next (csrc/queues.h, accounts.h), as properties, on a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from rules_kit import MS, SECOND, Asked, Rules, urgency

LAYERS = tuple((n, 2) for n in range(4))


@dataclass(frozen=True)
class Spec:
    layer: int
    tokens: int
    gap: int
    deadline_after: int | None
    cancelled: bool
    on_input: bool


specs = st.lists(
    st.builds(
        Spec,
        st.integers(0, 3),
        st.integers(1, 40),
        st.integers(0, 5),
        st.none() | st.integers(1, 60),
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    max_size=40,
)


def line_of(r: Asked) -> tuple[int, bool]:
    return r.layer, r.on_input


def fill(items: list[Spec], max_tokens: int) -> tuple[Rules, list[Asked], int]:
    rules, all_, now = Rules(max_tokens, layers=LAYERS), [], 1
    for s in items:
        now += s.gap
        deadline = 0 if s.deadline_after is None else now + s.deadline_after
        r = Asked(s.layer, s.tokens, 1, now, deadline, on_input=s.on_input, cancelled=s.cancelled)
        assert rules.come(r) == ("", 0)
        all_.append(r)
    return rules, all_, now


def expired(r: Asked, now: int) -> bool:
    return r.deadline != 0 and now >= r.deadline


@settings(deadline=None)
@given(specs, st.integers(1, 64), st.integers(0, 20))
def test_every_request_leaves_once_and_batches_are_sound(items, max_tokens, step):
    rules, all_, now = fill(items, max_tokens)
    left, cuts = list(all_), 0
    while (c := rules.cut(now)) is not None:
        heads: dict[tuple[int, bool], int] = {}
        for r in left:
            heads[line_of(r)] = min(urgency(r), heads.get(line_of(r), urgency(r)))
        gone = [*c.run, *c.dead]
        assert heads[line_of(gone[0])] == min(heads.values()), "the line with the most urgent request comes first"
        assert len({line_of(r) for r in gone}) == 1
        assert sum(r.tokens for r in c.run) <= max_tokens or len(c.run) == 1
        assert not any(r.cancelled or expired(r, now) for r in c.run)
        assert all(r.cancelled or expired(r, now) for r in c.dead)
        for r in gone:
            left.remove(r)  # fails where one leaves twice
        now += step
        cuts += 1
        assert cuts <= len(all_), "it ends"
    assert not left


@settings(deadline=None)
@given(specs, st.integers(1, 64))
def test_a_request_waits_for_at_most_as_many_batches_as_there_are_older_requests(items, max_tokens):
    rules, all_, now = fill(items, max_tokens)
    number = 0
    while (c := rules.cut(now)) is not None:
        number += 1
        for r in c.run:
            assert number <= sum(urgency(other) <= urgency(r) for other in all_)


def filled(*requests: Asked, max_tokens: int = 64, layers=LAYERS) -> Rules:
    rules = Rules(max_tokens, layers=layers)
    for r in requests:
        assert rules.come(r) == ("", 0)
    return rules


def test_requests_of_all_clients_for_one_layer_make_one_batch():
    c = filled(*(Asked(3, 8, arrival=i, caller=str(i)) for i in range(8)), max_tokens=4096).cut(100)
    assert c is not None
    assert len(c.run) == 8


def test_router_weight_on_input_is_a_batch_of_its_own():
    c = filled(*(Asked(arrival=i, on_input=i % 2 == 1) for i in range(4))).cut(10)
    assert c is not None
    assert [r.arrival for r in c.run] == [0, 2]


def test_a_request_that_does_not_fit_waits_and_is_not_overtaken_in_its_line():
    rules = filled(*(Asked(tokens=tokens, arrival=i) for i, tokens in enumerate((6, 6, 1))), max_tokens=8)
    first, second = rules.cut(10), rules.cut(10)
    assert first is not None
    assert second is not None
    assert ([r.tokens for r in first.run], [r.tokens for r in second.run]) == ([6], [6, 1])


def test_one_request_above_the_limit_makes_a_batch_alone():
    c = filled(Asked(tokens=100), Asked(arrival=1), max_tokens=8).cut(5)
    assert c is not None
    assert [r.tokens for r in c.run] == [100]


def test_nothing_waits():
    assert filled().cut(0) is None


def test_clients_just_answered_are_waited_for_a_part_of_their_batch_s_time():
    rules = Rules()
    rules.rules_batch_ended(1000, 1000, 8)
    for waiting in (1, 7):
        assert rules.rules_until(0.05, waiting) == 1050
    assert rules.rules_until(0.05, 8) == 0, "all are back"
    rules.rules_batch_ended(1000, 1000, 1)
    assert rules.rules_until(1.0, 1) == 0, "a client alone is never waited with"


def test_patience_shrinks_with_clients_that_do_not_come_back_and_grows_again():
    rules = Rules()
    rules.rules_batch_ended(0, 1600, 8)
    for want in (800, 400, 200, 100, 100):
        rules.rules_waited(1)
        assert rules.rules_until(1.0, 1) == want
    for want in (200, 400, 800, 1600, 1600):
        rules.rules_waited(8)
        assert rules.rules_until(1.0, 1) == want


def run_all(rules: Rules, now: int = 10**9) -> list[Asked]:
    """Everything, in the order of its batches; a route takes 1 us."""
    out: list[Asked] = []
    while (c := rules.cut(now)) is not None:
        if c.run:
            rules.ended(now, c.run, 1000 * sum(r.routes for r in c.run))
        out += c.run
    return out


def test_one_who_floods_a_line_does_not_hold_up_the_next():
    modest = Asked(tokens=8, arrival=100, caller="modest")
    rules = filled(*(Asked(tokens=8, arrival=i, caller="greedy") for i in range(100)), modest, max_tokens=16)
    assert run_all(rules).index(modest) < 2


def test_one_who_floods_all_layers_does_not_hold_up_the_next():
    """Lines with older requests go first; a client's larger share puts them off."""
    rules = Rules(8, layers=tuple((n, 8) for n in range(4)))
    later = Asked(3, 1, arrival=10**12, caller="modest")  # waits while the other is served: so shares differ
    assert rules.come(later) == ("", 0)
    for _ in range(16):
        assert rules.come(Asked(0, 4096, 8, caller="greedy")) == ("", 0)
        c = rules.cut(1)
        assert c is not None
        assert [r.caller for r in c.run] == ["greedy"]
        rules.ended(1, c.run, 1000 * c.run[0].routes)
    for i in range(300):
        assert rules.come(Asked(i % 3, 8, arrival=i, caller="greedy")) == ("", 0)
    modest = Asked(3, 8, arrival=50 * MS, caller="modest")
    assert rules.come(modest) == ("", 0)
    assert run_all(rules)[0] is modest


def test_shares_are_of_routes_not_of_requests_or_tokens():
    rules = Rules(4, layers=((0, 2),))
    for i in range(8):
        for top_k, caller in ((2, "wide"), (1, "narrow")):
            assert rules.come(Asked(0, 4, top_k, i, caller=caller)) == ("", 0)
    assert sum(r.caller == "narrow" for r in run_all(rules)[:9]) == 6


def test_who_was_away_cannot_save_up():
    """One who was served much alone, and one who comes then, take turns."""
    rules = Rules(4)
    for i in range(50):
        assert rules.come(Asked(tokens=4, arrival=i, caller="here")) == ("", 0)
    for _ in range(49):
        c = rules.cut(10**9)
        assert c is not None
        rules.ended(10**9, c.run, 1000)
    for i in range(8):
        for caller in ("here", "new"):
            assert rules.come(Asked(tokens=4, arrival=100 + i, caller=caller)) == ("", 0)
    assert sum(r.caller == "new" for r in run_all(rules)[:8]) <= 5


def test_a_deadline_makes_more_urgent_and_none_does_not():
    usual = urgency(Asked(arrival=50))
    assert usual == 50 + 100_000_000
    assert urgency(Asked(arrival=50, deadline=usual - 1)) == usual - 1
    assert urgency(Asked(arrival=50, deadline=usual + 1)) == usual, "far ahead, it does not put him behind others"


def test_a_batch_has_no_more_routes_than_its_layer_s_own_tokens_have():
    """One wide request would make every row of its batch as wide: memory that nobody planned."""
    rules = filled(Asked(tokens=4, top_k=8), Asked(tokens=12, top_k=2, arrival=1), max_tokens=16)
    c = rules.cut(10)  # 16 rows of 8 are 128, and 16 of the layer's own 2 are 32
    assert c is not None
    assert [r.top_k for r in c.run] == [8]


PER_ROW, PER_BATCH = 8_000, 20_000


def shared(ns_of_rows, max_tokens=4096, now=SECOND):
    """A layer whose batches take so long, at which two clients were served just now."""
    rules = Rules(max_tokens)
    for n in range(13):
        rules.rules_saw(0, 1 << n, 2, ns_of_rows(1 << n))
    for caller in ("modest", "greedy"):
        assert rules.come(Asked(tokens=1, top_k=2, arrival=now, caller=caller)) == ("", 0)
        assert rules.cut(now) is not None
    return rules


def flood(rules, now=SECOND, times=8):
    for i in range(times):
        assert rules.come(Asked(tokens=512, top_k=2, arrival=now + i, caller="greedy")) == ("", 0)


def linear(rows):
    return PER_BATCH + PER_ROW * rows


def sizes(rules, now=SECOND):
    out = []
    while (c := rules.cut(now)) is not None:
        out.append([r.caller for r in c.run])
    return out


def test_a_batch_that_runs_keeps_nobody_waiting_for_more_than_it_saves():
    """Eight requests of 512 tokens at once would keep one who comes meanwhile waiting eight times as long."""
    rules = shared(linear)
    flood(rules)
    assert sizes(rules) == [["greedy"]] * 8


def test_a_short_request_is_in_the_next_batch_and_does_not_wait_for_all_the_long_ones():
    rules = shared(linear)
    flood(rules)
    assert rules.come(Asked(tokens=2, top_k=2, arrival=SECOND + 9, caller="modest")) == ("", 0)
    first, *rest = sizes(rules)
    assert sorted(first) == ["greedy", "modest"]
    assert rest == [["greedy"]] * 7


def test_short_batches_and_those_that_save_time_are_as_large_as_before():
    rules = shared(linear)
    for i in range(64):
        assert rules.come(Asked(tokens=1, top_k=2, arrival=SECOND + i, caller=f"client {i}")) == ("", 0)
    assert [len(c) for c in sizes(rules)] == [64]
    rules = shared(lambda rows: 2 * MS + PER_ROW * rows // 8)
    flood(rules)
    assert [len(c) for c in sizes(rules)] == [8]


def test_a_client_alone_has_large_batches():
    rules = shared(linear)
    flood(rules, 3 * SECOND)
    assert [len(c) for c in sizes(rules, 3 * SECOND)] == [8]


def test_what_is_better_apart_is_computed_together_now_and_then():
    """Or nobody would see that it saves time now."""
    rules, counts = shared(linear), []
    for _ in range(2000):
        flood(rules, times=2)
        counts.append(len(rules.cut(SECOND).run))
        counts += [len(c) for c in sizes(rules)]
    assert sum(counts) == 4000
    assert counts.count(2) == 1
    assert max(counts) == 2
