"""A trace as a picture (SVG): for each layer, what its calls did, on average."""

from __future__ import annotations

from collections import defaultdict

from expertd_client.bars import Bar, stacked
from expertd_client.tracing.chrome import attention
from expertd_client.tracing.recorder import Trace
from expertd_client.tracing.stages import STAGES, stages_of

__all__ = ["by_layer", "draw"]


def draw(trace: Trace) -> str:
    """One bar for each layer."""
    calls = trace.finished
    bars = []
    for layer, stages in by_layer(trace).items():
        here = [c for c in calls if c.layer == layer]
        tokens, servers = sum(c.tokens for c in here), len({p.server for c in here for p in c.answers})
        label = f"layer {layer}: {len(here)} call{'s' * (len(here) != 1)}, {tokens:,} tokens, "
        label += f"{servers} server{'s' * (servers != 1)}"
        bars.append(Bar(label, stages, f"{sum(stages.values()):,.0f} us a call"))
    title = "Where the time of each layer goes (means; of several servers the one that answered last)"
    return stacked(title, STAGES, {"microseconds a call": bars} if bars else {})


def by_layer(trace: Trace) -> dict[int, dict[str, float]]:
    """Layer -> stage -> microseconds a call, which add up to the mean call and the attention before it."""
    sums: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(STAGES, 0))
    counts: dict[int, int] = defaultdict(int)
    for call in trace.finished:
        counts[call.layer] += 1
        for name, ns in stages_of(call).items():
            sums[call.layer][name] += ns
    for gap in (gap for _, gap in attention(trace.modules) if gap.name.startswith("attention")):
        layer = int(gap.name.removeprefix("attention "))
        if layer in counts:
            sums[layer]["attention"] += gap.end_ns - gap.begin_ns
    return {n: {name: ns / 1000 / counts[n] for name, ns in sums[n].items()} for n in sorted(counts)}
