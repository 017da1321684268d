"""Which transport of an offer a session gets."""

from __future__ import annotations

from expertd.v1 import expert_service_pb2 as pb
from expertd_server.service.offers import answer_offer


class Offered:
    """why: it refuses with that."""

    def __init__(self, name: str, why: str = "") -> None:
        self.name, self.why = name, why
        self.asked: list[tuple[str, str]] = []

    def offer(self, caller: str, host: str) -> tuple[str, str, str]:
        self.asked.append((caller, host))
        return ("", "", self.why) if self.why else (f"token of {self.name}", f"endpoint of {self.name}", "")

    def dismiss(self, unwelcome) -> None:
        pass


def test_a_session_gets_the_first_transport_that_can_be_had_and_no_second_one():
    full, one, two = Offered("full", "no room"), Offered("one"), Offered("two")
    offered = {"full": full, "one": one, "two": two, "none": "was not built"}
    names = ["unheard-of", "none", "full", "one", "two"]
    answer = answer_offer(offered, pb.SessionOffer(transports=names, host_id="here"), "alice")
    assert (answer.token, answer.endpoint) == ("token of one", "endpoint of one")
    assert [(v.transport, v.accepted, v.reason) for v in answer.verdicts] == [
        ("unheard-of", False, "this server does not know it"),
        ("none", False, "was not built"),
        ("full", False, "no room"),
        ("one", True, ""),
        ("two", False, "not used, because the client prefers one"),
    ]
    assert answer_offer(offered, pb.SessionOffer(transports=["two", "none"], host_id="here"), "alice").verdicts[1] == (
        pb.TransportVerdict(transport="none", reason="was not built")
    ), "what a server has not is not what the client does not prefer"
    two.asked.clear()
    assert (full.asked, one.asked) == ([("alice", "here")], [("alice", "here")])
    assert two.asked == [], "a token that nobody uses takes the place of another one"
