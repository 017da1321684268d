"""What each server of a cluster answered, counted over many calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from expertctl.common.percentiles import Durations, Summary
from expertd_client.cluster.result import Answered

__all__ = ["ByServer", "ServerAnswers", "of_all"]


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """Of one server.

    parts     of calls, that it answered; a call has one for each server that computes something of it
    tokens    of these parts: a token counts at each server that has a route of it
    routes    computed there
    helped    sub-requests for which another server was asked, too: the first was late, or failed
    latency   from the begin of the call to the answer of the part
    backends  parts by kernel
    """

    server: str
    parts: int
    tokens: int
    routes: int
    helped: int
    latency: Summary
    backends: dict[str, int]


class ByServer:
    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._took: dict[str, Durations] = {}
        self._backends: dict[str, Counter[str]] = {}

    def add(self, parts: Iterable[Answered]) -> None:
        """Those of one call."""
        for part in parts:
            if part.server not in self._counts:
                self._counts[part.server], self._took[part.server] = Counter(), Durations()
                self._backends[part.server] = Counter()
            counts = {"parts": 1, "tokens": part.tokens, "routes": part.routes, "helped": part.asked > 1}
            self._counts[part.server].update(counts)
            self._took[part.server].add(part.seconds)
            self._backends[part.server][part.backend] += 1

    def report(self) -> list[ServerAnswers]:
        """Of those that answered something."""
        return [
            ServerAnswers(
                server,
                counts["parts"],
                counts["tokens"],
                counts["routes"],
                counts["helped"],
                self._took[server].summary(),
                dict(self._backends[server].most_common()),
            )
            for server, counts in self._counts.items()
        ]


def of_all(found: Iterable[ServerAnswers], servers: Iterable[str]) -> list[ServerAnswers]:
    """In the order of servers, those that answered nothing as well."""
    by_address = {one.server: one for one in found}
    return [by_address.get(server) or ServerAnswers(server, 0, 0, 0, 0, Summary(), {}) for server in servers]
