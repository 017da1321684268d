"""What becomes of an offer of faster transports (SessionOffer): which one a session gets, and why not another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from expertd.v1 import expert_service_pb2 as pb

# Why it is so: decision 165 in DECISIONS.md.
__all__ = ["OfferedTransport", "OfferedTransports", "answer_offer"]


class OfferedTransport(Protocol):
    """A way in that a session of another transport opens."""

    def offer(self, caller: str, host: str, /) -> tuple[str, str, str]:
        """(token, endpoint, "") for a caller on `host` (SessionOffer.host_id), or ("", "", why not).  Does not wait."""
        ...

    def dismiss(self, unwelcome: Callable[[str], bool], /) -> None:
        """Ends the sessions of callers who are let in no more, and forgets their tokens."""


OfferedTransports = Mapping[str, OfferedTransport | str]
"""By the transport's name in the contract; a sentence instead of a transport: why this server has none."""


def answer_offer(offered: OfferedTransports, offer: pb.SessionOffer, caller: str) -> pb.SessionAnswer:
    """The first transport of the offer that can be had."""
    answer, opened = pb.SessionAnswer(), ""
    for name in offer.transports:
        transport = offered.get(name, "this server does not know it")
        why = transport if isinstance(transport, str) else f"not used, because the client prefers {opened}"
        if not opened and not isinstance(transport, str):
            answer.token, answer.endpoint, why = transport.offer(caller, offer.host_id)
            opened = "" if why else name
        answer.verdicts.add(transport=name, accepted=opened == name and not why, reason=why)
    return answer
