"""Print what the chart would create, without Helm: `python deploy/helm/render.py RELEASE NAMESPACE -f FILE`.

Needs the extra `deploy` (`pip install '.[deploy]'`): helm-python-sdk carries Helm's library, not its command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CHART", "PACKAGES", "helm", "main", "merged"]

CHART = Path(__file__).parent / "expertd"
PACKAGES = ("helm_python", "yaml")
_RENDER = """
import json, sys
import helm_python as helm
chart, values, release, namespace = json.load(sys.stdin)
try:
    with helm.Chart.load(chart) as c:
        c.validate_schema(values)
        print(json.dumps({"files": c.render(values, name=release, namespace=namespace), "lint": helm.lint(chart)}))
except helm.HelmError as e:
    print(json.dumps({"error": str(e)}))
"""


def helm(values: Mapping[str, Any], release: str, namespace: str) -> dict[str, Any]:
    """{"files": {name: text}, "lint": findings} or {"error": what Helm said}.  Helm runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _RENDER],
        input=json.dumps([str(CHART), values, release, namespace]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"helm-python-sdk ended with {done.returncode}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges two files of values: maps by name, everything else is replaced."""
    out = dict(first)
    for name, value in then.items():
        before = out.get(name)
        out[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Print the objects that the chart would create; needs no Helm.", allow_abbrev=False
    )
    parser.add_argument("release", help="name of the release, such as experts")
    parser.add_argument("namespace", help="namespace of the release, such as inference")
    parser.add_argument(
        "-f", "--values", action="append", default=[], type=Path, metavar="FILE", help="values; later files win"
    )
    args = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        print(f"render.py: {' and '.join(missing)} not found: pip install '.[deploy]'", file=sys.stderr)
        return 2
    import yaml

    values: dict[str, Any] = {}
    try:
        for path in args.values:
            values = merged(values, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError) as e:
        print(f"render.py: {e}", file=sys.stderr)
        return 2
    found = helm(values, args.release, args.namespace)
    if "error" in found:
        print(f"render.py: {found['error']}", file=sys.stderr)
        return 1
    for name, text in sorted(found["files"].items()):
        if not name.endswith("NOTES.txt") and text.strip():
            print(f"---\n# Source: {name}\n{text.strip().removeprefix('---').strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
