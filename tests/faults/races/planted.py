"""Faults that were in the code once: planted again, each is to be found."""

from __future__ import annotations

from weave import Fault

_FLIGHT, _LINK, _BESIDE = (
    "expertd_client.cluster.flight",
    "expertd_client.exchange.link",
    "expertd_client.transports.core_connection",
)

PLANTED: dict[str, Fault] = {
    # Who waits in a session hears that this client closed it, where its stream broke.
    "forgets-why": {_BESIDE: [("        self._broken = error\n", "")]},
    # A sub-request is put elsewhere that is asked of another server at the same time: its answer counts twice.
    "counts-twice": {
        _FLIGHT: [
            ("sub not in self.sub_requests or sub.tries or sub.result is not None:", "sub not in self.sub_requests:")
        ]
    },
    # A request that a session refuses as it ends is told so, and sent inline as well.
    "sends-twice": {
        _LINK: [
            (
                "            if self.pending.pop(request_id, None) is None:\n                return  # the channel",
                "            if self.pending.pop(request_id, None) is False:\n                return  # the channel",
            )
        ]
    },
}
