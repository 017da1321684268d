"""deploy/helm/render.py: the chart's objects without Helm, as a person asks for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import render
from chart_kit import CHART, NEEDED, ROOT, objects

pytestmark = NEEDED
SMALL = CHART.parent / "examples" / "small.yaml"


def test_the_command_prints_the_objects_under_the_given_names(capsys):
    import yaml

    assert render.main(["experts", "inference", "-f", str(SMALL)]) == 0
    printed = [o for o in yaml.safe_load_all(capsys.readouterr().out) if o]
    with_tests = objects(yaml.safe_load(SMALL.read_text()))
    assert sorted(o["kind"] for o in printed) == sorted(kind for kind, _ in with_tests)
    names = {o["metadata"]["name"] for o in printed}
    assert "experts-expertd" in names
    assert not any("demo" in name for name in names)
    assert {o["metadata"].get("namespace", "inference") for o in printed} == {"inference"}


def test_it_runs_as_the_page_says():
    command = [sys.executable, "deploy/helm/render.py", "experts", "inference", "-f", str(SMALL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kind: StatefulSet" in done.stdout


def test_later_files_win_and_wrong_values_are_one_line(capsys, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("serve: {max-tokens: 2048}\n")
    assert render.main(["experts", "inference", "-f", str(SMALL), "-f", str(more)]) == 0
    out = capsys.readouterr().out
    assert "2048" in out
    assert "synthetic" in out, "the first file's options stay"
    more.write_text("service: {port: ninety}\n")
    assert render.main(["experts", "inference", "-f", str(more)]) == 1
    assert capsys.readouterr().err.startswith("render.py: ")
    assert render.main(["experts", "inference", "-f", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_what_it_needs_is_named(capsys, monkeypatch):
    monkeypatch.setattr(render, "PACKAGES", ("no_such_package",))
    assert render.main(["experts", "inference"]) == 2
    assert "pip install '.[deploy]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "then", "both"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ],
)
def test_files_are_merged_as_helm_does(first, then, both):
    assert render.merged(first, then) == both
