"""A trace as a picture (SVG): for each layer, what its calls did, on average."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from expertctl.pictures.bars import Bar, stacked
from expertd_client.tracing.chrome import attention
from expertd_client.tracing.recorder import Trace
from expertd_client.tracing.records import FROM_GPU_TO_GPU, Module
from expertd_client.tracing.stages import STAGES, stages_of

__all__ = ["by_layer", "draw", "write"]


def write(trace: Trace, path: str | Path) -> None:
    """The trace to `path`, and its picture beside it, with the suffix .svg."""
    path = Path(path)
    trace.write(path)
    path.with_suffix(".svg").write_text(draw(trace))


def draw(trace: Trace) -> str:
    """One bar for each layer."""
    bars = []
    for layer, stages in by_layer(trace).items():
        calls = [c for c in trace.finished if c.layer == layer]
        gpu = [m for m in _between_gpus(trace) if m.layer == layer]
        count, tokens = len(calls) + len(gpu), sum(c.tokens for c in calls) + sum(m.tokens for m in gpu)
        servers = len({p.server for c in calls for p in c.answers}) or 1
        label = f"layer {layer}: {count} call{'s' * (count != 1)}, {tokens:,} tokens, "
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
    for module in _between_gpus(trace):
        counts[module.layer] += 1
        sums[module.layer][FROM_GPU_TO_GPU] += module.end_ns - module.begin_ns
    gpus = {m.thread for m in _between_gpus(trace)}
    for thread, gap in attention(trace.modules):
        if not gap.name.startswith("attention"):
            continue
        layer = int(gap.name.removeprefix("attention "))
        if layer in counts and (thread in gpus or not sums[layer][FROM_GPU_TO_GPU]):  # else the host only asks for it
            sums[layer]["attention"] += gap.end_ns - gap.begin_ns
    return {n: {name: ns / 1000 / counts[n] for name, ns in sums[n].items()} for n in sorted(counts)}


def _between_gpus(trace: Trace) -> list[Module]:
    return [m for m in trace.modules if m.name == FROM_GPU_TO_GPU]
