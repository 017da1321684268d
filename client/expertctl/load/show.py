"""Reports of runs: tables for people, JSON for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from expertctl.common.counts import counted
from expertctl.common.percentiles import Summary
from expertctl.load.by_server import ServerAnswers
from expertctl.load.departures import LoadPlan
from expertctl.load.generator import LoadReport
from expertctl.load.series import hdr_encoded, slices
from expertctl.load.slo import Found
from expertd.common.ranges import format_ranges
from expertd.common.tables import duration, print_table

__all__ = [
    "SERVER_COLUMNS",
    "Outcome",
    "Run",
    "as_json",
    "carried_text",
    "describe_plan",
    "server_rows",
    "settings_text",
    "show",
    "summary_us",
    "time_text",
    "transport_text",
    "warnings",
]

TRANSPORTS = {
    "inline": "gRPC",
    "unary": "gRPC, one call for each request",
    "shm": "shared memory",
    "tcp": "TCP",
    "cuda_ipc": "CUDA IPC",
}
_TOLD = ("servers", "transport", "messages", "routing")
SERVER_COLUMNS = ("load", "server", "backend", "sub-requests", "routes", "retried", "p50", "p99")
"""Of server_rows()."""
_QUANTILES = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


@dataclass(frozen=True)
class Run:
    plan: LoadPlan
    report: LoadReport


@dataclass(frozen=True)
class Outcome:
    """What one command found.  settings: what holds for all of its runs, by name; interrupted: by Ctrl-C, so that the
    last run is not whole, and others were not begun."""

    address: str
    layers: Sequence[int]
    settings: dict[str, Any]
    runs: Sequence[Run]
    slo: Found | None = None
    interrupted: bool = False


def as_json(o: Outcome) -> dict[str, Any]:
    """Durations in microseconds, the server's in nanoseconds: docs/load.md lists the keys."""
    return {
        "address": o.address,
        **o.settings,
        "interrupted": o.interrupted,
        "slo": None if o.slo is None else _slo_json(o.slo),
        "runs": [_run_json(run, o.layers) for run in o.runs],
    }


def _run_json(run: Run, layers: Sequence[int]) -> dict[str, Any]:
    plan, report = run.plan, run.report
    raw = report.raw
    return {
        "plan": _plan_json(plan, layers),
        "wall_s": report.wall_s,
        "answered": report.answered,
        "failed": report.failed,
        "errors": report.errors,
        "first_failure": None if report.first_failure is None else asdict(report.first_failure),
        "transports": report.transports,
        "generator_late": None if report.behind is None else asdict(report.behind),
        "requests_per_s": report.requests_per_s,
        "tokens_per_s": report.tokens_per_s,
        "routes_computed": report.routes_computed,
        "latency_us": summary_us(report.latency),
        "lateness_us": summary_us(report.lateness) if plan.open else None,
        "server": asdict(report.server),
        "backends": report.backends,
        **({"by_server": [_server_json(one) for one in report.by_server]} if report.by_server else {}),
        "series": [asdict(s) for s in slices(raw.ends_s, raw.latencies_s, raw.failures_s)],
        "hdr": hdr_encoded(raw.latencies_s),
    }


def _plan_json(plan: LoadPlan, layers: Sequence[int]) -> dict[str, Any]:
    """What the other loop has is null."""
    told = {k: v for k, v in asdict(plan).items() if k not in ("schedule", "poisson")}
    arrivals = "recorded" if plan.schedule is not None else "poisson" if plan.poisson else "fixed"
    return {
        **told,
        "loop": "open" if plan.open else "closed",
        "concurrency": None if plan.open else plan.concurrency,
        "arrivals": arrivals if plan.open else None,
        "layers": list(layers),
    }


def _server_json(one: ServerAnswers) -> dict[str, Any]:
    return {**{k: v for k, v in asdict(one).items() if k != "latency"}, "latency_us": summary_us(one.latency)}


def _slo_json(found: Found) -> dict[str, Any]:
    return {
        "slo": found.slo.text,
        "quantile": found.slo.quantile,
        "bound_us": found.slo.bound_s * 1e6,
        "rate": found.rate,
        "late_share": found.share,
        "late_share_at_most": found.at_most,
        "confidence": 0.95,
        "confirmed": found.confirmed,
        "generator_limited": found.limited,
        "trials": [
            {
                "rate": t.rate,
                "sent": t.sent,
                "late": t.late,
                "quantile_us": t.quantile_s * 1e6 if math.isfinite(t.quantile_s) else None,
                "generator_late": t.behind or None,
                "met": t.keeps(found.slo),
            }
            for t in found.trials
        ],
    }


def summary_us(s: Summary) -> dict[str, float | None]:
    """p999: null of fewer durations than it needs."""
    values = {**asdict(s), "p999_s": s.known_p999_s}
    count = values.pop("count")
    return {
        "count": count,
        **{k.removesuffix("_s"): None if v is None else round(v * 1e6, 1) for k, v in values.items()},
    }


def describe_plan(plan: LoadPlan) -> str:
    if plan.schedule is not None:
        return "as recorded"
    if plan.rate is None:
        return counted(plan.concurrency, "client")
    rate = f"{plan.rate:,.6g}" if plan.rate_to is None else f"{plan.rate:g} to {plan.rate_to:g}"
    return f"{rate} requests/s"


def transport_text(transport: str | Mapping[str, str]) -> str:
    """For people: "shared memory"; of several servers by address, where they differ."""
    if isinstance(transport, str):
        return TRANSPORTS.get(transport, transport)
    names = set(transport.values())
    if len(names) == 1:
        return transport_text(names.pop())
    return ", ".join(f"{server}: {transport_text(name)}" for server, name in transport.items())


def carried_text(runs: Sequence[Run]) -> str:
    """ "shared memory 99,762, gRPC 238": requests by transport; "" where there are not several."""
    counts = _carried(runs)
    return "" if len(counts) < 2 else ", ".join(f"{transport_text(name)} {n:,}" for name, n in counts.most_common())


def _carried(runs: Sequence[Run]) -> Counter[str]:
    counts = Counter[str]()
    for run in runs:
        counts.update(run.report.transports)
    return counts


def settings_text(o: Outcome, key: str) -> Any:
    """A setting for people; the transport is the one that carried the requests, or their numbers by transport."""
    if key != "transport":
        return o.settings[key]
    counts = _carried(o.runs)
    if len(counts) == 1:
        return transport_text(next(iter(counts)))
    return f"{carried_text(o.runs)} (requests)" if counts else transport_text(o.settings[key])


def time_text(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def show(out: Console, o: Outcome) -> None:
    """For people."""
    if len(o.runs) == 1:
        _show_run(out, o.runs[0], o)
    elif o.runs and o.slo is None:
        print_table(out, _table_of_runs(o))
        for text in warnings(o.runs):
            out.print(text, markup=False, style="bold")
        _show_servers(out, o.runs)
    if o.slo is not None:
        print_table(out, _table_of_trials(o.slo))
        out.print(o.slo.sentence(), markup=False, style="bold")
    if o.interrupted:
        out.print("interrupted: the report has the requests until then", style="bold")


def _title(o: Outcome) -> str:
    plan = o.runs[0].plan
    tokens = f"{counted(plan.tokens, 'token')} per request, " if plan.tokens else ""
    told = [settings_text(o, k) for k in o.settings if k in _TOLD]
    if "speed" in o.settings:
        told.append(f"{o.settings['speed']:g} times as fast")
    more = "".join(f", {v}" for v in told if v != "uniform")
    return f"{tokens}layer{'s' * (len(o.layers) != 1)} {format_ranges(o.layers)}{more}"


def _show_run(out: Console, run: Run, o: Outcome) -> None:
    plan, r = run.plan, run.report
    loop = "open loop" if plan.open else "closed loop"
    gaps = f", {'poisson' if plan.poisson else 'fixed'} gaps" if plan.rate is not None else ""
    title = f"{loop}, {describe_plan(plan)}{gaps}; {_title(o)}"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("", *_QUANTILES):
        table.add_column(name, justify="right" if name else "left")
    for name, s in (("latency", r.latency), *((("lateness", r.lateness),) if plan.open else ())):
        table.add_row(name, *_cells(s))
    print_table(out, table)
    rows = {
        "answered": f"{r.answered:,} in {r.wall_s:.2f} s: {r.requests_per_s:,.1f} requests/s,"
        f" {r.tokens_per_s:,.1f} tokens/s",
        "failed": f"{r.failed:,}" + "".join(f", {reason} {n:,}" for reason, n in r.errors.items()),
        **failure_row(r),
        "routes": f"{r.routes_computed:,} computed",
        "last server" if r.by_server else "server": ", ".join(
            f"{name[:-3]} {duration(ns * 1e-9)}" for name, ns in asdict(r.server).items() if name.endswith("_ns")
        ),
        "batch": f"{r.server.batch_tokens:.1f} tokens of {r.server.batch_requests:.1f} requests on average; backend "
        + (", ".join(r.backends) or "unknown"),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(name, value)
    out.print(grid, markup=False)
    for text in warnings([run]):
        out.print(text, markup=False, style="bold")
    _show_servers(out, [run])


def failure_row(r: LoadReport) -> dict[str, str]:
    """A row of the report, if requests failed."""
    first = r.first_failure
    return {} if first is None else {"first failure": f"after {first.after_s:.2f} s: {first.text}"}


def warnings(runs: Sequence[Run]) -> list[str]:
    """A line for each run whose load was not sent as planned."""
    return [
        f"generator late: offered {run.report.behind.offered_per_s:,.0f} requests/s, sent"
        f" {run.report.behind.sent_per_s:,.0f}; the latency includes the generator's delay"
        for run in runs
        if run.report.behind is not None
    ]


def _show_servers(out: Console, runs: Sequence[Run]) -> None:
    """A line for each server of a cluster, by load where there are several."""
    if not any(run.report.by_server for run in runs):
        return
    table = Table(title="answers by server", title_justify="left", show_edge=False, pad_edge=False)
    for name in SERVER_COLUMNS[len(runs) == 1 :]:
        table.add_column(name, justify="left" if name in ("load", "server") else "right")
    for cells in server_rows(runs):
        table.add_row(*cells[len(runs) == 1 :])
    print_table(out, table)


def server_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """What each server of a cluster answered in each run, under SERVER_COLUMNS; none where one server was called."""
    return [
        (
            describe_plan(run.plan),
            one.server,
            ", ".join(one.backends) or "none",
            *(f"{n:,}" for n in (one.parts, one.routes, one.helped)),
            *(duration(v) for v in (one.latency.p50_s, one.latency.p99_s)),
        )
        for run in runs
        for one in run.report.by_server
    ]


def _table_of_runs(o: Outcome) -> Table:
    loop = "open loop" if o.runs[0].plan.open else "closed loop"
    table = Table(title=f"{loop}; {_title(o)}", title_justify="left", show_edge=False, pad_edge=False)
    for name in ("load", "requests/s", "tokens/s", "p50", "p99", "p99.9", "max", "failed"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for run in o.runs:
        r, s = run.report, run.report.latency
        times = (time_text(v) for v in (s.p50_s, s.p99_s, s.known_p999_s, s.max_s))
        rates = f"{r.requests_per_s:,.1f}", f"{r.tokens_per_s:,.0f}"
        table.add_row(describe_plan(run.plan), *rates, *times, f"{r.failed:,}")
    return table


def _table_of_trials(found: Found) -> Table:
    table = Table(title=f"is {found.slo.text} met?", title_justify="left", show_edge=False, pad_edge=False)
    for name in ("requests/s", "sent", "late", found.slo.text.split(" ")[0], "met"):
        table.add_column(name, justify="right")
    for t in found.trials:
        met = "generator late" if t.behind else "yes" if t.keeps(found.slo) else "no"
        table.add_row(f"{t.rate:,.1f}", f"{t.sent:,}", f"{t.late:,}", duration(t.quantile_s), met)
    return table


def _cells(s: Summary) -> list[str]:
    return [time_text(v) for v in (s.mean_s, s.p50_s, s.p90_s, s.p95_s, s.p99_s, s.known_p999_s, s.max_s)]
