"""The core's reader of traceparents against the one in Python."""

from __future__ import annotations

import ctypes as C

from core_library import needs_core
from hypothesis import example, given
from hypothesis import strategies as st

from expertd.common.trace_context import context_of
from expertd_server.engine.core import library

pytestmark = needs_core

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def read(text: str) -> bytes:
    data, out = text.encode(), (C.c_uint8 * 24)(*[7] * 24)
    library().expertd_read_traceparent(data, C.c_uint64(len(data)), out)
    return bytes(out)


@st.composite
def nearly_good(draw):
    """GOOD with a few characters changed, cut or lengthened."""
    text = list(GOOD + draw(st.sampled_from(["", "-", "-x", "x"])))
    for _ in range(draw(st.integers(0, 3))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.sampled_from("0123456789abcdefABF-_ "))
    return "".join(text)[: draw(st.sampled_from([100, 100, 100, 54, 3, 0]))]


@given(nearly_good())
@example(GOOD)
@example(f"00-{TRACE}-{SPAN}-00")
@example(f"00-{'0' * 32}-{SPAN}-01")
@example(f"00-{TRACE}-{'0' * 16}-01")
@example(f"ff-{TRACE}-{SPAN}-01")
@example(f"cc-{TRACE}-{SPAN}-01-more")
@example(f"{GOOD}-more")
def test_both_read_the_same(text):
    assert read(text) == (context_of(text) or bytes(24))
