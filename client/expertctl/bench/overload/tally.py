"""What became of requests that were sent with a deadline, and what that comes to: values in, a measurement out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from expertctl.bench.faults.failures import Failure, Failures
from expertctl.bench.overload.peak import STEP, Peak
from expertctl.common.percentiles import Durations
from expertd.errors import ExpertdError

__all__ = ["OverloadMeasurement", "OverloadTally"]


@dataclass(frozen=True, slots=True)
class OverloadMeasurement:
    """What a server made of a load.

    way                how requests travelled: a name of WAYS
    load               offered, as a multiple of the peak; peak_per_s: the largest rate that is answered in time, of
                       that way; peak_limited: the generator could not offer more; peak_refuted: more was answered
                       in time than the step of the search allows for, so the peak is too low, limited or not
    deadline_ms        of each request, from its leaving
    offered_per_s      that left; wanted_per_s: that were to leave
    goodput_of_peak    answered in time, a second, of the peak
    admitted           that were not refused
    late_admitted      part of them that was answered late, or failed; late_generator: more of them that were late for
                       this process alone, which had not looked
    refused            by reason
    refusal_p99_ms     from leaving to the refusal; not_retryable: refusals that say that another try is no use
    answer_p99_ms      of those in time
    lateness_p99_ms    how long after its time a request left
    generator_cpu, server_cpu   part of a core that each took; 0 = not known
    rss_mb             of the server, before and after; None = not known
    bare_refusal_p99_ms   of a bare grpc.aio server that refuses everything at once, under the same load; None = not
                       measured
    failures           the first requests that ended with an error which another try does not help, and why
    """

    way: str
    load: float
    deadline_ms: float
    offered_per_s: float
    goodput_of_peak: float
    late_admitted: float
    refusal_p99_ms: float
    peak_per_s: float
    wanted_per_s: float
    admitted: int
    late_generator: float
    refused: dict[str, int]
    not_retryable: int
    answer_p99_ms: float
    lateness_p99_ms: float
    generator_cpu: float
    server_cpu: float
    rss_mb: tuple[float, float] | None
    bare_refusal_p99_ms: float | None = None
    peak_limited: bool = False
    peak_refuted: bool = False
    failures: tuple[Failure, ...] = ()


@dataclass(slots=True)
class OverloadTally:
    """Times in seconds, on one clock."""

    answers: Durations = field(default_factory=Durations)
    refusals: Durations = field(default_factory=Durations)
    lateness: Durations = field(default_factory=Durations)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    sent: int = 0
    not_retryable: int = 0
    late: int = 0
    late_here: int = 0

    @property
    def open(self) -> int:
        """Sent, and nothing heard of since."""
        return self.sent - len(self.answers) - len(self.refusals) - self.late - self.late_here - self.failed.total()

    def left(self, due_s: float, now_s: float) -> None:
        """A request leaves that was to leave at due_s."""
        self.sent += 1
        self.lateness.add(now_s - due_s)

    def answered(self, left_s: float, end_s: float, now_s: float, since_s: float) -> None:
        """An answer is seen at now_s that cannot have come before since_s, to a request with the deadline end_s."""
        if now_s <= end_s:
            self.answers.add(now_s - left_s)
        elif since_s <= end_s:
            self.late_here += 1
        else:
            self.late += 1

    def ended(self, left_s: float, now_s: float, error: ExpertdError) -> None:
        """The server says no.  With a reason to try again it is a refusal; any other is a request that was lost."""
        if error.retryable:
            self.refused[error.reason] += 1
            self.refusals.add(now_s - left_s)
        else:
            self.failed[error.reason] += 1
            self.failures.failed(left_s, error)

    def row(
        self,
        way: str,
        load: float,
        deadline_s: float,
        peak: Peak,
        wall_s: float,
        cpu: tuple[float, float],
        rss_mb: tuple[float, float] | None,
        bare: OverloadTally | None = None,
    ) -> OverloadMeasurement:
        """wall_s: while requests left.  cpu: of the generator and the server.  bare: the same load on a bare server."""
        admitted = self.sent - len(self.refusals)
        lost = self.late + self.failed.total() + self.open

        def part(n: int) -> float:
            return round(n / admitted, 5) if admitted else 0.0

        def ms(d: Durations) -> float:
            return round(1e3 * d.summary().p99_s, 3)

        goodput = len(self.answers) / wall_s / peak.per_s

        return OverloadMeasurement(
            way=way,
            load=load,
            deadline_ms=round(1e3 * deadline_s, 2),
            offered_per_s=round(self.sent / wall_s, 1),
            goodput_of_peak=round(goodput, 4),
            late_admitted=part(lost),
            refusal_p99_ms=ms(self.refusals),
            peak_per_s=round(peak.per_s, 1),
            peak_limited=peak.limited,
            peak_refuted=goodput > STEP,
            wanted_per_s=round(load * peak.per_s, 1),
            admitted=admitted,
            late_generator=part(self.late_here),
            refused=dict(self.refused.most_common()),
            not_retryable=self.failed.total(),
            answer_p99_ms=ms(self.answers),
            lateness_p99_ms=ms(self.lateness),
            generator_cpu=round(cpu[0], 3),
            server_cpu=round(cpu[1], 3),
            rss_mb=rss_mb,
            bare_refusal_p99_ms=None if bare is None else ms(bare.refusals),
            failures=tuple(self.failures.first),
        )
