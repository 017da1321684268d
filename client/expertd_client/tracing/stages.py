"""Where the time of a call goes: the server's stages placed on the caller's clock, and a call cut into stages that add
up to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.tracing.records import FROM_GPU_TO_GPU, SubRequestTrace, TracedCall

__all__ = ["SERVER", "STAGES", "Placed", "Span", "own_clock", "placed", "stages_of"]

SERVER: Mapping[str, str] = {
    "decode": "decode_ns",
    "queue": "queue_ns",
    "collect": "copy_in_ns",
    "kernel": "kernel_ns",
    "deliver": "copy_out_ns",
    "encode": "encode_ns",
}
"""A server's stages, in their order, by their fields in Timing."""
STAGES: Sequence[str] = ("attention", "split", "send", *SERVER, "wire", "wake", "join", FROM_GPU_TO_GPU)
"""Of a step, in the order in which a picture shows them; attention stands between calls, the others are a call's; what
travels from GPU to GPU is one piece."""


class Span(NamedTuple):
    """Nanoseconds on the caller's clock."""

    name: str
    begin_ns: int
    end_ns: int


class Placed(NamedTuple):
    """A part at its server.

    stages   one after another, none outside of the round trip
    clock    how they were placed: "the same clock", where the server said when the request came and its clock is this
             one's; else "midpoint": as much of the rest of the round trip before them as after
    """

    stages: list[Span]
    clock: str


def own_clock(part: SubRequestTrace) -> bool:
    """Whether the server's clock is this host's: then the request came to it within the round trip.  The clock of
    another host, which counts from its own start, is not within a millisecond of ours but by a rare chance."""
    arrival_ns = 0 if part.timing is None else part.timing.arrival_ns
    return part.begin_ns <= arrival_ns <= part.answered_ns


def placed(part: SubRequestTrace, same_clock: bool) -> Placed:
    """The stages of an answered part.  same_clock: own_clock() of every part that its server answered."""
    assert part.timing is not None
    lengths = _lengths(part.timing, part.answered_ns - part.begin_ns)
    inside = sum(lengths.values())
    if same_clock:
        at, clock = min(part.timing.arrival_ns, part.answered_ns - inside), "the same clock"
    else:
        # What was on its way before `sent` is known to be so only where the stages have room after it.
        sent = min(part.sent_ns, part.answered_ns - inside)
        at, clock = sent + (part.answered_ns - sent - inside) // 2, "midpoint"
    stages = []
    for name, ns in lengths.items():
        stages.append(Span(name, at, at + ns))
        at += ns
    return Placed(stages, clock)


def _lengths(timing: pb.Timing, round_trip_ns: int) -> dict[str, int]:
    """Of the server's stages; where they are longer than the round trip, as two clocks may say, in proportion."""
    lengths = {name: int(getattr(timing, field)) for name, field in SERVER.items()}
    inside = sum(lengths.values())
    if inside > round_trip_ns:
        lengths = {name: ns * round_trip_ns // inside for name, ns in lengths.items()}
    return lengths


def stages_of(call: TracedCall) -> dict[str, int]:
    """Nanoseconds of each stage of a finished call; they add up to it.  Of several servers the one counts that answered
    last: it is whom the caller waited for.

    send    until that part was on its way, those before it included
    wire    what of its round trip the server did not have: encoding by gRPC, sockets, doorbells, wake-ups
    wake    from the last answer until the caller went on
    """
    last = max(call.answers, key=lambda part: part.answered_ns, default=None)
    if last is None or last.timing is None:  # nothing had to be asked
        return {"split": 0, "join": call.end_ns - call.begin_ns}
    joined_ns = max(call.joined_ns or last.answered_ns, last.answered_ns)
    lengths = _lengths(last.timing, last.answered_ns - last.begin_ns)
    inside = sum(lengths.values())
    sent_ns = min(last.sent_ns, last.answered_ns - inside)
    split_ns = min(call.split_ns or call.begin_ns, sent_ns)
    return {
        "split": split_ns - call.begin_ns,
        "send": sent_ns - split_ns,
        **lengths,
        "wire": last.answered_ns - sent_ns - inside,
        "wake": joined_ns - last.answered_ns,
        "join": call.end_ns - joined_ns,
    }
