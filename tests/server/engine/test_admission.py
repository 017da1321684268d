"""Who may wait, and what the others are told: of a core that nobody runs, so that nothing leaves its queue."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import pytest
from core_library import needs_core
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_kit import MS, Asked, Rules

from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    NotReadyError,
    QueueFullError,
)
from expertd_server.engine.abi import Config, Forward
from expertd_server.engine.admission import QueueLimits, State, shut
from expertd_server.engine.core import Core
from expertd_server.engine.request import EngineRequest, Operand
from expertd_server.engine.served import ServedLayer

pytestmark = needs_core
LIMITS = QueueLimits(tokens=100, requests=10, routes=300, nbytes=50_000)


class Ask(NamedTuple):
    tokens: int = 1
    top_k: int = 1
    nbytes: int = 0

    def refused(self, core: Core, caller: int = 1, deadline_ns: int = 0) -> ExpertdError | None:
        """Puts it into the queue, or says why not; admits() says the same just before."""
        f = Forward(
            tokens=self.tokens, top_k=self.top_k, bytes=self.nbytes, caller=caller, deadline_ns=deadline_ns,
            arrival_ns=time.monotonic_ns(),
        )  # fmt: skip
        asked, refused = core.admits(f), None
        try:
            core.submit(f)
        except ExpertdError as e:
            refused = e
        assert type(asked) is type(refused)
        return refused


def core_of(limits: QueueLimits = LIMITS) -> Core:
    return Core(
        Config(
            batch_slots=1, max_tokens=64, max_queue_requests=limits.requests, max_queue_tokens=limits.tokens,
            max_queue_routes=limits.routes, max_queue_bytes=limits.nbytes, refuse_late=limits.refuse_late,
        )
    )  # fmt: skip


def waiting(core: Core, caller: int = 1) -> tuple[int, int, int, int]:
    all_, _ = core.waiting(caller)
    return all_.requests, all_.tokens, all_.routes, all_.bytes


def test_a_server_that_does_not_serve_says_why():
    assert isinstance(shut(State.LOADING), NotReadyError)
    assert isinstance(shut(State.DRAINING), DrainingError)
    assert shut(State.SERVING) is None
    core = core_of()
    core.drain()
    with pytest.raises(DrainingError, match="takes no new requests; ask another replica"):
        core.submit(Forward(tokens=1, top_k=1, caller=1, deadline_ns=1))


def test_a_request_has_to_have_time_left():
    core, now = core_of(), time.monotonic_ns()
    assert Ask().refused(core, deadline_ns=0) is None
    assert Ask().refused(core, deadline_ns=now + 10**12) is None
    late = Ask().refused(core, deadline_ns=now)
    assert isinstance(late, DeadlineExceededError)
    assert "had passed when it came" in late.message
    assert late.retry_after_us == 0
    assert waiting(core)[0] == 2, "who is refused does not wait"


def test_what_a_request_holds_is_its_operands_and_its_output():
    x, ids, w = Operand("bf16", np.empty(48, np.uint16)), Operand("i32", np.empty(6, np.int32)), np.empty(6, np.float32)
    layer = ServedLayer(0, 8, range(8), 2, 16, 32, None, "none")
    r = EngineRequest(layer, 3, 2, x, ids, Operand("f32", w), lambda *_: None, output_dtype="f32")
    assert (r.routes, r.nbytes) == (6, 96 + 24 + 24 + 3 * 16 * 4)


@pytest.mark.parametrize(
    ("ask", "most", "unit"),
    [
        (Ask(1, 1), 10, "requests"),
        (Ask(20, 1), 100, "tokens"),
        (Ask(10, 8), 300, "routes"),
        (Ask(40, 1), 100, "tokens"),
        (Ask(1, 1, 9000), 50_000, "bytes"),
    ],
    ids=["requests", "tokens", "routes", "few and large", "bytes"],
)
def test_one_caller_alone_may_fill_the_queue_and_not_a_request_more(ask, most, unit):
    core = core_of()
    while (refused := ask.refused(core)) is None:
        pass
    assert isinstance(refused, QueueFullError)
    assert refused.retry_after_us > 0
    place = ("requests", "tokens", "routes", "bytes").index(unit)
    each = (1, ask.tokens, ask.tokens * ask.top_k, ask.nbytes)[place]
    now = waiting(core)[place]
    assert now <= most < now + each
    assert f"got {now} {unit} waiting, {now} of them this caller's, and {each} more" in refused.message
    assert f"want at most {most} of one caller, and room for others; try again after" in refused.message


def test_the_text_tells_others_from_its_caller():
    core = core_of()
    assert Ask(30).refused(core, caller=1) is None
    assert Ask(60).refused(core, caller=2) is None
    refused = Ask(50).refused(core, caller=1)
    assert refused is not None
    assert "got 90 tokens waiting, 30 of them this caller's, and 50 more, want at most 100" in refused.message


def test_an_empty_queue_takes_any_single_request():
    core = core_of()
    assert Ask(1 << 20, 8).refused(core) is None
    assert Ask(1).refused(core) is not None


def test_the_longest_text_is_whole():
    """Limits of 19 digits: more than a server has bytes of memory."""
    core = core_of(QueueLimits(1 << 62, 1 << 30, 1 << 62, 1 << 60))
    assert Ask(1, 1, 1 << 60).refused(core) is None
    refused = Ask(1, 1, 1 << 60).refused(core)
    assert refused is not None
    assert refused.message.endswith("try again after retry_after_us, or another replica")


def test_callers_whose_requests_are_computed_take_no_turns_any_more():
    """Of 50 that came and went, none is before one who asks while another one floods."""
    rules, now = Rules(4, QueueLimits(refuse_late=True)), MS
    rules.rules_saw(0, 4, 2, 10 * MS)
    for n in range(50):
        assert rules.come(Asked(arrival=now, caller=f"gone {n}")) == ("", 0)
        while (cut := rules.cut(now)) is not None:
            rules.ended(now, cut.run, 10 * MS)
    for _ in range(100):  # a second's work
        assert rules.come(Asked(tokens=4, arrival=now, caller="floods")) == ("", 0)
    assert rules.come(Asked(arrival=now, deadline=now + 100 * MS, caller="asks")) == ("", 0)
    late = rules.come(Asked(tokens=40, top_k=2, arrival=now, deadline=now + 100 * MS, caller="asks for much"))
    assert late[0] == "OVERLOADED", "a control: what is late is refused"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 8))
def test_whoever_fills_the_queue_leaves_room_for_the_next_one_who_comes(callers, top_k):
    """Greedy callers, each with requests of one size, fill it in turn; then a new one asks for one token."""
    core, refused = core_of(), 0
    while refused < len(callers):
        refused = sum(Ask(tokens, top_k).refused(core, caller) is not None for caller, tokens in enumerate(callers, 1))
    assert Ask(1).refused(core, caller=99) is None
    requests, tokens, routes, _ = waiting(core)
    assert requests - 1 <= 10 * 4 / 3
    assert tokens - 1 <= 100 * 4 / 3
    assert routes - 1 <= 300 * 4 / 3
    assert max(core.waiting(caller)[1].requests for caller in range(1, len(callers) + 1)) <= 10
