"""W3C's traceparent: what is one, and who records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.common.trace_context import NONE, context_of, text_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_recorded_trace_is_its_ids():
    assert context_of(GOOD) == bytes.fromhex(TRACE + SPAN)
    assert context_of(f"00-{TRACE}-{SPAN}-03") == context_of(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}-00",  # not recorded
        f"00-{TRACE}-{SPAN}-02",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"{GOOD}-more",  # version 0 has no more
        f"{GOOD}\n",
        GOOD[:-1],
        GOOD.replace("-", "_"),
        f" {GOOD}",
        "00-a-b-01",
    ],
)
def test_what_is_none_is_no_error(text):
    assert context_of(text) == NONE


def test_a_newer_version_may_say_more():
    assert context_of(f"cc-{TRACE}-{SPAN}-01-what-comes") == context_of(GOOD)
    assert context_of(f"cc-{TRACE}-{SPAN}-01x") == NONE


@given(st.binary(min_size=24, max_size=24).filter(lambda b: any(b[:16]) and any(b[16:])))
def test_there_and_back(context):
    assert context_of(text_of(context)) == context


@given(st.text(alphabet="0f-x", max_size=60))
def test_whatever_comes_it_is_ids_or_none(text):
    assert len(context_of(text)) in (0, 24)
