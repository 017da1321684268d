"""The Grafana dashboard, from the list below: `python deploy/grafana/dashboard.py` writes dashboard.json beside it.

Needs grafana-foundation-sdk (the extra `deploy`).  Tests hold the file against this program, and the queries against
the metrics that a server has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["ROWS", "made"]

FILE = Path(__file__).with_name("dashboard.json")
CHOSEN = 'job=~"$job", instance=~"$instance"'
SOURCE = models.DataSourceRef(type_val="prometheus", uid="$source")
_FORMATS = {
    "lines": PromQueryFormat.TIME_SERIES,
    "number": PromQueryFormat.TIME_SERIES,
    "heat": PromQueryFormat.HEATMAP,
}
KINDS = {"lines": timeseries.Panel, "number": stat.Panel, "heat": heatmap.Panel}


@dataclass(frozen=True)
class Panel:
    """kind: one of KINDS; queries: (expression, legend)."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    what: str = ""
    kind: str = "lines"


def now(metric: str, by: str = "") -> str:
    """The sum of gauges."""
    return f"sum by ({by}) ({metric}{{{CHOSEN}}})"


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Of counters, a second."""
    return f"sum by ({by}) (rate({metric}{{{CHOSEN}{more}}}[$__rate_interval]))"


def mean(histogram: str, by: str) -> str:
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantiles(histogram: str) -> list[tuple[str, str]]:
    names = {0.5: "half", 0.9: "9 of 10", 0.99: "99 of 100"}
    return [(f"histogram_quantile({q}, {rate(f'{histogram}_bucket', 'le')})", name) for q, name in names.items()]


def each(expression: str, label: str = "instance") -> list[tuple[str, str]]:
    """One query with a line for each value of a label."""
    return [(expression, f"{{{{{label}}}}}")]


def number(title: str, unit: str, expression: str, legend: str = "") -> Panel:
    return Panel(title, unit, [(expression, legend)], kind="number")


_NOT_OK = rate("expertd_requests_total", more=', code!="OK"') + " / " + rate("expertd_requests_total")
_LAYERS = f"count by (backend) (expertd_backend_info{{{CHOSEN}}})"
_OF_LAYERS = rate("expertd_expert_tokens_total", "expert", ', layer=~"$layer"')

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "At a glance",
        (
            number("Servers that serve", "short", now("expertd_serving")),
            number("Requests a second", "reqps", rate("expertd_requests_total")),
            number("Tokens a second, of all layers", "short", rate("expertd_tokens_total")),
            number("Requests not answered with OK", "percentunit", _NOT_OK),
            number("Requests under way", "short", now("expertd_queued_requests")),
            number("Layers, by backend", "short", _LAYERS, "{{backend}}"),
        ),
    ),
    (
        "Requests",
        (
            Panel("By outcome", "reqps", [(rate("expertd_requests_total", "code, reason"), "{{code}} {{reason}}")]),
            Panel("By server", "reqps", each(rate("expertd_requests_total", "instance"))),
            Panel("Bytes", "Bps", each(rate("expertd_bytes_total", "direction"), "direction")),
            Panel("Wait for a batch", "s", quantiles("expertd_queue_seconds"), "Until the batch begins"),
            Panel("Calls", "s", quantiles("grpc_server_handling_seconds"), "A stream is one call"),
            Panel("Tokens under way", "short", each(now("expertd_queued_tokens", "instance"))),
        ),
    ),
    (
        "Batches",
        (
            Panel("Tokens of a batch", "short", each(mean("expertd_batch_tokens", "instance")), "Mean"),
            Panel("Requests of a batch", "short", each(mean("expertd_batch_requests", "instance")), "Mean"),
            Panel("A batch in the kernel", "s", each(mean("expertd_kernel_seconds", "backend"), "backend"), "Mean"),
            Panel(
                "Part of the time in the kernel",
                "percentunit",
                each(rate("expertd_kernel_seconds_sum", "instance")),
                "Near 1 a server is full",
            ),
            Panel("Part of the time in copies", "percentunit", each(rate("expertd_copy_seconds_sum", "instance"))),
            Panel("Sizes", "short", each(rate("expertd_batch_tokens_bucket", "le"), "le"), "Tokens", kind="heat"),
        ),
    ),
    (
        "Experts",
        (
            Panel(
                "Routes a second, by server",
                "short",
                each(rate("expertd_routes_total", "instance")),
                "The largest decides how long a layer takes",
            ),
            Panel(
                "The ten hottest experts",
                "short",
                each(f"topk(10, {_OF_LAYERS})", "expert"),
                "Of the layers chosen above; needs --expert-metrics yes",
            ),
            Panel(
                "The hottest expert against the mean",
                "short",
                each(f"max by (layer) (expertd_expert_imbalance{{{CHOSEN}}})", "layer"),
            ),
        ),
    ),
    (
        "Weights and devices",
        (
            Panel(
                "Version of the weights",
                "short",
                each(f"max by (instance) (expertd_weights_version{{{CHOSEN}}})"),
                "The same for all servers, but for the moments of an update",
            ),
            Panel(
                "Files read again",
                "short",
                [(rate("expertd_reloads_total", "what, outcome"), "{{what}} {{outcome}}")],
                "Certificates and callers; broken: those before stay in effect",
            ),
            Panel("Faults", "short", [(rate("expertd_faults_total", "instance, kind"), "{{instance}} {{kind}}")]),
            Panel(
                "Routes a second, by device of a server",
                "short",
                [(rate("expertd_part_routes_total", "instance, device"), "{{instance}} {{device}}")],
                "Of servers with several devices",
            ),
            Panel(
                "GPU",
                "percentunit",
                [(f"max by (instance, of) (expertd_gpu_utilization_ratio{{{CHOSEN}}})", "{{instance}} {{of}}")],
                "NVIDIA, with the extra nvml",
            ),
            Panel(
                "GPU memory",
                "bytes",
                [(now("expertd_gpu_memory_bytes", "instance, what"), "{{instance}} {{what}}")],
                "Of all processes",
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel("Resident memory", "bytes", each(now("process_resident_memory_bytes", "instance"))),
            Panel("Cores in use", "short", each(rate("process_cpu_seconds_total", "instance"))),
            Panel(
                "The boot, by stage",
                "s",
                [(now("expertd_boot_seconds", "instance, stage"), "{{instance}} {{stage}}")],
            ),
        ),
    ),
)


def made() -> str:
    """The dashboard as Grafana imports it."""
    board = (
        dashboard.Dashboard("expertd")
        .uid("expertd")
        .description("Servers of expertd: requests, batches, experts. docs/operations.md says what to do.")
        .tags(["expertd"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    for name, query in (
        ("job", "label_values(expertd_serving, job)"),
        ("instance", 'label_values(expertd_serving{job=~"$job"}, instance)'),
        ("layer", f"label_values(expertd_tokens_total{{{CHOSEN}}}, layer)"),
    ):
        board.with_variable(_variable(name, query))
    for title, panels in ROWS:
        board.with_row(dashboard.Row(title))
        for p in panels:
            board.with_panel(_panel(p, 24 // (6 if p.kind == "number" else 3)))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    refreshed = models.VariableRefresh.ON_TIME_RANGE_CHANGED
    found = dashboard.QueryVariable(name).query(query).datasource(SOURCE).refresh(refreshed)
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    found.multi(True).include_all(True).all_value(".*").current(everything)
    return found.sort(models.VariableSort.NUMERICAL_ASC)


def _panel(p: Panel, width: int) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    built = KINDS[p.kind]().title(p.title).description(p.what).unit(p.unit).datasource(SOURCE)
    for expression, legend in p.queries:
        query = prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)
        built.with_target(query.format(_FORMATS[p.kind]))
    return built.height(5 if p.kind == "number" else 8).span(width)


def main() -> int:
    FILE.write_text(made())
    return 0


if __name__ == "__main__":
    sys.exit(main())
