"""The chart as Helm renders it, in a process of its own: helm-python-sdk carries Helm's library, not its command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "expertd"
PACKAGES = ("helm_python", "kubernetes_validate", "yaml")
NEEDED = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)),
    reason="helm-python-sdk, kubernetes-validate and PyYAML are not installed: `make test` installs the extra `deploy`",
)
_RENDER = """
import json, sys
import helm_python as helm
chart, values, release = json.load(sys.stdin)
try:
    with helm.Chart.load(chart) as c:
        c.validate_schema(values)
        print(json.dumps({"files": c.render(values, name=release, namespace="prod"), "lint": helm.lint(chart)}))
except helm.HelmError as e:
    print(json.dumps({"error": str(e)}))
"""


def helm(values: dict[str, Any], release: str = "demo") -> dict[str, Any]:
    """{"files": {name: text}, "lint": findings} or {"error": what Helm said}."""
    done = subprocess.run(
        [sys.executable, "-c", _RENDER],
        input=json.dumps([str(CHART), values, release]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def objects(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> the object, of all that is rendered."""
    import yaml

    answer = helm(values)
    assert "error" not in answer, answer["error"]
    found = [
        o
        for name, text in answer["files"].items()
        if not name.endswith("NOTES.txt")
        for o in yaml.safe_load_all(text)
        if o
    ]
    return {(o["kind"], o["metadata"]["name"]): o for o in found}
