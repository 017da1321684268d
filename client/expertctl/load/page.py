"""A report as one HTML file with plots: nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from expertctl.load.series import quantile_curve, slices
from expertctl.load.show import SERVER_COLUMNS, Outcome, describe_plan, server_rows, settings_text, time_text, warnings

__all__ = ["NO_PLOTLY", "page"]

NO_PLOTLY = "it needs plotly, which is not installed: pip install plotly"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;white-space:nowrap;"
    "border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}"
)
_LAYOUT = {"template": "plotly_white", "height": 420, "margin": {"l": 60, "r": 60, "t": 20, "b": 50}}
_STAGES = ("queue_ns", "decode_ns", "copy_in_ns", "kernel_ns", "copy_out_ns", "encode_ns")


def page(o: Outcome) -> str:
    """The document, by plotly."""
    import plotly.io

    servers = server_rows(o.runs)
    stages = "Time in the server that answered last" if servers else "Time in the server"
    figures = [("Latency by percentile", _quantiles(o)), ("Over time", _times(o)), (stages, _stages(o))]
    if len(o.runs) > 1:
        figures.insert(0, ("Latency and throughput", _sweep(o)))
    if o.slo is not None:
        figures.insert(0, (f"Is {o.slo.slo.text} met?", _trials(o)))
    parts = [
        f"<h2>{escape(title)}</h2>"
        + plotly.io.to_html(figure, full_html=False, include_plotlyjs=n == 0, config={"displaylogo": False})
        for n, (title, figure) in enumerate((t, f) for t, f in figures if f.data)
    ]
    told = {k: settings_text(o, k) for k in o.settings}
    settings = ", ".join(f"{k.replace('_', ' ')}: {v}" for k, v in told.items() if v not in (None, "", False))
    said = f"<p><b>{escape(o.slo.sentence())}</b></p>" if o.slo is not None else ""
    by_server = f"<h2>Answers by server</h2>{_table(SERVER_COLUMNS, servers)}" if servers else ""
    said += "".join(f"<p><b>{escape(text)}</b></p>" for text in warnings(o.runs))
    cut = "<p><b>Interrupted: the report has the requests until then.</b></p>" if o.interrupted else ""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>expertctl load {escape(o.address)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>expertctl load {escape(o.address)}</h1><p>{escape(settings)}</p>"
        f"{said}{cut}{_runs(o)}{by_server}{''.join(parts)}</body></html>\n"
    )


def _runs(o: Outcome) -> str:
    names = ("load", "answered", "failed", "requests/s", "tokens/s", "mean", "p50", "p90", "p99", "p99.9", "max")
    rows = []
    for run in o.runs:
        r, s = run.report, run.report.latency
        counts = (f"{r.answered:,}", f"{r.failed:,}", f"{r.requests_per_s:,.1f}", f"{r.tokens_per_s:,.1f}")
        times = (time_text(v) for v in (s.mean_s, s.p50_s, s.p90_s, s.p99_s, s.known_p999_s, s.max_s))
        rows.append((describe_plan(run.plan), *counts, *times))
    return _table(names, rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(x: str, y: str, **axes: Any) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(**_LAYOUT)
    figure.update_xaxes(title=x, **{k: v for k, v in axes.items() if k != "log_y"})
    figure.update_yaxes(title=y, rangemode="tozero")
    if axes.get("log_y"):
        figure.update_yaxes(type="log", dtick="D2")
    return figure


def _quantiles(o: Outcome) -> Any:
    marks = [1, 2, 10, 100, 1000, 10_000, 100_000]
    figure = _figure("percentile", "ms", type="log", tickvals=marks, log_y=True,
                     ticktext=["0", "50", "90", "99", "99.9", "99.99", "99.999"])  # fmt: skip
    for run in o.runs:
        x, y = quantile_curve(np.asarray(run.report.raw.latencies_s))
        if x:
            figure.add_scatter(x=x, y=[v / 1e3 for v in y], mode="lines", name=describe_plan(run.plan))
    return figure


def _times(o: Outcome) -> Any:
    """Latencies above, rates below; a load has one colour in both."""
    import plotly.express
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.64, 0.36], vertical_spacing=0.06)
    figure.update_layout(_LAYOUT | {"height": 560})
    figure.update_yaxes(title="ms", type="log", dtick="D2", row=1)
    figure.update_yaxes(title="requests/s", rangemode="tozero", row=2)
    figure.update_xaxes(title="seconds", row=2)
    colours = plotly.express.colors.qualitative.Plotly
    for n, run in enumerate(o.runs):
        raw, name, colour = run.report.raw, describe_plan(run.plan), colours[n % len(colours)]
        found = slices(raw.ends_s, raw.latencies_s, raw.failures_s)
        at = [(s.begin_s + s.end_s) / 2 for s in found]
        for quantile, dash in (("p50_us", "solid"), ("p99_us", "dot")):
            y = [getattr(s, quantile) / 1e3 or None for s in found]
            line = {"dash": dash, "color": colour}
            figure.add_scatter(x=at, y=y, mode="lines", name=f"{name}: {quantile[:3]}", line=line, row=1, col=1)
        figure.add_scatter(x=at, y=[s.rate for s in found], mode="lines", name=name, line={"color": colour},
                           showlegend=False, row=2, col=1)  # fmt: skip
    return figure


def _stages(o: Outcome) -> Any:
    figure = _figure("microseconds, on average", "")
    figure.update_layout(barmode="stack", height=160 + 40 * len(o.runs))
    figure.update_yaxes(type="category", autorange="reversed")  # the first load on top, as in the table
    for stage in _STAGES:
        x = [getattr(run.report.server, stage) / 1e3 for run in o.runs]
        figure.add_bar(x=x, y=[describe_plan(run.plan) for run in o.runs], orientation="h", name=stage[:-3])
    return figure


_LINES = {"p50_s": "p50", "p99_s": "p99", "known_p999_s": "p99.9"}


def _sweep(o: Outcome) -> Any:
    figure = _figure("requests/s", "ms", log_y=True)
    x = [run.report.requests_per_s for run in o.runs]
    for name in ("p50_s", "p99_s", "known_p999_s"):
        seconds = [getattr(run.report.latency, name) for run in o.runs]
        y = [None if s is None else s * 1e3 for s in seconds]
        text = [describe_plan(run.plan) for run in o.runs]
        figure.add_scatter(x=x, y=y, mode="lines+markers", name=_LINES[name], text=text)
    return figure


def _trials(o: Outcome) -> Any:
    assert o.slo is not None
    found, name = o.slo, o.slo.slo.text.split(" ")[0]
    figure = _figure("requests/s", f"{name}, ms", log_y=True)
    for keeps, colour in ((True, "#2f7d4f"), (False, "#a33")):
        some = [t for t in found.trials if t.keeps(found.slo) is keeps]
        figure.add_scatter(x=[t.rate for t in some], y=[t.quantile_s * 1e3 for t in some], mode="markers",
                           name="met" if keeps else "not met", marker={"color": colour, "size": 9})  # fmt: skip
    figure.add_hline(y=found.slo.bound_s * 1e3, line={"dash": "dash", "color": "#777"})
    return figure
