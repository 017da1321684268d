"""The chart as Helm renders it, by deploy/helm/render.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import render
from render import CHART

__all__ = ["CHART", "NEEDED", "ROOT", "helm", "objects"]

ROOT = Path(__file__).parents[2]
NEEDED = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, (*render.PACKAGES, "kubernetes_validate"))),
    reason="helm-python-sdk, kubernetes-validate and PyYAML are not installed: `make test` installs the extra `deploy`",
)


def helm(values: dict[str, Any], release: str = "demo") -> dict[str, Any]:
    """{"files": {name: text}, "lint": findings} or {"error": what Helm said}."""
    return render.helm(values, release, "prod")


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
