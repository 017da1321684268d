"""Prometheus' rules: of metrics, labels and values that a server has; tried by promtool; each alert explained."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from command_kit import ROOT
from prometheus_client import generate_latest

from expertd.errors import TABLE
from expertd_kernels.oracle.table import BACKENDS
from metrics_page import seen_everything, table

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: `make test` installs the extra `deploy`")
FOLDER = ROOT / "deploy" / "prometheus"
GROUPS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
RULES = [r for g in GROUPS for r in g["rules"]]
ALERTS = {r["alert"]: r for r in RULES if "alert" in r}
RECORDED = {r["record"] for r in RULES if "record" in r}
SERIES = {name: s for s in table() for name in s.names}
TARGET = {"job", "namespace", "instance", "pod", "le"}
"""Labels that a scrape adds, or a histogram has."""
NAME = r"(?<![\w:])((?:expertd|grpc_server|process)_[a-z0-9_]+)(?:\{([^}]*)\})?"


DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())
PANELS = [p for p in DASHBOARD["panels"] if p["type"] != "row"]


def plain(expression):
    """Grafana's variables as what they may stand for."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m"))


def expressions():
    yield from ((p["title"], plain(t["expr"])) for p in PANELS for t in p["targets"])
    yield from ((r.get("alert") or r["record"], r["expr"]) for r in RULES)
    adapter = yaml.safe_load((FOLDER / "adapter.yaml").read_text())["custom"]
    yield from (("adapter", r["seriesQuery"]) for r in adapter)


def selectors(expression):
    """(metric, {label: values that it is matched with}), of all in an expression."""
    bare = re.sub(r"instance:\w+:\w+", "", expression)
    for name, inside in re.findall(NAME, bare):
        matched = re.findall(r'(\w+)(?:=~|!=|!~|=)"([^"]*)"', inside)
        yield name, {label: values.split("|") for label, values in matched}


@pytest.mark.parametrize(("rule", "expression"), list(expressions()))
def test_what_is_asked_for_is_there(rule, expression):
    known = {
        "reason": set(TABLE),
        "code": {"OK", *(e.code.name for e in TABLE.values())},
        "backend": {b.name for b in BACKENDS},
    }
    for name, labels in selectors(expression):
        assert name in SERIES, f"{rule}: {name} is no metric; docs/metrics.md lists them"
        assert labels.keys() <= {*SERIES[name].labels, *TARGET}, f"{rule}: labels of {name}"
        for label, values in labels.items():
            assert not known.get(label) or set(values) <= known[label], f"{rule}: {label}"
    assert set(re.findall(r"instance:\w+:\w+", expression)) <= RECORDED


def test_selectors_are_found():
    found = list(selectors('rate(expertd_x_total{a="b", c=~"d|e"}[5m]) > 0.01 * instance:expertd_y:z and up'))
    assert found == [("expertd_x_total", {"a": ["b"], "c": ["d", "e"]})]
    assert sum(len(list(selectors(e))) for _, e in expressions()) > 12


def test_every_alert_has_its_paragraph():
    text = (ROOT / "docs/operations.md").read_text()
    heads = [h for h in re.findall(r"^### (\w+)$", text, re.MULTILINE) if h.startswith("Expertd")]
    assert heads == list(ALERTS), "docs/operations.md has the alerts in the order of the file"
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


def test_the_autoscaler_asks_for_what_the_adapter_makes():
    hpa = (ROOT / "deploy/helm/expertd/templates/hpa.yaml").read_text()
    (rule,) = yaml.safe_load((FOLDER / "adapter.yaml").read_text())["custom"]
    assert f"metric: {{name: {rule['name']['as']}}}" in hpa


@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml"), ("check", "metrics")]
)
def test_promtool(words):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus has it")
    text = generate_latest(seen_everything().registry) if words[-1] == "metrics" else None
    done = subprocess.run(["promtool", *words], cwd=FOLDER, input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_every_alert_is_tried():
    tried = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {a["alertname"] for t in tried for a in t.get("alert_rule_test", []) if a["exp_alerts"]}
    assert fired == set(ALERTS)


def test_the_dashboard_is_what_its_program_makes():
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is not installed: `make test` installs the extra `deploy`")
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "deploy/grafana/dashboard.py")
    program = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = program
    spec.loader.exec_module(program)
    assert program.made() == program.FILE.read_text(), "stale: run python deploy/grafana/dashboard.py"
    assert len(PANELS) == sum(len(panels) for _, panels in program.ROWS)


def test_the_dashboard_can_be_looked_at():
    assert len(PANELS) > 20
    assert len({p["title"] for p in PANELS}) == len(PANELS)
    defined = {v["name"] for v in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    queries = [t["expr"] for p in PANELS for t in p["targets"]] + [
        str(v["query"]) for v in DASHBOARD["templating"]["list"]
    ]
    assert {name for q in queries for name in re.findall(r"\$(\w+)", q)} <= defined
    for v in DASHBOARD["templating"]["list"][1:]:
        (metric,) = re.findall(r"\((\w+)", v["query"])
        assert v["query"].rstrip(")").rpartition(", ")[2] in {*SERIES[metric].labels, *TARGET}
    for p in PANELS:  # what is labelled in a legend is what the query keeps
        for t in p["targets"]:
            kept = {w for by in re.findall(r"by \(([^)]*)\)", t["expr"]) for w in by.split(", ")}
            assert set(re.findall(r"{{(\w+)}}", t["legendFormat"])) <= kept


def test_promtool_reads_the_queries_of_the_dashboard(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus has it")
    rules = [{"record": f"a:q{i}", "expr": e} for i, (_, e) in enumerate(expressions())]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
