"""W3C trace context: the header `traceparent` as text, and as the 24 bytes that travel beside shared memory."""

from __future__ import annotations

import re

__all__ = ["NONE", "context_of", "text_of"]

NONE = b""
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


def context_of(traceparent: str) -> bytes:
    """Trace id and the caller's span id, 16 and 8 bytes, of a request that its caller records; NONE where he does not,
    or where the text is no traceparent (which, as W3C has it, is no error)."""
    found = _FORM.fullmatch(traceparent) if traceparent else None
    if found is None or (found[1] == "00" and found[5] is not None) or not int(found[4], 16) & _SAMPLED:
        return NONE
    trace, parent = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    return trace + parent if any(trace) and any(parent) else NONE


def text_of(context: bytes) -> str:
    """The traceparent of context_of()'s answer."""
    return f"00-{context[:16].hex()}-{context[16:24].hex()}-01"
